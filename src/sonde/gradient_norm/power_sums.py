"""Σ|x|^p of local tensors, such that the norm, rounded to fp32, hardly depends on how they are cut.

Small tensors are summed in fp64. Large ones on a CPU are summed as fast as memory: squares in fp32 within short blocks,
in fp64 across. Blocks are parts of rows, so the usual cuts divide none, and then all ways to cut give the same fp32
norm (but once in 1e8 times, where it is half-way between two fp32 numbers). A cut inside blocks changes its last bit.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from sonde.parallel.devices import accumulation_dtype, widened, zero_sums

_CHUNK = 2**16
"""Elements converted to fp64 at a time on the CPU: 0.5 MiB stays in a core's cache."""
_CHUNK_IN_FP32 = 2**20
"""Half-precision elements converted to fp32 at a time: the kernel that reads them itself is slow, or gives 3 digits."""

_BLOCK = 256
"""Elements whose norm is taken in fp32: enough to be as fast as memory, few enough for 1e-8."""
_OTHER_BLOCKS, _LONG_BLOCKS = range(128, 513), range(513, 2049)
"""Lengths of blocks where a row is no multiple of `_BLOCK`. Many short blocks round less than few long ones."""
_MIN_ELEMENTS = 2**13
"""Smaller tensors are read in fp64 together, which costs less than a call for each."""
_BLOCK_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_SMALLEST_EXACT = 1e-16
"""Sums of squares in blocks that are smaller may have lost elements below 1e-19, whose squares vanish in fp32."""

LARGEST_ORDER = 6.0
"""Up to this order, fp64 holds the power of every fp32 number."""


def power_sum(tensors: Sequence[Tensor], order: float, *, in_blocks: bool = False) -> Tensor:
    """Σ|x|^order over all elements of all tensors; the largest |x| for `math.inf`. No root is taken.

    Sums are in fp64 even on GPUs where fp64 is slow: in fp32, squares overflow at 1e19, and the sum depends on the cut.

    Args:
        tensors: plain, on one device, of any floating dtypes, strided or sparse COO; empty tensors add 0.
        order: from above 0 to `LARGEST_ORDER`, or `math.inf`.
        in_blocks: whether squares may be summed in blocks; see `is_read_in_blocks`.

    Returns:
        0-dim, fp64 (fp32 on devices without it), on the tensors' device; NaN if an element is NaN.
    """
    device = tensors[0].device if tensors else torch.device("cpu")
    if in_blocks and order == 2.0:
        total = _square_sum_in_blocks(tensors)
        if _SMALLEST_EXACT <= total.item() < math.inf:
            return total
        # A square left the range of fp32, or an element is not finite: what follows tells.
    filled = [t.coalesce().values() if t.is_sparse else t if t.is_contiguous() else _dense_view(t) for t in tensors]
    if device.type != "cpu" or math.isinf(order):  # these kernels refuse empty tensors
        filled = [t for t in filled if t.numel()]
    if not filled:
        return zero_sums(device=device)
    if math.isinf(order):
        return torch.stack([_largest(t) for t in filled]).max()
    if device.type == "cpu":
        sums = [_power(chunk, order) for chunk in _in_fp64(filled)]
        return sums[0] if len(sums) == 1 else torch.stack(sums or [zero_sums(device=device)]).sum()
    # On a GPU, one fused kernel takes all norms in fp64 without a converted copy.
    return torch.stack(torch._foreach_norm(filled, order, dtype=accumulation_dtype(device))).pow(order).sum()


def is_read_in_blocks(gradient: Tensor) -> bool:
    """Whether squares of a gradient are summed in blocks; by its global shape, so for every way to cut it alike."""
    return (
        gradient.dtype in _BLOCK_DTYPES
        and gradient.device.type == "cpu"
        and gradient.layout is torch.strided
        and gradient.numel() >= _MIN_ELEMENTS
    )


