"""Norms that belong to steps of other shapes: the sum of absolute values for steps of signs, the nuclear norm for Muon.

A step that is bounded in some norm gains at most the gradient's dual norm. Steps bounded element by element, as those
of signSGD, Lion and nearly Adam, have the dual norm Σ|g_j|. Steps bounded in spectral norm, as those of Muon, have the
nuclear norm, the sum of singular values. docs/batch-size.md derives the batch size that each speaks of.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from sonde.batch_size.taps.metric import CHUNK, Adds
from sonde.batch_size.taps.squared_norms import ROW, Part, absolute_sum, norms
from sonde.batch_size.taps.tap import Problem
from sonde.parallel.devices import widened, zero_sums

_ITERATIONS = {torch.float64: 20, torch.float32: 14}
"""Newton–Schulz iterations. More of them would let rounding grow: negative eigenvalues, by 2.25 in each."""
_MATRICES_HELD = 5
"""Square matrices of the smaller dim that are held at once, in the dtype of sums."""


class SignMetric:
    """‖g‖₁ = Σ |g_j|. Norms of parameters add up, and their sum is squared."""

    name = "sign"
    adds: Adds = "norms"

    def parts(self, indices: Sequence[int], grads: Sequence[Tensor]) -> list[Part]:
        """Σ |g_j| of each gradient; small ones share a kernel."""
        small: dict[int, Tensor] = {}
        parts: list[Part] = []
        for i, grad in zip(indices, grads, strict=True):
            if grad.is_sparse or not grad.numel() or (grad.is_cpu and grad.numel() > ROW):
                parts.append(((i,), absolute_sum(grad)))
            else:
                small[i] = grad
        return [*parts, (tuple(small), widened(norms(list(small.values()), 1)))] if small else parts

    def part_of_range(self, index: int, values: Tensor, start: int, shape: torch.Size, *, is_known: bool) -> Part:
        """Σ |g_j| of some elements."""
        return (index,), absolute_sum(values)

    def excess_of_sum(self, index: int, a: Tensor, b: Tensor) -> Tensor:
        """Σ |a_j + b_j| − |a_j| − |b_j|."""
        total = zero_sums(device=a.device)
        # Chunk by chunk, so that no temporary has the size of a gradient.
        for x, y in zip(a.reshape(-1).split(CHUNK), b.reshape(-1).split(CHUNK), strict=True):
            total += absolute_sum(x + y) - absolute_sum(x) - absolute_sum(y)
        return total

    def take_problems(self) -> list[Problem]:
        """Always empty: every gradient has a norm."""
        return []


class SpectralMetric:
    """The nuclear norm of each matrix, the sum of its singular values. Norms add up, and their sum is squared.

    Every matrix has to be whole on one rank: attach refuses others.

    Args:
        matrices: indices of the parameters that count; the others are left out.
    """

    name = "spectral"
    adds: Adds = "norms"

    def __init__(self, matrices: Collection[int]) -> None:
        self._matrices = frozenset(matrices)

    def parts(self, indices: Sequence[int], grads: Sequence[Tensor]) -> list[Part]:
        """The nuclear norm of each matrix that counts."""
        return [((i,), nuclear_norm(g)) for i, g in zip(indices, grads, strict=True) if i in self._matrices]

    def part_of_range(self, index: int, values: Tensor, start: int, shape: torch.Size, *, is_known: bool) -> Part:
        """Not for some elements of a matrix."""
        raise AssertionError("a matrix in ranges is refused at attach")

    def excess_of_sum(self, index: int, a: Tensor, b: Tensor) -> Tensor:
        """‖a + b‖ − ‖a‖ − ‖b‖."""
        if index not in self._matrices:
            return zero_sums(device=a.device)
        return nuclear_norm(a, b) - nuclear_norm(a) - nuclear_norm(b)

    def take_problems(self) -> list[Problem]:
        """Always empty."""
        return []


def nuclear_norm_bytes(shape: Sequence[int], dtype: torch.dtype) -> int:
    """The memory that `nuclear_norm` takes for a matrix of a shape, when sums are kept in a dtype."""
    return _MATRICES_HELD * min(shape) ** 2 * dtype.itemsize


def nuclear_norm(matrix: Tensor, plus: Tensor | None = None) -> Tensor:
    """The sum of the singular values of a matrix, without waiting for the device.

    It is computed from the matrix times its transpose, of the smaller size n: five matrices [n, n] are held. On the CPU
    LAPACK gives the eigenvalues. On other devices LAPACK's like would wait for the device, so that
    `nuclear_norm_by_iteration` is used, with the error that it states.

    Args:
        matrix: [rows, columns]; fp16, bf16, fp32 or fp64.
        plus: is added to the matrix first, if given; like it.

    Returns:
        0-dim, in the dtype that sums are kept in; NaN for a matrix that is not finite.
    """
    gram = _gram(matrix, plus)
    if gram.is_cpu and gram.dtype == torch.float64:
        # LAPACK refuses numbers that are not finite: they are put back afterwards.
        size = gram.diagonal().sum()
        is_finite = torch.isfinite(size) & torch.isfinite(gram).all()
        eigenvalues = torch.linalg.eigvalsh(torch.where(is_finite, gram, 0.0))
        return torch.where(is_finite, eigenvalues.clamp_(min=0.0).sqrt_().sum(), torch.nan)
    return nuclear_norm_by_iteration(gram)


def _gram(matrix: Tensor, plus: Tensor | None) -> Tensor:
    """The matrix times its transpose, from the side that gives the smaller; [n, n]."""
    is_wide = matrix.shape[0] <= matrix.shape[1]
    n = min(matrix.shape)
    gram = zero_sums(n, n, device=matrix.device)
    # Some rows or columns at a time, so that no temporary has the size of a gradient.
    width, dim = max(CHUNK // max(n, 1), 1), 1 if is_wide else 0
    others = [None] * len(matrix.split(width, dim)) if plus is None else plus.split(width, dim)
    for part, more in zip(matrix.split(width, dim), others, strict=True):
        wide = widened(part) if more is None else widened(part) + more
        gram.addmm_(wide, wide.t()) if is_wide else gram.addmm_(wide.t(), wide)
    return gram


def nuclear_norm_by_iteration(gram: Tensor) -> Tensor:
    """Σ √λ over the eigenvalues λ of a matrix A = XXᵀ, by Newton–Schulz iterations that use only products of matrices.

    X ← X (3 − XᵀX)/2 drives each singular value x of X, at most 1 at the start, to 1. Written for A and the product Q
    of all factors (3 − A)/2, the sum of singular values is tr(A Q) at the end. A value that began at x has then
    p(x) ≤ 1 in place of 1, and counts as x p(x). With s = (Σλ²)^¼, which is at least the largest singular value, each
    singular value comes out too small by at most 8.2e-5 s, and by less than 1e-6 of itself if it is above 1.3e-3 s.
    In fp32 it is too small by at most 9.4e-4 s, and by less than 1e-6 of itself above 1.5e-2 s.

    Args:
        gram: A, symmetric, with eigenvalues ≥ 0; [n, n]; fp64, or fp32 on devices without it.
    """
    s = torch.linalg.matrix_norm(gram).clamp(min=torch.finfo(gram.dtype).tiny)  # ≥ the largest eigenvalue
    identity_three = 3.0 * torch.eye(len(gram), dtype=gram.dtype, device=gram.device)
    scaled = gram / s
    a, q = scaled.clone(), torch.eye(len(gram), dtype=gram.dtype, device=gram.device)
    for _ in range(_ITERATIONS[gram.dtype]):
        factor = (identity_three - a).mul_(0.5)
        q = q @ factor
        a = factor @ a @ factor
    norm: Tensor = (scaled * q).sum() * s.sqrt()
    return norm
