"""Σ|x|^p of local tensors in fp64: exact enough that the norm, rounded to fp32, does not depend on how they are cut.

(Except with a chance of about 1e-8 for each cut: when the exact norm is half-way between two fp32 numbers.)
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from sonde.parallel.devices import accumulation_dtype

_CHUNK = 2**17
"""Elements converted to fp64 at a time on the CPU: 1 MiB stays in a core's cache."""
_CHUNK_ON_GPU = 2**24
"""Elements converted at a time on a GPU: larger, since each kernel launch costs time."""

LARGEST_PLAIN_ORDER = 6.0
"""Up to this order, fp64 holds the power of every fp32 number. Above it, divide by the largest element first."""


def power_sum(tensors: Sequence[Tensor], order: float, unit: Tensor | None = None) -> Tensor:
    """Σ|x|^order over all elements of all tensors; the largest |x| for `math.inf`. No root is taken.

    Sums are in fp64 even on GPUs where fp64 is slow: in fp32, squares overflow at 1e19, and the sum depends on the cut.

    Args:
        tensors: plain, on one device, of any floating dtypes, strided or sparse COO; empty tensors add 0.
        order: > 0.
        unit: 0-dim, > 0; elements are divided by it first.

    Returns:
        0-dim, fp64 (fp32 on devices without fp64), on the tensors' device; NaN if an element is NaN.
    """
    device = tensors[0].device if tensors else torch.device("cpu")
    nothing = torch.zeros((), dtype=accumulation_dtype(device), device=device)
    filled = [t.coalesce().values() if t.is_sparse else t for t in tensors]
    if device.type != "cpu" or math.isinf(order):  # these kernels refuse empty tensors
        filled = [t for t in filled if t.numel()]
    if not filled:
        return nothing
    if math.isinf(order):
        return torch.stack([_largest(t) for t in filled]).max().to(accumulation_dtype(device))
    if unit is not None:
        unit = unit.to(device)
    if device.type == "cpu":
        sums = [_power(chunk, order, unit) for chunk in _in_fp64(filled)]
        return torch.stack(sums).sum() if sums else nothing
    # On a GPU, one fused kernel takes all norms in fp64 without a converted copy. It cannot divide by a unit.
    dtype = accumulation_dtype(device)
    if unit is None:
        return torch.stack(torch._foreach_norm(filled, order, dtype=dtype)).pow_(order).sum()
    chunks = (chunk for t in filled for chunk in t.reshape(-1).split(_CHUNK_ON_GPU))
    return torch.stack([_power(chunk.to(dtype, copy=True), order, unit) for chunk in chunks]).sum()


def _power(chunk: Tensor, order: float, unit: Tensor | None) -> Tensor:
    """Σ|x|^order of one chunk, which is overwritten."""
    if unit is not None:
        chunk.div_(unit)
    if order == 2.0:
        # BLAS adds in an order that depends on alignment. Every chunk starts where a buffer starts, aligned alike: so
        # equal gradients at different addresses give the same bits.
        return torch.dot(chunk, chunk)
    return chunk.abs_().sum() if order == 1.0 else chunk.abs_().pow_(order).sum()


def _in_fp64(tensors: Sequence[Tensor]) -> Iterator[Tensor]:
    """All elements, [≤ _CHUNK] at a time, in one reused buffer: use each chunk before taking the next."""
    sizes = [t.numel() for t in tensors]
    buffer = torch.empty(min(sum(sizes), _CHUNK), dtype=torch.float64, device="cpu")
    # Small tensors wait until together they fill the buffer; a tensor larger than the buffer is split.
    first, n_waiting = 0, 0  # tensors from `first` on wait, with so many elements
    for i, size in enumerate(sizes):
        if n_waiting + size > _CHUNK:
            if n_waiting:
                yield _joined(tensors[first:i], buffer[:n_waiting])
            first, n_waiting = i, 0
        if size > _CHUNK:
            for part in tensors[i].reshape(-1).split(_CHUNK):  # reshape copies if strides require it
                yield buffer[: part.numel()].copy_(part)
            first = i + 1
        else:
            n_waiting += size
    if n_waiting:
        yield _joined(tensors[first:], buffer[:n_waiting])


def _joined(tensors: Sequence[Tensor], into: Tensor) -> Tensor:
    if len(tensors) == 1:
        return into.copy_(tensors[0].reshape(-1))
    if len({t.dtype for t in tensors}) > 1:
        return torch.cat([t.reshape(-1).double() for t in tensors], out=into)
    # Join first, convert then: a conversion inside cat costs five times as much. The function is the one that joins
    # DDP's buckets: one call for all tensors, without Python for each.
    return into.copy_(torch._utils._flatten_dense_tensors(list(tensors)))


def _largest(tensor: Tensor) -> Tensor:
    low, high = torch.aminmax(tensor)
    return torch.maximum(low.abs(), high.abs()).to(accumulation_dtype(tensor.device))