def _square_sum_in_blocks(tensors: Sequence[Tensor]) -> Tensor:
    """Σx² of large tensors of one dtype on the CPU: fp32 norms of blocks along the last dim or dims, and fp64 across.

    The blocks of a transposed gradient are along the dim that is contiguous in memory: along its last dim, they would
    need a copy. If its shards are not transposed, their blocks are other ones.
    """
    norms: list[Tensor] = []
    others: list[Tensor] = []
    lengths: dict[torch.Size, int] = {}
    for tensor in tensors:  # a hot path: as little Python as can be
        blocks = tensor if tensor.is_contiguous() else _dense_view(tensor)
        shape = blocks.shape
        if (length := lengths.get(shape)) is None:
            length = lengths[shape] = length_of_blocks(shape)
        if shape[-1] != length or len(shape) != 2:
            if not length or not blocks.is_contiguous():
                blocks, length = _what_has_blocks(blocks, others), _BLOCK
            blocks = blocks.view(-1, length)
        if blocks.dtype is torch.float32:
            norms.append(torch.linalg.vector_norm(blocks, 2.0, -1))
        else:
            norms += [torch.linalg.vector_norm(part, 2.0, -1) for part in _in_fp32(blocks)]
    in_fp64 = torch.cat(norms).double()
    in_blocks = torch.dot(in_fp64, in_fp64)
    return in_blocks + power_sum(others, 2.0) if others else in_blocks


def _what_has_blocks(tensor: Tensor, others: list[Tensor]) -> Tensor:
    """A flat view of the elements of an odd tensor that can be read in blocks; the others go to `others`."""
    flat = tensor.view(-1) if tensor.is_contiguous() else tensor.new_empty(0)
    if not tensor.is_contiguous():  # elements apart from each other: the kernel would add them one after the other
        others.append(tensor)
        return flat
    n = len(flat) // _BLOCK * _BLOCK
    others.append(flat[n:])
    return flat[:n]


@functools.lru_cache(maxsize=256)
def length_of_blocks(shape: Sequence[int]) -> int:
    """The length of the blocks of a tensor of this shape; 0 if there is no good one.

    The last dim is one row of blocks if it has room for one, else the last dims together.
    """
    size = 1
    for n in reversed(shape):
        size *= n
        if length := block_length(size):
            return length
    return 0


def block_length(size: int) -> int:
    """How many neighbouring elements of a row of this size form a block; 0 if there is no good way to divide it.

    Of the lengths that divide the row, this takes one that still does when the row is cut into 2, 4, 8, … shards.
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


def _dense_view(tensor: Tensor) -> Tensor:
    """A transposed or channels-last tensor in the order of its memory, which is contiguous; others as they are."""
    view = tensor.permute(sorted(range(tensor.dim()), key=tensor.stride, reverse=True))
    return view if view.is_contiguous() else tensor


def _in_fp32(blocks: Tensor) -> Iterator[Tensor]:
    """All blocks, some at a time, in one reused buffer: use each part before taking the next."""
    buffer = torch.empty((max(1, _CHUNK_IN_FP32 // blocks.shape[1]), blocks.shape[1]), device="cpu")
    return (buffer[: len(part)].copy_(part) for part in blocks.split(len(buffer)))


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
                yield _joined(tensors[first:i], buffer)
            first, n_waiting = i, 0
        if size > _CHUNK:
            yield from (_joined([part], buffer) for part in _pieces(tensors[i]))
            first = i + 1
        else:
            n_waiting += size
    if n_waiting:
        yield _joined(tensors[first:], buffer)


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


def _joined(tensors: Sequence[Tensor], buffer: Tensor) -> Tensor:
    # Join first, convert then: a conversion inside cat costs five times as much. The function is the one that joins
    # DDP's buckets: one call for all tensors, without Python for each.
    joined = torch._utils._flatten_dense_tensors(tensors)
    return buffer[: joined.numel()].copy_(joined)


def _largest(tensor: Tensor) -> Tensor:
    low, high = torch.aminmax(tensor)
    return widened(torch.maximum(low.abs(), high.abs()))
