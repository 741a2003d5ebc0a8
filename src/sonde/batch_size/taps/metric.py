"""The norms in which gradients are measured: one value of the metric axis for each, and how they are taken together.

A step that is bounded in some norm gains at most the gradient's dual norm. Steps bounded element by element, as those
of signSGD, Lion and nearly Adam, have the dual norm Σ|g_j|. Steps bounded in spectral norm, as those of Muon, have the
nuclear norm, the sum of singular values. docs/noise-scale.md derives the batch size that each speaks of.

Norms are taken in fp32 or better, without copies of gradient size, and summed in fp64: averages over windows need no
more. A clip uses another norm: `power_sums.py` sums it in fp64.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from sonde.parallel.devices import to_device, widened, zero_sums
from sonde.parallel.placements import local_tensor

MetricName = Literal["euclidean", "adam", "sign", "spectral"]
Adds = Literal["squares", "norms"]
"""What adds up over parameters in a metric: squared norms, or the norms themselves, whose sum is squared."""

# torch's fp32 reduction over a flat CPU tensor keeps one running sum per vector lane, and is off by 8e-4 at 16M
# elements. Norms of rows of this length, combined in fp64, are off by 4e-9 and no slower: they vectorise along the row.
ROW = 4096
_SHORTEST_ROW, _LONGEST_ROW = 256, 4 * ROW  # a matrix's own rows of these lengths serve as well
# A dot product would be cheaper, but BLAS adds in an order that depends on the memory's alignment. Replicas would get
# norms that differ in the last bit, clip by different factors and drift apart.

LEAST_SQ_NORM = 1e-30
"""Squared norm per element below which squares may have lost digits to underflow in fp32."""

Part = tuple[tuple[int, ...], Tensor]
"""Owners and values, such as norms of rows: a single owner has all the values; otherwise each owner has one."""

_CHUNK = 2**18
"""Elements worked on at a time, so that no temporary is of gradient size."""
_ITERATIONS = {torch.float64: 20, torch.float32: 14}
"""Newton–Schulz iterations. More of them would let rounding grow: negative eigenvalues, by 2.25 in each."""
_MATRICES_HELD = 5
"""Square matrices of the smaller dim that are held at once, in the dtype of sums."""


class GradientMetric(Protocol):
    """A norm of gradients.

    Its *terms* add up over elements, parameters and ranks: squares, or absolute values. A part holds their roots, if
    squares add up, or the terms themselves. A gradient without a norm has NaN.
    """

    name: str
    """The name that `attach(metric=...)` takes."""
    adds: Adds

    def parts(self, indices: Sequence[int], grads: Sequence[Tensor], start: int | None = None) -> list[Part]:
        """The parts of several gradients on one device, or of what this rank holds of them, in few kernels.

        Args:
            indices: of the parameters.
            grads: their gradients.
            start: of a single gradient's elements that follow each other, 1-D, the place of the first; None for whole
                gradients.
        """


class GradientTerms:
    """The parts of one gradient in every metric, until all parameters have come.

    Args:
        metrics: of the probe.
        n_parameters: how many there are.
        device: of the sums.
    """

    def __init__(self, metrics: Sequence[GradientMetric], n_parameters: int, device: torch.device) -> None:
        self._metrics, self._n, self._device = metrics, n_parameters, device
        self._parts: defaultdict[str, list[Part]] = defaultdict(list)

    def take(self, indices: Sequence[int], grads: Sequence[Tensor], start: int | None = None) -> list[Tensor]:
        """Add gradients on one device, as `GradientMetric.parts` takes them.

        Returns:
            What was computed, for whoever manages streams.
        """
        results = []
        for metric in self._metrics:
            for part in metric.parts(indices, grads, start):
                self._parts[metric.name].append(part)
                results.append(part[1])
        return results

    def sum(self) -> Tensor:
        """The terms, 0 for a parameter without a part; [metrics, parameters]."""
        terms = []
        for metric in self._metrics:
            squares = metric.adds == "squares"
            terms.append(add_parts(self._n, self._parts[metric.name], self._device, squares=squares))
        return torch.stack(terms)


def norm_parts(indices: Sequence[int], grads: Sequence[Tensor], order: int) -> list[Part]:
    """The norms of several gradients, or of their rows, in few kernels where launches are the main cost.

    Args:
        indices: the owner of each gradient.
        grads: on one device; fp16, bf16, fp32 or fp64; strided or sparse COO (duplicates are summed first).
        order: 2 for the 2-norm, 1 for the sum of absolute values.

    Returns:
        Parts for `add_parts`.
    """
    parts: list[Part] = []
    small: dict[int, Tensor] = {}
    dtypes = set()
    for i, grad in zip(indices, grads, strict=True):
        if grad.is_sparse or (grad.is_cpu and grad.numel() > ROW):
            parts.append(((i,), norms_of_rows(grad, order)))
        else:
            small[i] = grad
            dtypes.add(grad.dtype)
    if small:
        dtype = torch.float64 if torch.float64 in dtypes else None if dtypes == {torch.float32} else torch.float32
        parts.append((tuple(small), torch.stack(torch._foreach_norm(list(small.values()), order, dtype=dtype))))
    return parts


def norms_of_rows(grad: Tensor, order: int = 2) -> Tensor:
    """The norms of a gradient's rows, or its norm: at most one number per 256 elements, fp32 or fp64.

    Args:
        grad: any shape, as `norm_parts` takes it.
        order: likewise.
    """
    if grad.is_sparse:
        grad = grad.coalesce().values()
    norm: Callable[..., Tensor] = torch.linalg.vector_norm
    dtype = torch.float32 if grad.dtype.itemsize < 4 else None
    n, shape = grad.numel(), grad.shape
    if not grad.is_cpu or n <= ROW:
        return norm(grad, order, dtype=dtype)
    if len(shape) > 1 and _SHORTEST_ROW <= shape[-1] <= _LONGEST_ROW and grad.is_contiguous():
        return norm(grad, order, -1, dtype=dtype)
    dense = grad
    if not grad.is_contiguous():  # its dims in the order of memory
        dense = grad.permute(sorted(range(grad.dim()), key=grad.stride, reverse=True))
    if not dense.is_contiguous():
        return norm(grad, order, dtype=torch.float64)  # the elements are no dense block, which is rare: slow but exact
    flat, whole = dense.view(-1), n // ROW * ROW
    rows = norm(flat[:whole].view(-1, ROW), order, -1, dtype=dtype)
    return rows if whole == n else torch.cat([rows, norm(flat[whole:], order, dtype=dtype).view(1)])


def add_parts(n_owners: int, parts: Sequence[Part], device: torch.device, *, squares: bool = True) -> Tensor:
    """Sum the values of parts, or their squares, by owner.

    Args:
        n_owners: number of owners.
        parts: on any devices.
        device: where the sums go.
        squares: whether squares add up.

    Returns:
        [owners], 0 for an owner without a part.
    """
    total = zero_sums(n_owners, device=device)
    if not parts:
        return total
    flat, owned = [], []
    for owners, values in parts:
        flat.append(to_device(values, device).reshape(-1) if values.device != device else values.reshape(-1))
        owned.append((owners, values.numel()))
    values = torch.cat(flat).to(total.dtype)
    if squares:  # after the upcast: fp32 squares of small numbers would underflow
        values = values.square()
    return total.index_add_(0, _owners(tuple(owned), device), values)


@functools.lru_cache(maxsize=64)  # backward visits parameters in the same order in every window
def _owners(parts: tuple[tuple[tuple[int, ...], int], ...], device: torch.device) -> Tensor:
    owner_of_each_value = [i for owners, n in parts for i in (owners if len(owners) > 1 else owners * n)]
    return to_device(torch.tensor(owner_of_each_value, device="cpu"), device)


class Euclidean:
    """|g|² = Σ g_j²."""

    name = "euclidean"
    adds: Adds = "squares"

    def parts(self, indices: Sequence[int], grads: Sequence[Tensor], start: int | None = None) -> list[Part]:
        """The norms of rows, or norms; small gradients share a kernel."""
        return norm_parts(indices, grads, 2)


class AdamMetric:
    """|g|² = Σ P_j g_j² with P = 1/(√v̂ + ε), where v̂ is the second moment of the optimizer's previous step.

    Before the optimizer's first step there is no v̂: norms of gradients are NaN, and the window is dropped. With
    amsgrad, v̂ is the largest second moment so far, as in the optimizer. P is 0 where v̂ is 0. Such an element has had
    no gradient yet, as in an embedding's row whose token has not come. Its P would be 1/ε, so that a few of them would
    outweigh the model.

    Args:
        optimizer: keeps `exp_avg_sq` and `step`, and has `betas` and `eps` in its groups.
        parameters: that the optimizer steps, in the order of the indices.

    Raises:
        ValueError: when a parameter is not in the optimizer, or its group has no `betas` and `eps`.
    """

    name = "adam"
    adds: Adds = "squares"

    def __init__(self, optimizer: torch.optim.Optimizer, parameters: Sequence[Tensor]) -> None:
        self._optimizer = optimizer  # state and groups are looked up at each use: load_state_dict replaces both
        self._parameters = list(parameters)
        groups = {id(p): i for i, group in enumerate(optimizer.param_groups) for p in group["params"]}
        has_moments = [{"betas", "eps"} <= group.keys() for group in optimizer.param_groups]
        fits = all(id(p) in groups and has_moments[groups[id(p)]] for p in parameters)
        if not fits or isinstance(optimizer, torch.optim.Adamax):  # Adamax keeps a maximum instead of v̂
            raise ValueError(
                f"metric='adam' needs an optimizer of Adam's kind that holds every trainable parameter, "
                f"got {type(optimizer).__name__}: use Adam or AdamW, or metric='euclidean'"
            )
        self._groups = [groups[id(p)] for p in parameters]

    def parts(self, indices: Sequence[int], grads: Sequence[Tensor], start: int | None = None) -> list[Part]:
        """√(Σ P_j g_j²) of each gradient, one by one."""
        return [
            ((i,), self._root(i, g.to_dense() if g.is_sparse else g, start))
            for i, g in zip(indices, grads, strict=True)
        ]

    def _root(self, index: int, grad: Tensor, start: int | None) -> Tensor:
        total, moment = zero_sums(device=grad.device), self._moment(index)
        if moment is not None and start is not None:
            moment = moment.reshape(-1)[start : start + len(grad)]
        if moment is None or moment.shape != grad.shape:
            # A parameter that no backward has reached has no second moment, and needs none.
            return torch.where(grad.any(), torch.nan, total)
        correction, eps = self._correction(index)
        # Chunk by chunk, so that no temporary has the size of a gradient.
        for x, v in zip(grad.reshape(-1).split(_CHUNK), moment.reshape(-1).split(_CHUNK), strict=True):
            root = _in_fp32(v).sqrt().div_(correction).add_(eps)  # not sqrt_: v belongs to the optimizer
            root = to_device(root.masked_fill_(v == 0, torch.inf).sqrt_(), x.device)
            # Divided before they are squared, by the fourth root of v̂: squares of small gradients would vanish in fp32.
            total += (x / root).square_().sum(dtype=total.dtype)
        return total.sqrt_()

    def _moment(self, index: int) -> Tensor | None:
        """v of what this rank holds of a parameter; None where the optimizer has none."""
        state = self._optimizer.state.get(self._parameters[index], {})
        group = self._optimizer.param_groups[self._groups[index]]
        moment = state.get("max_exp_avg_sq" if group.get("amsgrad") else "exp_avg_sq")
        return None if moment is None else local_tensor(moment)

    def _correction(self, index: int) -> tuple[Any, float]:
        """The bias correction of √v, a number or 0-dim tensor, and ε, of a parameter that has a second moment."""
        group = self._optimizer.param_groups[self._groups[index]]
        # `step` is a 0-dim tensor on the CPU, or on the device for fused and capturable optimizers. Either kind divides
        # a tensor on the device without being read on the host.
        step = self._optimizer.state[self._parameters[index]]["step"]
        if isinstance(step, Tensor):  # in fp32, 1 − β₂ of the first step would keep 4 digits
            step = widened(step)
        return (1.0 - group["betas"][1] ** step) ** 0.5, group["eps"]


def _in_fp32(values: Tensor) -> Tensor:
    """The values in fp32, or in fp64 if they are."""
    return values if values.dtype.itemsize >= 4 else values.float()


class SignMetric:
    """‖g‖₁ = Σ |g_j|. Norms of parameters add up, and their sum is squared."""

    name = "sign"
    adds: Adds = "norms"

    def parts(self, indices: Sequence[int], grads: Sequence[Tensor], start: int | None = None) -> list[Part]:
        """Σ |g_j| of each gradient's rows, or of all of it; small ones share a kernel."""
        return norm_parts(indices, grads, 1)


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

    def parts(self, indices: Sequence[int], grads: Sequence[Tensor], start: int | None = None) -> list[Part]:
        """The nuclear norm of each matrix that counts."""
        return [((i,), nuclear_norm(g)) for i, g in zip(indices, grads, strict=True) if i in self._matrices]


