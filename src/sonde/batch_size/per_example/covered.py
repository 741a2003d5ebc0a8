"""Which parameters are covered: whether what the rules have seen adds up to the whole gradient.

A leaf hook sees a parameter's whole gradient, Σ_b h_b. The rules see it use by use. Four random projections of both are
compared: a use of the parameter that no rule has seen, such as `F.linear(x, layer.weight)` outside the layer, makes
them differ. Each projection of a matrix H is uᵀ H v, so every element counts, and no matrix is formed.

The sum does not tell which example a part belongs to: the dim of examples is taken on trust. Each example's own
projections tell whether examples in certain places of a batch are more alike than others: `stats/dependence.py`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import linear

from sonde.batch_size.per_example.gradients import (
    OuterProducts,
    PerExample,
    RowSums,
    by_chunks,
    examples_of,
    tensors_of,
    wide,
)
from sonde.parallel.devices import accumulation_dtype, to_device, widened

N_PROJECTIONS = 4
_SEED = 20_210_413

_TOLERANCES: Mapping[torch.dtype, float] = {
    torch.float64: 1e-4,
    torch.float32: 1e-4,
    torch.float16: 8e-3,
    torch.bfloat16: 6e-2,
}
"""Largest part of a gradient that may be rounding, by its dtype: some hundred times the rounding of one element, since
a weight gradient adds thousands of products; 8 and 16 times in 16 bits, where products are added in fp32. Layers of an
fp64 model may compute in fp32, as norms of transformers do."""

_TF32_TOLERANCE = 8e-3
"""The same where matrix products keep the 10 bits of TF32."""


def tolerance(dtypes: Collection[torch.dtype], device: torch.device) -> float:
    """Largest part of a gradient that may be rounding.

    Args:
        dtypes: of the parameter, and of what its layers have returned.
        device: of the parameter.
    """
    largest = max(_TOLERANCES.get(dtype, _TOLERANCES[torch.bfloat16]) for dtype in dtypes)
    # Only CUDA devices have TF32. Whether products use it is a setting that may change at any time.
    is_tf32 = device.type == "cuda" and torch.float32 in dtypes
    return max(largest, _TF32_TOLERANCE) if is_tf32 else largest


def rounding(dtypes: Collection[torch.dtype]) -> float:
    """Rounding of a gradient as a part of the products that it adds: some times that of one product.

    Args:
        dtypes: as in `tolerance`.
    """
    return 8 * max(torch.finfo(torch.float32).eps, *(torch.finfo(dtype).eps for dtype in dtypes))


@dataclass(frozen=True)
class PerExampleSquares:
    """Squared norms of each example's own gradient, for every parameter.

    Attributes:
        names: the parameters, in the model's order.
        sq_norms: |h_b|², [parameters, examples], in fp64 where the device has it. h_b is what example b has added to
            `.grad` in this piece: under a GradScaler still scaled, under a mean over B examples already divided by B.
            A row is NaN if its parameter is not covered, and 0 if it had no gradient.
        unexplained: the part of each parameter's gradient that no rule has seen, [parameters]: 0 to rounding for a
            parameter that is covered, NaN where its gradient or its squares are out of range.
        tolerances: how large `unexplained` may be, [parameters].
        reasons: why parameters are not covered, as far as that is known without waiting for the device.
        projections: random projections of each example's gradient, as far as a rule has seen it; [examples, 4].
    """

    names: tuple[str, ...]
    sq_norms: Tensor
    unexplained: Tensor
    tolerances: Tensor
    reasons: Mapping[str, str]
    projections: Tensor

    def not_covered(self) -> dict[str, str]:
        """The parameters that are not covered, and why. This waits for the device."""
        found = dict(self.reasons)
        of_each = zip(self.names, self.unexplained.tolist(), self.tolerances.tolist(), strict=True)
        for name, part, most in of_each:
            if name in found or part <= most:
                continue
            found[name] = (
                f"{100 * part:.2g} % of its gradient is not what the rules have seen: it is used outside its layer's "
                "forward, or a hook changed its gradient, or its layer's backward lost as much to rounding in 16 bits"
                if part == part
                else "its gradient is not finite, or its squares are beyond the range of fp32"
            )
        return {name: found[name] for name in self.names if name in found}


class Projections:
    """Random vectors that parameters share: u for rows, v for columns.

    Args:
        parameters: what will be projected.
    """

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        sizes = [_matrix_shape(p) for p in parameters]
        # A generator of its own: the user's random state is untouched.
        generator = torch.Generator(device="cpu").manual_seed(_SEED)
        longest = [max(rows for rows, _ in sizes), max(columns for _, columns in sizes)]
        # Rounded to bf16, so that the same vectors multiply gradients of every dtype. [projections, n]: products with
        # so few vectors take a quarter of the time in this order.
        u, v = (torch.randn(N_PROJECTIONS, n, generator=generator, device="cpu").bfloat16().float() for n in longest)
        self._home = u, v
        self._vectors = {(u.device, u.dtype): (u, v)}

    def of_gradient(self, grad: Tensor) -> Tensor:
        """Projections of a parameter's whole gradient, as a leaf hook sees it: [projections]."""
        n_rows, n_columns = _matrix_shape(grad)
        u, v = self._of(grad, n_rows, n_columns)
        if grad.is_sparse:
            grad = grad.coalesce()
            return _sum_products(u.T[grad.indices()[0]], linear(grad.values(), v))
        return _sum_products(u.T, linear(grad.reshape(n_rows, n_columns), v))

    def of_examples(self, gradients: PerExample, parameter: Tensor, staging_bytes: int) -> Tensor:
        """Projections of each example's gradient h_b: [examples, projections].

        Args:
            gradients: of the parameter.
            parameter: whose gradients they are.
            staging_bytes: memory for intermediate results.
        """
        shape = _matrix_shape(parameter)
        n_bytes = sum(map(_bytes, tensors_of(gradients)))
        return by_chunks(lambda s: self._of_chunk(examples_of(gradients, s), *shape), gradients, n_bytes, staging_bytes)

    def _of_chunk(self, gradients: PerExample, n_rows: int, n_columns: int) -> Tensor:
        if isinstance(gradients, RowSums):
            u, v = self._of(gradients.values, n_rows, n_columns)
            return _sum_products(u.T[gradients.rows], linear(gradients.values, v), 1)
        if isinstance(gradients, OuterProducts):
            left, right = (t if t.dim() == 4 else t[:, None] for t in (gradients.left, gradients.right))
            (u, _), (_, v) = self._of(left, n_rows, n_columns), self._of(right, n_rows, n_columns)
            groups = zip(left.unbind(1), right.unbind(1), u.chunk(left.shape[1], dim=1), strict=True)
            return functools.reduce(torch.add, [_sum_products(linear(x, w), linear(y, v), 1) for x, y, w in groups])
        u, v = self._of(gradients, n_rows, n_columns)
        if n_columns == 1:  # a vector: without a copy for each projection
            vectors = wide(gradients).reshape(-1, n_rows)
            return widened(linear(vectors, wide(u * v)))
        return _sum_products(u.T, linear(gradients.reshape(-1, n_rows, n_columns), v), 1)

    def _of(self, like: Tensor, n_rows: int, n_columns: int) -> tuple[Tensor, Tensor]:
        if (found := self._vectors.get((like.device, like.dtype))) is None:
            u, v = (to_device(vectors, like.device).to(like.dtype) for vectors in self._home)
            found = self._vectors[like.device, like.dtype] = u, v
        u, v = found
        return u[:, :n_rows], v[:, :n_columns]


def _matrix_shape(parameter: Tensor) -> tuple[int, int]:
    """A parameter as a matrix: its first dim as rows."""
    return (parameter.shape[0], math.prod(parameter.shape[1:])) if parameter.dim() else (1, 1)


def _bytes(tensor: Tensor) -> int:
    """Memory to project one example of a tensor: the projections at each position, and a copy if it is no block."""
    n_copied = 0 if tensor.is_contiguous() else tensor[0].numel()
    return 4 * n_copied + 16 * N_PROJECTIONS * math.prod(tensor.shape[1:-1])


def _sum_products(x: Tensor, y: Tensor, first: int = 0) -> Tensor:
    """Σ x y over the dims from `first` to the last but one: […, projections], in fp64 where the device has it."""
    return (wide(x) * wide(y)).flatten(first, -2).sum(first, dtype=accumulation_dtype(x.device))
