"""Squared norms of local gradients, for averages over windows: in fp32 or better, without copies of gradient size.

A clip uses another norm: `power_sums.py` sums it in fp64.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from sonde.parallel.devices import accumulation_dtype, to_device, widened, zero_sums

# torch's fp32 reduction over a flat CPU tensor keeps one running sum per vector lane, and is off by 8e-4 at 16M
# elements. Norms of rows of this length, combined in fp64, are off by 4e-9 and no slower: they vectorise along the row.
ROW = 4096
_SHORTEST_ROW, _LONGEST_ROW = 256, 4 * ROW  # a matrix's own rows of these lengths serve as well
# A dot product would be cheaper, but BLAS adds in an order that depends on the memory's alignment. Replicas would get
# norms that differ in the last bit, clip by different factors and drift apart.

LEAST_SQ_NORM = 1e-30
"""Squared norm per element below which squares may have lost digits to underflow in fp32."""

Part = tuple[tuple[int, ...], Tensor]
"""Owners and values, such as roots: a single owner has all the values; otherwise each owner has one."""


def roots(grad: Tensor) -> Tensor:
    """Numbers whose squares add up to the squared 2-norm of a gradient, by one kernel where its layout allows.

    Args:
        grad: any shape; fp16, bf16, fp32 or fp64; strided or sparse COO (duplicates are summed first).

    Returns:
        Norms of its rows, or its norm: at most one number per 256 elements, fp32 or fp64.
    """
    return _norms_of_rows(grad, 2)


def absolute_sum(grad: Tensor) -> Tensor:
    """The 1-norm of a gradient, Σ |g_j|, on its device: 0-dim, in the dtype that sums are kept in.

    Args:
        grad: as for `roots`.
    """
    return _norms_of_rows(grad, 1).sum(dtype=accumulation_dtype(grad.device))


def _norms_of_rows(grad: Tensor, order: int) -> Tensor:
    if grad.is_sparse:
        grad = grad.coalesce().values()
    dtype = torch.float32 if grad.dtype.itemsize < 4 else None
    if not grad.is_cpu or grad.numel() <= ROW:
        return _norm(grad, order, dtype)
    shape = grad.shape
    if len(shape) > 1 and _SHORTEST_ROW <= shape[-1] <= _LONGEST_ROW and grad.is_contiguous():
        return _norm(grad, order, dtype, -1)
    n, flat = grad.numel(), _flat(grad)
    if flat is None:
        return _norm(grad, order, torch.float64)  # the elements are no dense block, which is rare: slow but exact
    whole = n // ROW * ROW
    row_norms = _norm(flat[:whole].view(-1, ROW), order, dtype, -1)
    return row_norms if whole == n else torch.cat([row_norms, _norm(flat[whole:], order, dtype).view(1)])


def add_parts(n_owners: int, parts: Sequence[Part], device: torch.device, *, squares: bool = True) -> Tensor:
    """Sum the values of parts, or their squares, by owner.

    Args:
        n_owners: number of owners.
        parts: on any devices.
        device: where the sums go.
        squares: whether the values are roots, whose squares add up.

    Returns:
        [owners], 0 for an owner without a part.
    """
    total = zero_sums(n_owners, device=device)
    if not parts:
        return total
    flat = [r if r.dim() == 1 else r.reshape(-1) for _, r in parts]
    values = widened(torch.cat([r if r.device == device else to_device(r, device) for r in flat]))
    if squares:  # after the upcast: fp32 squares of small numbers would underflow
        values = values.square()
    owners = _owners(tuple((owners, r.numel()) for owners, r in parts), device)
    return total.index_add_(0, owners, values)


@functools.lru_cache(maxsize=64)  # backward visits parameters in the same order in every window
def _owners(parts: tuple[tuple[tuple[int, ...], int], ...], device: torch.device) -> Tensor:
    owner_of_each_root = [i for owners, n in parts for i in (owners if len(owners) > 1 else owners * n)]
    return to_device(torch.tensor(owner_of_each_root, device="cpu"), device)


def norms(grads: Sequence[Tensor], order: int = 2) -> Tensor:
    """The norm of each dense gradient, in few kernels. On the CPU, a gradient must be at most `ROW` long.

    Args:
        grads: at least one, on one device, of any dtypes.
        order: 2 for the 2-norm, 1 for the sum of absolute values.

    Returns:
        [gradients], fp32, or fp64 if one of them is.
    """
    dtypes = {g.dtype for g in grads}
    dtype = torch.float64 if torch.float64 in dtypes else None if dtypes == {torch.float32} else torch.float32
    return torch.stack(torch._foreach_norm(list(grads), order, dtype=dtype))


def gradient_parts(indices: Sequence[int], grads: Sequence[Tensor]) -> list[Part]:
    """The roots of several gradients, in few kernels where launches are the main cost.

    Args:
        indices: the owner of each gradient.
        grads: on one device, of any dtypes and layouts that `roots` takes.

    Returns:
        Parts for `add_parts`.
    """
    parts: list[Part] = []
    shared: dict[int, Tensor] = {}
    for i, grad in zip(indices, grads, strict=True):
        if grad.is_sparse or (grad.is_cpu and grad.numel() > ROW):
            parts.append(((i,), roots(grad)))
        else:
            shared[i] = grad
    if shared:
        parts.append((tuple(shared), norms(list(shared.values()))))
    return parts


def _norm(values: Tensor, order: int, dtype: torch.dtype | None, dim: int | None = None) -> Tensor:
    norm: Tensor = torch.linalg.vector_norm(values, order, dim, dtype=dtype)
    return norm


def _flat(grad: Tensor) -> Tensor | None:
    """The elements as a 1-D view in memory order, or None if they are not one dense block."""
    if grad.is_contiguous():
        return grad.view(-1)
    by_stride = sorted(range(grad.dim()), key=grad.stride, reverse=True)
    permuted = grad.permute(by_stride)
    return permuted.view(-1) if permuted.is_contiguous() else None