def nuclear_norm_bytes(shape: Sequence[int], dtype: torch.dtype) -> int:
    """The memory that `nuclear_norm` takes for a matrix of a shape, when sums are kept in a dtype."""
    return _MATRICES_HELD * min(shape) ** 2 * dtype.itemsize


def nuclear_norm(matrix: Tensor) -> Tensor:
    """The sum of the singular values of a matrix, without waiting for the device.

    It is computed from the matrix times its transpose, of the smaller size n: five matrices [n, n] are held. On the CPU
    LAPACK gives the eigenvalues. On other devices LAPACK's like would wait for the device, so that
    `nuclear_norm_by_iteration` is used, with the error that it states.

    Args:
        matrix: [rows, columns]; fp16, bf16, fp32 or fp64.

    Returns:
        0-dim, in the dtype that sums are kept in; NaN for a matrix that is not finite.
    """
    gram = _gram(matrix)
    if gram.is_cpu and gram.dtype == torch.float64:
        # LAPACK refuses numbers that are not finite: they are put back afterwards.
        size = gram.diagonal().sum()
        is_finite = torch.isfinite(size) & torch.isfinite(gram).all()
        eigenvalues = torch.linalg.eigvalsh(torch.where(is_finite, gram, 0.0))
        return torch.where(is_finite, eigenvalues.clamp_(min=0.0).sqrt_().sum(), torch.nan)
    return nuclear_norm_by_iteration(gram)


def _gram(matrix: Tensor) -> Tensor:
    """The matrix times its transpose, from the side that gives the smaller; [n, n]."""
    is_wide = matrix.shape[0] <= matrix.shape[1]
    n = min(matrix.shape)
    gram = zero_sums(n, n, device=matrix.device)
    # Some rows or columns at a time, so that no temporary has the size of a gradient.
    for part in matrix.split(max(_CHUNK // max(n, 1), 1), 1 if is_wide else 0):
        wide = widened(part)
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
