"""Σ|x|^p of local tensors in fp64: so exact that, once the norm is rounded to fp32, how they were cut does not show.

(But with a chance of some 1e-8 a cut, where the exact norm lies between two fp32 numbers.)
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
"""The same where a kernel's launch is what costs."""


LARGEST_PLAIN_ORDER = 6.0
"""Up to it, fp64 holds the power of every fp32 number; elements of larger powers are to be divided by the largest."""


def power_sum(tensors: Sequence[Tensor], order: float, unit: Tensor | None = None) -> Tensor:
    """Σ|x|^order over all elements of all tensors; their largest |x| for `math.inf`.

    In fp64 also on GPUs that have few units for it: fp32 would overflow at 1e19, and depend on how gradients are cut.

    Args:
        tensors: plain, on one device, of any floating dtypes, strided or sparse COO; empty ones count 0.
        order: > 0.
        unit: 0-dim, > 0; what elements are divided by first.

    Returns:
        0-dim, fp64 (fp32 on devices without it), on their device; NaN if an element is. Not a root.
    """
    device = tensors[0].device if tensors else torch.device("cpu")
    nothing = torch.zeros((), dtype=accumulation_dtype(device), device=device)
    filled = [t.coalesce().values() if t.is_sparse else t for t in tensors]
    if device.type != "cpu" or math.isinf(order):  # whose kernels refuse empty ones
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
        # BLAS adds in an order that depends on alignment: the chunk is always aligned alike.
        return torch.dot(chunk, chunk)
    return chunk.abs_().sum() if order == 1.0 else chunk.abs_().pow_(order).sum()


def _in_fp64(tensors: Sequence[Tensor]) -> Iterator[Tensor]:
    """All elements, [≤ _CHUNK] at a time; each chunk must be used before the next is asked for."""
    sizes = [t.numel() for t in tensors]
    buffer = torch.empty(min(sum(sizes), _CHUNK), dtype=torch.float64, device="cpu")
    first, n_waiting = 0, 0  # tensors from `first` on wait, to be joined
    for i, size in enumerate(sizes):
        if n_waiting + size > _CHUNK:
            if n_waiting:
                yield _joined(tensors[first:i], buffer[:n_waiting])
            first, n_waiting = i, 0
        if size > _CHUNK:
            for part in tensors[i].reshape(-1).split(_CHUNK):  # a copy where elements are not evenly spaced
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
    # Joined first and converted then: a conversion inside cat costs five times as much. This is what DDP's buckets are
    # joined by: one call for all, rather than Python for each.
    return into.copy_(torch._utils._flatten_dense_tensors(list(tensors)))


def _largest(tensor: Tensor) -> Tensor:
    low, high = torch.aminmax(tensor)
    return torch.maximum(low.abs(), high.abs()).to(accumulation_dtype(tensor.device))
