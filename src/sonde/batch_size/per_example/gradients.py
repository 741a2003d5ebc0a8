"""The gradients of all examples for one parameter, in three forms, and their squared norms.

A plain tensor [examples, *shape of the parameter] holds them as they are. For a matrix that would take a weight
gradient for each example, so a matrix's gradients stay factors (`OuterProducts`), and a table's are the values of the
rows that were looked up (`RowSums`).

Every function works through the examples in chunks. What it holds besides its arguments stays below `staging_bytes`, or
below one weight gradient where a single example needs more.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sonde.parallel.devices import accumulation_dtype, widened


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
    return _in_form_of(gradients, [tensor[s] for tensor in tensors_of(gradients)])


def joined(parts: Sequence[PerExample]) -> PerExample:
    """Chunks of examples as one."""
    return _in_form_of(parts[0], [in_one(tensors) for tensors in zip(*map(tensors_of, parts), strict=True)])


def _in_form_of(like: PerExample, tensors: list[Tensor]) -> PerExample:
    if isinstance(like, OuterProducts):
        return OuterProducts(*tensors)
    return RowSums(tensors[0], tensors[1], like.n_rows) if isinstance(like, RowSums) else tensors[0]


def n_bytes_of(gradients: PerExample) -> int:
    """Bytes of memory that the gradients take."""
    return sum(t.numel() * t.element_size() for t in tensors_of(gradients))


def wide(tensor: Tensor) -> Tensor:
    """A floating-point tensor in fp32 or better: the tensor itself if it is."""
    return tensor.float() if tensor.dtype.itemsize < 4 else tensor


def _multiplies(x: Tensor, y: Tensor) -> bool:
    """Whether the device has a product of two such tensors in fp32 or better, without a copy of them."""
    # NVIDIA's tensor cores multiply 16 bits exactly, and add in fp32.
    has_mixed_product = x.is_cuda and torch.version.cuda is not None
    return x.dtype == y.dtype and (x.dtype.itemsize >= 4 or has_mixed_product)


def product(x: Tensor, y: Tensor) -> Tensor:
    """x y of matrices, […, n, m] by […, m, k], in fp32 or better."""
    if x.dtype.itemsize < 4 and _multiplies(x, y):
        products = torch.bmm(x.flatten(0, -3), y.flatten(0, -3), out_dtype=torch.float32)
        return products.view(*x.shape[:-2], *products.shape[1:])
    return wide(x) @ wide(y)


def chunks(n: int, n_bytes_each: int, staging_bytes: int) -> Iterator[slice]:
    """Slices of n things that together take at most the staging area; a slice of one thing if that takes more."""
    size = max(1, staging_bytes // max(n_bytes_each, 1))
    for start in range(0, n, size):
        yield slice(start, min(start + size, n))


def by_chunks(
    of_chunk: Callable[[slice], Tensor], gradients: PerExample, n_bytes_each: int, staging_bytes: int
) -> Tensor:
    """What a function gives for some examples at a time, joined: [examples, …].

    Args:
        of_chunk: the function.
        gradients: of all examples.
        n_bytes_each: memory that the function takes for each example.
        staging_bytes: memory that it may take.
    """
    n_examples = len(tensors_of(gradients)[0])
    return in_one([of_chunk(s) for s in chunks(n_examples, n_bytes_each, staging_bytes)])


def in_one(parts: Sequence[Tensor]) -> Tensor:
    """Tensors of some examples as one of all, [examples, …]; without a copy if there is only one."""
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))


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
        return by_chunks(lambda s: _sq_of_row_sums(examples_of(gradients, s)), gradients, n_bytes, staging_bytes)
    n_bytes = _upcast_bytes(gradients)
    # A matrix is squared row by row: fp32 norms of very long rows lose digits.
    rows = gradients.flatten(min(2, gradients.dim() - 1))
    return by_chunks(lambda s: _sq(wide(rows[s])), rows, n_bytes, staging_bytes)


def inner_products(x: PerExample, y: PerExample, staging_bytes: int) -> Tensor:
    """⟨x_b, y_b⟩ of every example b: [examples], in fp64 where the device has it.

    Args:
        x: a parameter's gradients by one of its uses.
        y: the same parameter's gradients by another use, of the same examples.
        staging_bytes: memory for intermediate results.
    """
    if isinstance(x, OuterProducts) and isinstance(y, OuterProducts):
        return _dot_of_outer_products(x, y, staging_bytes)
    if isinstance(x, Tensor) or isinstance(y, RowSums):
        x, y = y, x
    n_bytes = 16 * sum(t[0].numel() for t in (*tensors_of(x), *tensors_of(y)))
    if isinstance(x, RowSums):
        n_bytes += 8 * x.rows.shape[1] * tensors_of(y)[0].shape[1]
    return by_chunks(lambda s: _dot_of_forms(examples_of(x, s), examples_of(y, s)), x, n_bytes, staging_bytes)


def _dot_of_forms(x: PerExample, y: PerExample) -> Tensor:
    """⟨x_b, y_b⟩ of any two forms but two `OuterProducts`. Row sums come first, a plain tensor last."""
    if isinstance(x, RowSums):
        if not isinstance(y, RowSums):
            return _dot(wide(x.values), _at_rows(y, x.rows))
        rows, values = torch.cat((x.rows, y.rows), 1), torch.cat((wide(x.values), wide(y.values)), 1)
        # |x + y|² = |x|² + |y|² + 2⟨x, y⟩
        return (_sq_of_row_sums(RowSums(rows, values, x.n_rows)) - _sq_of_row_sums(x) - _sq_of_row_sums(y)) / 2
    assert isinstance(y, Tensor)
    return _dot(formed(x, y.shape[1:]), wide(y))


def only_rows(gradients: Tensor | OuterProducts, rows: Tensor, n_rows: int, staging_bytes: int) -> RowSums:
    """Some rows of each example's gradient, each of them once.

    Args:
        gradients: of a matrix.
        rows: which rows of which example, [examples, positions]; a row may occur several times.
        n_rows: rows of the matrix.
        staging_bytes: memory for intermediate results.
    """
    rows = rows.sort(1).values
    n, n_positions = rows.shape
    n_columns = tensors_of(gradients)[-1].shape[-1]
    values = wide(tensors_of(gradients)[-1][:0]).new_empty(n, n_positions, n_columns)
    n_bytes = 4 * n_columns + 8 * tensors_of(gradients)[0].shape[1]
    for s in chunks(n, n_positions * n_bytes, staging_bytes):
        for t in chunks(n_positions, n_bytes, staging_bytes // (s.stop - s.start)):
            values[s, t] = _at_rows(examples_of(gradients, s), rows[s, t])
    values[:, 1:].masked_fill_((rows[:, 1:] == rows[:, :-1])[:, :, None], 0.0)
    return RowSums(rows, values, n_rows)


def _at_rows(gradients: Tensor | OuterProducts, rows: Tensor) -> Tensor:
    """Some rows of each example's gradient of a matrix, [examples, positions, columns] in fp32 or better."""
    if isinstance(gradients, Tensor):
        return wide(gradients.gather(1, rows[:, :, None].expand(*rows.shape, gradients.shape[2])))
    left, right = gradients.left, gradients.right
    # Only the elements of `left` that are looked up: [examples, positions of the factors, positions of the rows].
    looked_up = left.gather(2, rows[:, None, :].expand(len(left), left.shape[1], rows.shape[1]))
    return product(looked_up.mT, right)


