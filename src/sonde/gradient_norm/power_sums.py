"""Σ|x|^p of local tensors, such that the norm, rounded to fp32, does not depend on how they are cut.

Small tensors are summed in fp64. Large ones on a CPU are summed as fast as memory, in blocks that no cut divides: in
fp32 within a block, in fp64 across. (One cut in 1e8 still changes the last bit, where the norm is half-way between two
fp32 numbers. Where blocks follow the memory of a transposed gradient, a cut may change the last bit more often.)
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from sonde.parallel.devices import accumulation_dtype, widened, zero_sums
from sonde.parallel.placements import cut_every

_CHUNK = 2**17
"""Elements converted to fp64 at a time on the CPU: 1 MiB stays in a core's cache."""

_BLOCK = 256
"""Elements whose norm is taken in fp32: enough to be as fast as memory, few enough for 1e-9."""
_OTHER_BLOCKS, _LONG_BLOCKS = range(128, 513), range(513, 2049)
"""Lengths of blocks where a row is no multiple of `_BLOCK`. Many short blocks round less than few long ones."""
_MIN_ELEMENTS = 2**16
"""Smaller tensors are read in fp64 together, which costs less than a call for each."""
_BLOCK_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SMALLEST_EXACT = 1e-16
"""Sums of squares in blocks that are smaller may have lost elements below 1e-19, whose squares vanish in fp32."""

LARGEST_ORDER = 6.0
"""Up to this order, fp64 holds the power of every fp32 number."""


def power_sum(tensors: Sequence[Tensor], order: float) -> Tensor:
    """Σ|x|^order over all elements of all tensors; the largest |x| for `math.inf`. No root is taken.

    Sums are in fp64 even on GPUs where fp64 is slow: in fp32, squares overflow at 1e19, and the sum depends on the cut.

    Args:
        tensors: plain, on one device, of any floating dtypes, strided or sparse COO; empty tensors add 0.
        order: from above 0 to `LARGEST_ORDER`, or `math.inf`.

    Returns:
        0-dim, fp64 (fp32 on devices without it), on the tensors' device; NaN if an element is NaN.
    """
    device = tensors[0].device if tensors else torch.device("cpu")
    nothing = zero_sums(device=device)
    filled = [t.coalesce().values() if t.is_sparse else _dense_view(t) for t in tensors]
    if device.type != "cpu" or math.isinf(order):  # these kernels refuse empty tensors
        filled = [t for t in filled if t.numel()]
    if not filled:
        return nothing
    if math.isinf(order):
        return torch.stack([_largest(t) for t in filled]).max()
    if device.type == "cpu":
        sums = [_power(chunk, order) for chunk in _in_fp64(filled)]
        return torch.stack(sums).sum() if sums else nothing
    # On a GPU, one fused kernel takes all norms in fp64 without a converted copy.
    return torch.stack(torch._foreach_norm(filled, order, dtype=accumulation_dtype(device))).pow(order).sum()


def is_read_in_blocks(gradient: Tensor) -> bool:
    """Whether squares of a gradient are summed in blocks: by its global shape, so for every way to cut it alike.

    Args:
        gradient: plain or a DTensor. If it is cut inside a block, it is read in fp64.
    """
    if gradient.numel() < _MIN_ELEMENTS or gradient.device.type != "cpu" or gradient.dtype not in _BLOCK_DTYPES:
        return False
    shape = gradient.shape
    dim, length = blocks_of(shape)
    if not length or gradient.layout is not torch.strided:
        return False
    if any(cut_every(gradient, inner) for inner in range(dim + 1, len(shape))):
        return False
    cut, n_inner = cut_every(gradient, dim), math.prod(shape[dim + 1 :])
    return cut == 0 or all(block_length(rows * n_inner) == length for rows in (cut, shape[dim] % cut or cut))


