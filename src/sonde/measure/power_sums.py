"""Σ|x|^p of local tensors in fp64: so exact that, rounded once to fp32, it does not depend on how they were cut."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

_CHUNK = 2**17
"""Elements converted to fp64 at a time on the CPU: 1 MiB stays in a core's cache."""

# GPUs whose fp64 units keep up with their memory; the others have a sixty-fourth of them.
_FAST_FP64 = {(6, 0), (7, 0), (8, 0), (9, 0), (10, 0)}


def accumulation_dtype(device: torch.device) -> torch.dtype:
    """The dtype that sums are kept in: fp64, or fp32 on devices without it."""
    return torch.float32 if device.type == "mps" else torch.float64


def power_sum(tensors: Sequence[Tensor], order: float) -> Tensor:
    """Σ|x|^order over all elements of all tensors; their largest |x| for `math.inf`.

    Args:
        tensors: plain, on one device, of any floating dtypes, strided or sparse COO; empty ones count 0.
        order: > 0.

    Returns:
        0-dim, fp64 (fp32 on devices without it), on their device; NaN if an element is. Not a root.
    """
    filled = [t.coalesce().values() if t.is_sparse else t for t in tensors if t.numel()]
    if not filled:
        device = tensors[0].device if tensors else torch.device("cpu")
        return torch.zeros((), dtype=accumulation_dtype(device), device=device)
    device = filled[0].device
    if math.isinf(order):
        return torch.stack([_largest(t) for t in filled]).max().to(accumulation_dtype(device))
    if device.type != "cpu":
        norms = torch.stack(torch._foreach_norm(filled, order, dtype=_kernel_dtype(device, filled)))
        return norms.to(accumulation_dtype(device)).pow_(order).sum()
    return torch.stack([_power(chunk, order) for chunk in _in_fp64(filled)]).sum()


def _power(chunk: Tensor, order: float) -> Tensor:
    """Σ|x|^order of one chunk, which is overwritten."""
    if order == 2.0:
        # BLAS adds in an order that depends on alignment: the chunk is always aligned alike.
        return torch.dot(chunk, chunk)
    return chunk.abs_().sum() if order == 1.0 else chunk.abs_().pow_(order).sum()


def _in_fp64(tensors: Sequence[Tensor]) -> Iterator[Tensor]:
    """All elements, [≤ _CHUNK] at a time; each chunk must be used before the next is asked for."""
    buffer = torch.empty(min(sum(t.numel() for t in tensors), _CHUNK), dtype=torch.float64, device="cpu")
    waiting: list[Tensor] = []
    n_waiting = 0
    for tensor in tensors:
        flat = tensor.reshape(-1)  # a copy where elements are not evenly spaced
        if flat.numel() > _CHUNK // 4:
            for part in flat.split(_CHUNK):
                yield buffer[: part.numel()].copy_(part)
            continue
        if n_waiting + flat.numel() > _CHUNK:
            yield _joined(waiting, n_waiting, buffer)
            waiting, n_waiting = [], 0
        waiting.append(flat)
        n_waiting += flat.numel()
    if waiting:
        yield _joined(waiting, n_waiting, buffer)


def _joined(parts: list[Tensor], n: int, buffer: Tensor) -> Tensor:
    return torch.cat([p if p.dtype == parts[0].dtype else p.double() for p in parts], out=buffer[:n])


def _largest(tensor: Tensor) -> Tensor:
    low, high = torch.aminmax(tensor)
    return torch.maximum(low.abs(), high.abs()).to(accumulation_dtype(tensor.device))


def _kernel_dtype(device: torch.device, tensors: Sequence[Tensor]) -> torch.dtype:
    if any(t.dtype == torch.float64 for t in tensors) or (device.type == "cuda" and _has_fast_fp64(device.index)):
        return torch.float64
    return torch.float32


@functools.cache
def _has_fast_fp64(index: int) -> bool:
    return torch.cuda.get_device_capability(index) in _FAST_FP64