def formed(gradients: PerExample, shape: torch.Size) -> Tensor:
    """The gradients as they are: [examples, *shape], fp32 or better.

    Args:
        gradients: of one parameter.
        shape: of the parameter.
    """
    if isinstance(gradients, Tensor):
        return wide(gradients)
    if isinstance(gradients, OuterProducts):
        return product(gradients.left.mT, gradients.right).reshape(-1, *shape)
    values = wide(gradients.values)
    rows = gradients.rows[:, :, None].expand_as(values)
    return values.new_zeros(len(values), *shape).scatter_add_(1, rows, values)


def _dot_of_outer_products(x: OuterProducts, y: OuterProducts, staging_bytes: int) -> Tensor:
    """By Gram matrices, ⟨l_x l_yᵀ, r_x r_yᵀ⟩, or by forming the gradients: whichever takes fewer operations."""
    n_x, n_y, n_rows, n_columns = x.left.shape[-2], y.left.shape[-2], x.left.shape[-1], x.right.shape[-1]
    n_operations_gram = n_x * n_y * (n_rows + n_columns)
    n_operations_formed = (n_x if x is y else n_x + n_y) * n_rows * n_columns
    way = _gram if n_operations_gram < n_operations_formed else _formed
    return way(x, y, staging_bytes)