def blocks_of(shape: Sequence[int]) -> tuple[int, int]:
    """How a tensor of this shape is divided into blocks.

    Returns:
        The dim from which on the dims are one row of blocks, the last dim if that has room for one, never the first;
        and the length of a block. (0, 0) if there is no good way.
    """
    size = 1
    for dim in range(len(shape) - 1, 0, -1):
        size *= shape[dim]
        if length := block_length(size):
            return dim, length
    return 0, 0


@functools.lru_cache(maxsize=256)
def block_length(size: int) -> int:
    """How many neighbouring elements of a row of this size form a block; 0 if there is no good way to divide it.

    Blocks must divide the row: the kernel is fast only if all of a tensor's blocks follow each other in memory. Of the
    lengths that do, this takes one that still divides the row when it is cut into 2, 4, 8, … shards.
    """
    if size % _BLOCK == 0:
        return _BLOCK
    for lengths in (_OTHER_BLOCKS, _LONG_BLOCKS):
        if dividing := [length for length in lengths if size % length == 0]:
            return max(dividing, key=lambda length: (_halvings(size // length), -length))
    return 0


def _halvings(n: int) -> int:
    """How often n can be halved."""
    return (n & -n).bit_length() - 1


def square_sum_in_blocks(tensors: Sequence[Tensor]) -> Tensor:
    """Σx² of large tensors on the CPU: fp32 norms of blocks along the last dim or dims, and fp64 across.

    Sums of squares that leave the range of fp32 come out infinite or too small: see `SMALLEST_EXACT`.

    Args:
        tensors: plain, of one dim or more, of any strides.

    Returns:
        0-dim, fp64.
    """
    norms: list[Tensor] = []
    others: list[Tensor] = []
    # A transposed gradient has its blocks along the dim that is contiguous in memory: blocks along its last dim would
    # need a copy. If its shards are not transposed, one norm in 100 differs in its last bit from the uncut gradient's.
    for tensor in map(_dense_view, tensors):
        dim, length = blocks_of(tensor.shape)
        if tensor.is_contiguous() and length:
            blocks = tensor.view(-1, length)
        elif length and dim == tensor.dim() - 1 and tensor.stride(-1) == 1:
            blocks = tensor.unflatten(-1, (-1, length))
        else:  # elements apart from each other: the kernel would add them one after the other
            others.append(tensor)
            continue
        norms.append(torch.linalg.vector_norm(blocks, dim=-1, dtype=torch.float32).reshape(-1))
    in_blocks = torch.cat(norms).double().square().sum() if norms else 0.0
    return power_sum(others, 2.0) + in_blocks


def _dense_view(tensor: Tensor) -> Tensor:
    """A transposed or channels-last tensor in the order of its memory, which is contiguous; others as they are."""
    if tensor.is_contiguous():
        return tensor
    by_stride = sorted(range(tensor.dim()), key=tensor.stride, reverse=True)
    view = tensor.permute(by_stride)
    return view if view.is_contiguous() else tensor


def _power(chunk: Tensor, order: float) -> Tensor:
    """Σ|x|^order of one chunk, which is overwritten."""
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
            for part in _pieces(tensors[i]):
                yield buffer[: part.numel()].view(part.shape).copy_(part).view(-1)
            first = i + 1
        else:
            n_waiting += size
    if n_waiting:
        yield _joined(tensors[first:], buffer[:n_waiting])


def _pieces(tensor: Tensor) -> Iterator[Tensor]:
    """A tensor in views of at most _CHUNK elements, without a copy of all of it."""
    if tensor.is_contiguous():
        yield from tensor.view(-1).split(_CHUNK)
    elif tensor.numel() <= _CHUNK:
        yield tensor
    elif len(tensor) == 1:
        yield from _pieces(tensor[0])
    else:
        for rows in tensor.split(max(1, _CHUNK * len(tensor) // tensor.numel())):
            yield from _pieces(rows)


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
    return widened(torch.maximum(low.abs(), high.abs()))
