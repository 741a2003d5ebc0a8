"""Squared norms of local gradients, in fp32 or better whatever their dtype, without copies of gradient size."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

# torch's fp32 reduction over a flat CPU tensor keeps one running sum per vector lane: 8e-4 off at 16M elements. Norms
# of rows this long, combined in fp64, are off by 4e-9 and no slower (they vectorise along the row).
_ROW = 4096
_ONE_ROW = 4 * _ROW  # up to here a row of its own: one call instead of two
_CHUNK = 2**17  # elements converted to fp64 at a time: 1 MiB stays in a core's cache
# A dot product would be cheaper still, but BLAS adds in an order that depends on the memory's alignment: replicas would
# get norms that differ in the last bit, clip by different factors, and drift apart.


def accumulation_dtype(device: torch.device) -> torch.dtype:
    """The dtype that sums of norms are kept in: fp64, or fp32 on devices without it."""
    return torch.float32 if device.type == "mps" else torch.float64


def sq_norm(grad: Tensor) -> Tensor:
    """The squared 2-norm of one dense or sparse gradient.

    Args:
        grad: any shape; fp16, bf16, fp32 or fp64; strided or sparse COO (duplicates are summed first).

    Returns:
        0-dim tensor on the gradient's device, fp32 or fp64.
    """
    if grad.is_sparse:
        grad = grad.coalesce().values()
    if grad.device.type != "cpu":
        return _norm(grad, _wide(grad.dtype)).square()
    flat = _flat(grad)
    if flat is None:
        return _norm(grad, torch.float64).square()  # slow but exact; overlapping memory is rare
    total = _sq_norm_by_rows(flat)
    if _squares_leave_fp32(total, flat.numel()):
        total = _sq_norm_in_fp64(flat)
    return total


def _sq_norm_by_rows(flat: Tensor) -> Tensor:
    if flat.numel() <= _ONE_ROW:
        return _norm(flat, _wide(flat.dtype)).double().square()
    whole = flat.numel() // _ROW * _ROW
    rows = torch.linalg.vector_norm(flat[:whole].view(-1, _ROW), dim=1, dtype=_wide(flat.dtype))
    total = _norm(rows, torch.float64).square()
    if whole < flat.numel():
        total = total + _norm(flat[whole:], torch.float64).square()
    return total


def _squares_leave_fp32(total: Tensor, n: int) -> bool:
    """Whether fp32 squares of `n` elements may have overflowed or lost digits to underflow, on the CPU.

    Nothing is waited for: the value of a CPU tensor is at hand.
    """
    return not 1e-30 * n < total.item() < math.inf


def _sq_norm_in_fp64(flat: Tensor) -> Tensor:
    """Σ x² with squares and sums in fp64, a chunk at a time."""
    of_chunks = [torch.linalg.vector_norm(chunk.double()).square() for chunk in flat.split(_CHUNK)]
    return torch.stack(of_chunks).sum()


def sq_norms(grads: Sequence[Tensor]) -> list[Tensor]:
    """The squared 2-norm of each gradient, by few kernels where launching them is what costs.

    Args:
        grads: gradients on one device, of any dtypes.

    Returns:
        0-dim tensors, in order, fp32 or fp64.
    """
    if not grads:
        return []
    if grads[0].device.type == "cpu" or any(g.is_sparse for g in grads):
        return [sq_norm(g) for g in grads]
    dtype = torch.float64 if any(g.dtype == torch.float64 for g in grads) else torch.float32
    of_each = torch._foreach_norm(list(grads), 2, dtype=dtype)
    return list(torch._foreach_mul(of_each, of_each))


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _norm(values: Tensor, dtype: torch.dtype) -> Tensor:
    total: Tensor = torch.linalg.vector_norm(values, dtype=dtype)
    return total


def _flat(grad: Tensor) -> Tensor | None:
    """The elements as a 1-D view in memory order, or None if they are not one dense block."""
    if grad.is_contiguous():
        return grad.view(-1)
    by_stride = sorted(range(grad.dim()), key=grad.stride, reverse=True)
    permuted = grad.permute(by_stride)
    return permuted.view(-1) if permuted.is_contiguous() else None