def _gram(x: OuterProducts, y: OuterProducts, staging_bytes: int) -> Tensor:
    n_bytes = 8 * _n_groups(x) * x.left.shape[-2] * y.left.shape[-2]
    n_bytes += _copied_bytes(x) * (1 if x is y else 2)

    def of_chunk(s: slice) -> Tensor:
        of_left = product(x.left[s], y.left[s].mT)
        of_right = product(x.right[s], y.right[s].mT)
        # Terms of both signs would lose digits in one long sum: rows are summed in fp32, their sums in fp64.
        return _total(of_left.mul_(of_right).sum(-1))

    return by_chunks(of_chunk, x, n_bytes, staging_bytes)


def _formed(x: OuterProducts, y: OuterProducts, staging_bytes: int) -> Tensor:
    n_rows, n_columns = x.left.shape[-1], x.right.shape[-1]
    # One weight gradient, or two and their product; half of the staging area where factors must be copied to fp32.
    is_copied = _copied_bytes(x) + _copied_bytes(y) > 0
    n_bytes_of_row = (
        (1 if x is y else 3) * (4 if is_copied else 1) * wide(x.left[:0]).element_size() * _n_groups(x) * n_columns
    )

    def of_rows(s: slice, rows: slice) -> Tensor:
        formed = _form(x, s, rows, staging_bytes)
        return _sq(formed) if x is y else _dot(formed, _form(y, s, rows, staging_bytes))

    def of_chunk(s: slice) -> Tensor:
        # The gradient of a single example that is larger than the staging area is formed in blocks of rows.
        blocks = chunks(n_rows, n_bytes_of_row * (s.stop - s.start), staging_bytes)
        return functools.reduce(torch.add, [of_rows(s, rows) for rows in blocks])

    return by_chunks(of_chunk, x, n_bytes_of_row * n_rows, staging_bytes)


def _form(x: OuterProducts, examples: slice, rows: slice, staging_bytes: int) -> Tensor:
    """Some rows of some examples' gradients: [examples, (groups,) rows, columns], fp32 or better."""
    left, right = x.left[examples, ..., rows], x.right[examples]
    if _multiplies(left, right):
        return product(left.mT, right)
    # 16-bit factors are copied to fp32 before they are multiplied: in blocks of positions, in half of the staging area.
    n_bytes = 4 * (left[..., :1, :].numel() + right[..., :1, :].numel())
    formed: Tensor | None = None
    for t in chunks(left.shape[-2], n_bytes, staging_bytes // 2):
        part = product(left[..., t, :].mT, right[..., t, :])
        formed = part if formed is None else formed.add_(part)
    assert formed is not None
    return formed


def _sq_of_row_sums(x: RowSums) -> Tensor:
    """The values of equal rows are added up, then squared."""
    n, n_positions, n_columns = x.values.shape
    # Equal rows stand side by side once they are sorted, and get one place. (`unique` would wait for the device.)
    ordered, order = x.rows.sort(dim=1)
    numbers = torch.zeros_like(order)
    numbers[:, 1:] = (ordered[:, 1:] != ordered[:, :-1]).cumsum(1)
    n_places = min(n_positions, x.n_rows)
    places = torch.empty_like(order).scatter_(1, order, numbers)
    first_places = torch.arange(n, device=places.device)[:, None] * n_places
    values = wide(x.values)
    sums = values.new_zeros(n * n_places, n_columns)
    sums.index_add_(0, (first_places + places).flatten(), values.flatten(0, 1))
    return _sq(sums.view(n, n_places, n_columns))


def _sq_of_row_sums_bytes(x: RowSums) -> int:
    _, n_positions, n_columns = x.values.shape
    n_bytes_of_sums = wide(x.values[:0]).element_size() * n_columns * min(n_positions, x.n_rows)
    return n_bytes_of_sums + 6 * 8 * n_positions + _upcast_bytes(x.values)


def _n_groups(x: OuterProducts) -> int:
    return x.left.shape[1] if x.left.dim() == 4 else 1


def _upcast_bytes(*tensors: Tensor) -> int:
    """Bytes that one example of the 16-bit tensors takes in fp32."""
    return sum(4 * t[0].numel() for t in tensors if t.dtype.itemsize < 4)


def _copied_bytes(x: OuterProducts) -> int:
    """Bytes of one example's factors in fp32, where they must be copied to be multiplied."""
    return 0 if _multiplies(x.left, x.right) else _upcast_bytes(x.left, x.right)


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
    return values.flatten(1).sum(1, dtype=accumulation_dtype(values.device)) if values.dim() > 1 else widened(values)
