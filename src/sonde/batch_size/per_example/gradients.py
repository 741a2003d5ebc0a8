"""The gradients of all examples for one parameter, in three forms, and their squared norms.

A plain tensor [examples, *shape of the parameter] holds them as they are. For a matrix that would take a weight
gradient for each example, so a matrix's gradients stay factors (`OuterProducts`), and a table's are the values of the
rows that were looked up (`RowSums`).

Every function works through the examples in chunks. What it holds besides its arguments stays below `staging_bytes`, or
below one weight gradient where a single example needs more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sonde.parallel.devices import widened


@dataclass(frozen=True)
class OuterProducts:
    """Gradients of a matrix, as factors: example b's is Σ_t left[b, t] ⊗ right[b, t].

    A linear layer's weight [out, in] has `left` = the gradient of its output and `right` = its input.

    Attributes:
        left: [examples, positions, rows], or [examples, groups, positions, rows] for a matrix that is made of groups of
            rows with factors of their own (grouped convolutions).
        right: [examples, positions, columns], or [examples, groups, positions, columns].
    """

    left: Tensor
    right: Tensor


@dataclass(frozen=True)
class RowSums:
    """Gradients of a table: example b adds values[b, t] to row rows[b, t].

    Attributes:
        rows: indices, [examples, positions].
        values: [examples, positions, columns]; zeros where a lookup has no gradient (`padding_idx`).
        n_rows: rows of the table.
    """

    rows: Tensor
    values: Tensor
    n_rows: int


PerExample = Tensor | OuterProducts | RowSums
"""One parameter's gradients of all examples."""


def tensors_of(gradients: PerExample) -> tuple[Tensor, ...]:
    """The tensors that hold the gradients, each [examples, …]."""
    if isinstance(gradients, OuterProducts):
        return gradients.left, gradients.right
    return (gradients.rows, gradients.values) if isinstance(gradients, RowSums) else (gradients,)


def examples_of(gradients: Any, s: slice) -> Any:
    """Some examples, in the same form."""
    if isinstance(gradients, OuterProducts):
        return OuterProducts(gradients.left[s], gradients.right[s])
    if isinstance(gradients, RowSums):
        return RowSums(gradients.rows[s], gradients.values[s], gradients.n_rows)
    return gradients[s]


def n_bytes_of(gradients: PerExample) -> int:
    """Bytes of memory that the gradients take."""
    return sum(t.numel() * t.element_size() for t in tensors_of(gradients))


def wide(tensor: Tensor) -> Tensor:
    """A floating-point tensor in fp32 or better: the tensor itself if it is."""
    return tensor.float() if tensor.dtype.itemsize < 4 else tensor


