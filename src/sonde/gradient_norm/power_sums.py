"""Σ|x|^p of local tensors, such that the norm, rounded to fp32, hardly depends on how they are cut.

Small tensors are summed in fp64. Large ones on a CPU are summed as fast as memory: squares in fp32 within short blocks,
in fp64 across. Blocks are parts of rows, so the usual cuts divide none, and then all ways to cut give the same fp32
norm (but once in 1e8 times, where it is half-way between two fp32 numbers). A cut inside blocks changes its last bit.
"""

from __future__ import annotations

import functools
import itertools
import math
import threading
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from sonde.parallel.devices import accumulation_dtype, widened, zero_sums

_CHUNK = 2**15
"""Elements converted to fp64 at a time on the CPU: 0.25 MiB stays in a core's cache.

torch shares longer loops out among its threads. On cores that other processes use, such as those of a data loader, the
threads then wait for each other much longer than a small gradient takes to read.
"""
_FEW = 8
"""So few tensors are joined without a look at their shapes."""

_BLOCK = 256
"""Elements whose norm is taken in fp32: enough to be as fast as memory, few enough for 1e-8."""
_OTHER_BLOCKS, _LONG_BLOCKS = range(128, 513), range(513, 2049)
"""Lengths of blocks where a row is no multiple of `_BLOCK`. Many short blocks round less than few long ones."""
_MIN_ELEMENTS = 2**13
"""Smaller tensors are read in fp64 together, which costs less than a call for each."""
_LARGE = 2**15
"""Tensors in fp32 of more elements are read where they are."""
_JOINED = 2**18
"""Elements of smaller tensors that one thread joins, to read them by one call."""
_STAGED = 2**20
"""Elements converted to fp32 at a time: the kernel that reads half precision itself is slow, or gives 3 digits."""
_kept = threading.local()
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
        if _SMALLEST_EXACT <= total < math.inf:
            return torch.scalar_tensor(total, dtype=torch.float64, device=device)
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
        return sums[0] if len(sums) == 1 else torch.stack(sums).sum()
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


def _square_sum_in_blocks(tensors: Sequence[Tensor]) -> float:
    """Σx² of large tensors of one dtype on the CPU: fp32 norms of blocks along the last dim or dims, and fp64 across.

    The blocks of a transposed gradient are along the dim that is contiguous in memory: along its last dim, they would
    need a copy. If its shards are not transposed, their blocks are other ones.
    """
    others, norms = list[Tensor](), list[Tensor]()
    alike: dict[torch.Size, list[Tensor]] = {}
    for tensor in tensors:  # a hot path: as little Python as can be
        dense = tensor if tensor.is_contiguous() else _dense_view(tensor)
        if dense.is_contiguous():
            alike.setdefault(dense.shape, []).append(dense)
        else:  # elements apart from each other: the kernel would add them one after the other
            others.append(tensor)
    for shape, members in alike.items():
        if not (length := length_of_blocks(shape)):  # as many blocks as the flat tensor has, and the rest in fp64
            length, n = _BLOCK, shape.numel() // _BLOCK * _BLOCK
            others += [t.view(-1)[n:] for t in members]
            members = [t.view(-1)[:n] for t in members]
        norms += _norms_of_blocks(members, length)
    total = 0.0
    for part in torch.cat(norms).split(_CHUNK) if norms else ():
        # Not torch.dot: BLAS shares out even 8,000 elements among its threads.
        total += part.double().square_().sum().item()
    return total + power_sum(others, 2.0).item() if others else total