def chunks(n: int, n_bytes_each: int, staging_bytes: int) -> Iterator[slice]:
    """Slices of n things that together take at most the staging area; a slice of one thing if that takes more."""
    size = max(1, staging_bytes // max(n_bytes_each, 1))
    for start in range(0, n, size):
        yield slice(start, min(start + size, n))


def sq_norms(gradients: PerExample, staging_bytes: int) -> Tensor:
    """|h_b|² of every example b: [examples], in fp64 where the device has it.

    Args:
        gradients: of one parameter.
        staging_bytes: memory for intermediate results.
    """
    if isinstance(gradients, OuterProducts):
        return inner_products(gradients, gradients, staging_bytes)
    if isinstance(gradients, RowSums):
        n_bytes = _sq_of_row_sums_bytes(gradients)
        return _by_chunks(lambda s: _sq_of_row_sums(examples_of(gradients, s)), gradients, n_bytes, staging_bytes)
    n_bytes = _upcast_bytes(gradients)
    # A matrix is squared row by row: fp32 norms of very long rows lose digits.
    rows = gradients.flatten(min(2, gradients.dim() - 1))
    return _by_chunks(lambda s: _sq(wide(rows[s])), rows, n_bytes, staging_bytes)


def inner_products(x: PerExample, y: PerExample, staging_bytes: int) -> Tensor:
    """⟨x_b, y_b⟩ of every example b: [examples], in fp64 where the device has it.

    Args:
        x: a parameter's gradients by one of its uses.
        y: the same parameter's gradients by another use, of the same examples.
        staging_bytes: memory for intermediate results.
    """
    kinds = (Tensor, OuterProducts, RowSums)
    if _kind(x, kinds) < _kind(y, kinds):
        x, y = y, x
    if isinstance(x, OuterProducts) and isinstance(y, OuterProducts):
        return _dot_of_outer_products(x, y, staging_bytes)
    function, n_bytes = _dot_function(x, y)
    return _by_chunks(lambda s: function(examples_of(x, s), examples_of(y, s)), x, n_bytes, staging_bytes)


def at_rows(gradients: Tensor | OuterProducts, rows: Tensor) -> Tensor:
    """Some rows of each example's gradient, [examples, positions, columns] in fp32 or better.

    Args:
        gradients: of a matrix.
        rows: which rows of which example, [examples, positions].
    """
    if isinstance(gradients, Tensor):
        return wide(gradients.gather(1, rows[:, :, None].expand(*rows.shape, gradients.shape[2])))
    left, right = gradients.left, gradients.right
    # Only the elements of `left` that are looked up: [examples, positions of the factors, positions of the rows].
    looked_up = left.gather(2, rows[:, None, :].expand(len(left), left.shape[1], rows.shape[1]))
    return wide(looked_up).mT @ wide(right)


def at_rows_by_chunks(gradients: Tensor | OuterProducts, rows: Tensor, staging_bytes: int) -> Tensor:
    """`at_rows`, without intermediate results beyond the staging area."""
    n, n_positions = rows.shape
    n_columns = tensors_of(gradients)[-1].shape[-1]
    found = wide(tensors_of(gradients)[-1][:0]).new_empty(n, n_positions, n_columns)
    n_bytes = 4 * n_columns + 8 * tensors_of(gradients)[0].shape[1]
    for s in chunks(n, n_positions * n_bytes, staging_bytes):
        for t in chunks(n_positions, n_bytes, staging_bytes // (s.stop - s.start)):
            found[s, t] = at_rows(examples_of(gradients, s), rows[s, t])
    return found


def formed(gradients: PerExample, shape: torch.Size) -> Tensor:
    """The gradients as they are: [examples, *shape], fp32 or better.

    Args:
        gradients: of one parameter.
        shape: of the parameter.
    """
    if isinstance(gradients, Tensor):
        return wide(gradients)
    if isinstance(gradients, OuterProducts):
        return (wide(gradients.left).mT @ wide(gradients.right)).reshape(-1, *shape)
    values = wide(gradients.values)
    rows = gradients.rows[:, :, None].expand_as(values).long()
    return values.new_zeros(len(values), *shape).scatter_add_(1, rows, values)


def dot_at_rows(x: RowSums, values: Tensor, staging_bytes: int) -> Tensor:
    """⟨x_b, y_b⟩ of every example, where `values` are y's rows at `x.rows`: [examples]."""
    n_bytes = 8 * x.values[0].numel()
    return _by_chunks(lambda s: _dot(wide(x.values[s]), values[s]), x, n_bytes, staging_bytes)


def _kind(gradients: PerExample, kinds: tuple[type, ...]) -> int:
    return next(i for i, kind in enumerate(kinds) if isinstance(gradients, kind))


def _dot_function(x: PerExample, y: PerExample) -> tuple[Callable[..., Tensor], int]:
    """What multiplies two gradients of some examples, and the bytes it needs for each example."""
    if isinstance(x, RowSums):
        if isinstance(y, RowSums):
            return _dot_of_row_sums, 5 * x.rows.shape[1] * y.rows.shape[1] + _upcast_bytes(x.values, y.values)
        n_bytes = 8 * x.values[0].numel() + 8 * x.rows.shape[1] * tensors_of(y)[0].shape[1]
        return (lambda part_x, part_y: _dot(wide(part_x.values), at_rows(part_y, part_x.rows))), n_bytes
    if isinstance(x, OuterProducts):
        return _dot_of_outer_products_and_dense, 8 * x.left[0].numel() + _upcast_bytes(x.left, x.right)
    assert isinstance(y, Tensor)
    return (lambda part_x, part_y: _dot(wide(part_x), wide(part_y))), 4 * x[0].numel() + _upcast_bytes(x, y)


def _dot_of_outer_products(x: OuterProducts, y: OuterProducts, staging_bytes: int) -> Tensor:
    """By Gram matrices, ⟨l_x l_yᵀ, r_x r_yᵀ⟩, or by forming the gradients: whichever takes fewer operations."""
    n_x, n_y, n_rows, n_columns = x.left.shape[-2], y.left.shape[-2], x.left.shape[-1], x.right.shape[-1]
    n_operations_gram = n_x * n_y * (n_rows + n_columns)
    n_operations_formed = (n_x if x is y else n_x + n_y) * n_rows * n_columns
    way = _gram if n_operations_gram < n_operations_formed else _formed
    return way(x, y, staging_bytes)


def _gram(x: OuterProducts, y: OuterProducts, staging_bytes: int) -> Tensor:
    n_bytes = 8 * _n_groups(x) * x.left.shape[-2] * y.left.shape[-2]
    n_bytes += _upcast_bytes(x.left, x.right) * (1 if x is y else 2)

    def of_chunk(s: slice) -> Tensor:
        of_left = wide(x.left[s]) @ wide(y.left[s]).mT
        of_right = wide(x.right[s]) @ wide(y.right[s]).mT
        # Terms of both signs would lose digits in one long sum: rows are summed in fp32, their sums in fp64.
        return _total(of_left.mul_(of_right).sum(-1))

    return _by_chunks(of_chunk, x, n_bytes, staging_bytes)


def _formed(x: OuterProducts, y: OuterProducts, staging_bytes: int) -> Tensor:
    n_rows, n_columns = x.left.shape[-1], x.right.shape[-1]
    # One weight gradient, or two and their product; half of the staging area where factors must be copied to fp32.
    is_copied = _upcast_bytes(x.left, x.right, y.left, y.right) > 0
    n_bytes_of_row = (
        (1 if x is y else 3) * (4 if is_copied else 1) * wide(x.left[:0]).element_size() * _n_groups(x) * n_columns
    )

    def of_rows(s: slice, rows: slice) -> Tensor:
        formed = _form(x, s, rows, staging_bytes)
        return _sq(formed) if x is y else _dot(formed, _form(y, s, rows, staging_bytes))

    def of_chunk(s: slice) -> Tensor:
        # The gradient of a single example that is larger than the staging area is formed in blocks of rows.
        return torch.stack([of_rows(s, rows) for rows in chunks(n_rows, n_bytes_of_row, staging_bytes)]).sum(0)

    if n_bytes_of_row * n_rows > staging_bytes:
        return torch.cat([of_chunk(slice(b, b + 1)) for b in range(len(x.left))])
    examples = chunks(len(x.left), n_bytes_of_row * n_rows, staging_bytes)
    return torch.cat([of_rows(s, slice(None)) for s in examples])


def _form(x: OuterProducts, examples: slice, rows: slice, staging_bytes: int) -> Tensor:
    """Some rows of some examples' gradients: [examples, (groups,) rows, columns], fp32 or better."""
    left, right = x.left[examples, ..., rows], x.right[examples]
    if left.dtype == right.dtype and left.dtype.itemsize >= 4:
        return left.mT @ right
    # 16-bit factors are copied to fp32 before they are multiplied: in blocks of positions, in half of the staging area.
    n_bytes = 4 * (left[..., :1, :].numel() + right[..., :1, :].numel())
    formed: Tensor | None = None
    for t in chunks(left.shape[-2], n_bytes, staging_bytes // 2):
        part = wide(left[..., t, :]).mT @ wide(right[..., t, :])
        formed = part if formed is None else formed.add_(part)
    assert formed is not None
    return formed


def _dot_of_outer_products_and_dense(x: OuterProducts, y: Tensor) -> Tensor:
    left, right = (wide(t if t.dim() == 4 else t[:, None]) for t in (x.left, x.right))
    matrix = wide(y).reshape(len(left), left.shape[1], left.shape[-1], right.shape[-1])
    return _dot(right @ matrix.mT, left)


def _sq_of_row_sums(x: RowSums) -> Tensor:
    """The values of equal rows are added up, then squared."""
    n, n_positions, n_columns = x.values.shape
    if x.n_rows <= n_positions:
        n_places, places = x.n_rows, x.rows
    else:
        # Equal rows stand side by side once they are sorted, and get one place. (`unique` would wait for the device.)
        ordered, order = x.rows.sort(dim=1)
        numbers = torch.zeros_like(order)
        numbers[:, 1:] = (ordered[:, 1:] != ordered[:, :-1]).cumsum(1)
        n_places, places = n_positions, torch.empty_like(order).scatter_(1, order, numbers)
    first_places = torch.arange(n, device=places.device)[:, None] * n_places
    values = wide(x.values)
    sums = values.new_zeros(n * n_places, n_columns)
    sums.index_add_(0, (first_places + places).flatten(), values.flatten(0, 1))
    return _sq(sums.view(n, n_places, n_columns))


def _sq_of_row_sums_bytes(x: RowSums) -> int:
    _, n_positions, n_columns = x.values.shape
    n_bytes_of_sums = wide(x.values[:0]).element_size() * n_columns * min(n_positions, x.n_rows)
    return n_bytes_of_sums + 6 * 8 * n_positions + _upcast_bytes(x.values)


def _dot_of_row_sums(x: RowSums, y: RowSums) -> Tensor:
    equal = x.rows[:, :, None] == y.rows[:, None, :]
    return _total((wide(x.values) @ wide(y.values).mT).mul_(equal).sum(-1))


def _n_groups(x: OuterProducts) -> int:
    return x.left.shape[1] if x.left.dim() == 4 else 1


def _upcast_bytes(*tensors: Tensor) -> int:
    """Bytes that one example of the 16-bit tensors takes in fp32."""
    return sum(4 * t[0].numel() for t in tensors if t.dtype.itemsize < 4)


def _by_chunks(
    of_chunk: Callable[[slice], Tensor], gradients: PerExample, n_bytes_each: int, staging_bytes: int
) -> Tensor:
    n_examples = len(tensors_of(gradients)[0])
    return torch.cat([of_chunk(s) for s in chunks(n_examples, n_bytes_each, staging_bytes)])


def _sq(values: Tensor) -> Tensor:
    """Σ values² over all dims but the first, the last dim in the tensor's own dtype and the others in fp64: [examples].

    A norm makes no copy of the values, as their squares would.
    """
    norms = torch.linalg.vector_norm(values, 2, -1)
    return _total(widened(norms).square_())


def _dot(x: Tensor, y: Tensor) -> Tensor:
    """Σ x y over all dims but the first, in the same precision: [examples]."""
    return _total((x * y).sum(-1))


def _total(values: Tensor) -> Tensor:
    """The sum over all dims but the first, in fp64 where the device has it: [examples]."""
    wider = widened(values)
    return wider.flatten(1).sum(1) if wider.dim() > 1 else wider