def _norms_of_blocks(alike: list[Tensor], length: int) -> Iterator[Tensor]:
    """The fp32 norms of all blocks of contiguous tensors of one shape and dtype; each tensor is a row of blocks."""
    first = alike[0]
    n = first.numel()
    # One call for many tensors: a call takes as long as reading 8,000 elements. But see `_CHUNK`.
    n_joined = _JOINED // max(n, 1) if torch.get_num_threads() == 1 else 1
    if first.dtype is torch.float32 and (n > _LARGE or n_joined <= 1):
        # A view of each takes as long as reading 4,000 elements.
        in_rows = alike if first.shape[1:] == (length,) else [t.view(-1, length) for t in alike]
        yield from [torch.linalg.vector_norm(t, 2.0, -1) for t in in_rows]
        return
    staged = _staging()[: _STAGED // length * length].view(-1, length)
    if n_joined <= 1:
        for part in (part for t in alike for part in t.view(-1, length).split(len(staged))):
            yield torch.linalg.vector_norm(staged[: len(part)].copy_(part), 2.0, -1)
        return
    for some in (alike[i : i + n_joined] for i in range(0, len(alike), n_joined)):
        rows = staged[: len(some) * n // length]
        torch.cat(some, out=rows.view(len(some) * len(first), *first.shape[1:]))
        yield torch.linalg.vector_norm(rows, 2.0, -1)


def _staging() -> Tensor:
    """Room for `_STAGED` elements in fp32, one for each thread: new memory of this size would cost more than a copy."""
    room: Tensor | None = getattr(_kept, "room", None)
    if room is None:
        with torch.inference_mode(mode=False):  # a tensor of inference mode could not be written to outside
            room = torch.empty(_STAGED, dtype=torch.float32, device="cpu")
        if type(room) is Tensor:  # no fake tensor outlives its mode
            _kept.room = room
    return room


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


def _power(chunk: Tensor, order: float) -> Tensor:
    """Σ|x|^order of one chunk, which is overwritten."""
    if order == 2.0:
        return chunk.square_().sum()
    return chunk.abs_().sum() if order == 1.0 else chunk.abs_().pow_(order).sum()


def _in_fp64(tensors: Sequence[Tensor]) -> Iterator[Tensor]:
    """All elements, [≤ _CHUNK] at a time, as new tensors."""
    sizes = [t.numel() for t in tensors]
    if sum(sizes) <= _CHUNK:  # all of a small model: as little Python as can be
        yield _joined(tensors)
        return
    waiting, n_waiting = list[Tensor](), 0
    for tensor, size in zip(tensors, sizes, strict=True):
        if size > _CHUNK:
            yield from (_joined([part]) for part in _pieces(tensor))
            continue
        if n_waiting + size > _CHUNK:
            yield _joined(waiting)
            waiting, n_waiting = [], 0
        waiting.append(tensor)
        n_waiting += size
    if waiting:
        yield _joined(waiting)


def _pieces(tensor: Tensor) -> Iterable[Tensor]:
    """A tensor in views of at most _CHUNK elements, without a copy of all of it."""
    if tensor.numel() <= _CHUNK:
        return (tensor,)
    if tensor.is_contiguous():
        parts: tuple[Tensor, ...] = tensor.view(-1).split(_CHUNK)
        return parts
    if len(tensor) == 1:
        return _pieces(tensor[0])
    rows: tuple[Tensor, ...] = tensor.split(max(1, _CHUNK * len(tensor) // tensor.numel()))
    return itertools.chain.from_iterable(map(_pieces, rows))


def _joined(tensors: Sequence[Tensor]) -> Tensor:
    """All elements in one new row, in fp64. It is converted after cat, as a conversion inside costs five times as much.

    The row shares no memory with the tensors.
    """
    # To join tensors of one shape takes a third of what it takes to flatten them, as DDP joins its buckets.
    if len(tensors) > _FEW:
        alike: dict[torch.Size, list[Tensor]] = {}
        for t in tensors:
            alike.setdefault(t.shape, []).append(t)
        tensors = [t for shape, members in alike.items() for t in ([torch.cat(members)] if shape else members)]
    joined: Tensor = torch._utils._flatten_dense_tensors(tensors)
    return joined.clone() if joined.dtype == torch.float64 else joined.double()


def _largest(tensor: Tensor) -> Tensor:
    low, high = torch.aminmax(tensor)
    return widened(torch.maximum(low.abs(), high.abs()))
