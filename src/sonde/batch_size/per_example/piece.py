"""Adds up one piece: each use of a parameter, the products between its uses, and the check of their sum."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from sonde.batch_size.batch_dim import LayerSaw, is_time_first
from sonde.batch_size.per_example.call import Call, versions_of
from sonde.batch_size.per_example.gradients import (
    OuterProducts,
    PerExample,
    RowSums,
    at_rows_by_chunks,
    dot_at_rows,
    formed,
    inner_products,
    n_bytes_of,
    sq_norms,
    tensors_of,
    wide,
)
from sonde.batch_size.per_example.projection import N_PROJECTIONS, Projections, rounding, tolerance
from sonde.batch_size.per_example.result import PerExampleSquares, Row, assemble
from sonde.batch_size.per_example.rules import Inputs, NotCoveredError, layer_gradients
from sonde.parallel.devices import to_device, zero_sums

CHANGED_IN_PLACE = "what its layer was called with was changed in place before backward: change a copy instead"


@dataclass
class _Sums:
    """What is known of one parameter in one piece.

    Attributes:
        sq_norms: |Σ over uses so far|² of each example; None before the first use.
        n_uses: uses so far.
        kept: gradients of uses that later ones must be multiplied with, and the versions of their tensors.
        n_kept: the number of those uses.
        sizes: numbers of examples in its uses.
        dtypes: of what its layers have returned.
        seen: projections of what the rules have seen.
        whole: projections of its whole gradient; None if it had none.
    """

    sq_norms: Tensor | None = None
    n_uses: int = 0
    kept: list[tuple[PerExample, tuple[int, ...]]] = field(default_factory=list)
    n_kept: int = 0
    sizes: set[int] = field(default_factory=set)
    dtypes: set[torch.dtype] = field(default_factory=set)
    seen: Tensor | None = None
    whole: Tensor | None = None


class PieceSums:
    """The squared norms of each example's gradient, as backward gives its parts.

    Args:
        parameters: measured parameters by name.
        staging_bytes: memory for intermediate results and, for each parameter, for the uses that are kept.
        several_backwards: whether more uses may follow at any time.
    """

    def __init__(self, parameters: Mapping[str, Tensor], staging_bytes: int, several_backwards: bool) -> None:
        self._names = tuple(parameters)
        self._parameters = list(parameters.values())
        self._staging_bytes, self._several_backwards = staging_bytes, several_backwards
        self._projections = Projections(self._parameters)
        self._waiting: list[weakref.WeakSet[Call]] = [weakref.WeakSet() for _ in self._parameters]
        self._used_again: set[int] = set()
        self.new_piece()

    def add_backwards_up(self) -> None:
        """From the next piece on, more uses may follow at any time."""
        self._several_backwards = True

    def new_piece(self) -> None:
        """Forget the present piece. Calls whose backward is still to come stay."""
        self.forget_gradients()
        self._reasons: dict[int, str] = {}
        self._replaced: set[int] = set()

    def forget_gradients(self) -> None:
        """Forget what backward has added. What forward has refused stays: its backward may be still to come."""
        self._sums = [_Sums() for _ in self._parameters]
        self._lookups: dict[int, int] = {}
        self._has_positions: set[int] = set()
        self._projected: dict[int, Tensor] = {}
        """Projections of each row's gradient over all parameters, by the number of rows; [rows, projections]."""

    def forget_calls(self) -> None:
        """Let go of what layers were called with."""
        for waiting in self._waiting:
            for call in waiting:
                call.inputs = call.rows = call.found = None
                call.is_run_again = False
            waiting.clear()

    def expect(self, call: Call) -> None:
        """Note a call whose backward may come."""
        for index in call.indices.values():
            self._waiting[index].add(call)

    def read_time_first(self, call: Call, saw: Sequence[LayerSaw]) -> None:
        """Take a call's examples from dim 1, and those of lookups in the same parameter that look alike."""
        call.read_time_first()
        for index in call.indices.values():
            for other in self._waiting[index]:
                if other.rows is not None and is_time_first(other.rows.shape, saw):
                    other.read_time_first()

    def refuse(self, indices: Sequence[int], reason: str) -> None:
        """Note why parameters are not covered in this piece. The first reason stays."""
        for index in indices:
            self._reasons.setdefault(index, reason)

    def note_replaced(self, indices: Sequence[int]) -> None:
        """Note parameters whose layers hold others in their place now, which have no row here."""
        self._replaced.update(indices)

    def add_whole(self, index: int, grad: Tensor) -> None:
        """Take a parameter's gradient, as autograd is about to add it to `.grad`."""
        sums, projected = self._sums[index], self._projections.of_gradient(grad)
        sums.whole = projected if sums.whole is None else sums.whole + projected

    def note_dtype(self, call: Call, dtype: torch.dtype) -> None:
        """Note a dtype that backward computes in for a call, besides those of its tensors."""
        for index in call.indices.values():
            self._sums[index].dtypes.add(dtype)

    def add_use(self, call: Call, grad: Tensor) -> None:
        """Take the gradient of what a call has returned.

        Args:
            call: as it was expected.
            grad: with the examples in the first dim.
        """
        for index in call.indices.values():
            self._waiting[index].discard(call)
        indices = list(call.indices.values())
        if call.inputs is None:
            self.refuse(indices, "backward went through its layer's call twice: say several_backwards=True")
            return
        if versions_of(call.inputs) != call.versions:
            self.refuse(indices, CHANGED_IN_PLACE)
            return
        if len(grad) == 0:  # an expert without tokens
            for index in indices:
                self._note_shape(call, index, grad)
                self._sums[index].n_uses += 1
            return
        try:
            self._add(call, call.by_example(call.inputs), grad)
        except NotCoveredError as reason:
            self.refuse(indices, str(reason))
        if not self._several_backwards:
            call.inputs = None

    def _add(self, call: Call, inputs: Inputs, grad: Tensor) -> None:
        whole_uses = {i for i in call.indices.values() if not self._may_meet_others(i)}
        squares: dict[int, list[Tensor]] = {}
        parts: dict[int, list[PerExample]] = {}
        projected: dict[int, list[Tensor]] = {}
        for examples, found in layer_gradients(call.rule, call.layer, inputs, grad, self._staging_bytes):
            for index, gradients in self._measured(call, found, examples.stop - examples.start):
                found_of = self._projections.of_examples(gradients, self._parameters[index], self._staging_bytes)
                projected.setdefault(index, []).append(found_of)
                if index in whole_uses:
                    squares.setdefault(index, []).append(sq_norms(gradients, self._staging_bytes))
                else:
                    parts.setdefault(index, []).append(gradients)
        for index in {**squares, **parts}:
            self._note_shape(call, index, grad)
        for index, of_rows in projected.items():
            self._add_projections(index, torch.cat(of_rows))
        for index, of_chunks in squares.items():
            self._sums[index].sq_norms = torch.cat(of_chunks)
            self._sums[index].n_uses += 1
        for index, of_chunks_ in parts.items():
            self._add_to_others(index, call, of_chunks_)

    def _add_projections(self, index: int, of_rows: Tensor) -> None:
        sums, seen = self._sums[index], of_rows.sum(0)
        sums.seen = seen if sums.seen is None else sums.seen + seen
        of_rows = to_device(of_rows, self._parameters[0].device)
        before = self._projected.get(len(of_rows))
        self._projected[len(of_rows)] = of_rows if before is None else before + of_rows

    def _measured(self, call: Call, found: Mapping[str, PerExample], n_examples: int) -> list[tuple[int, PerExample]]:
        """What a rule has given for measured parameters, after a look at its names and shapes."""
        measured = []
        for name, gradients in found.items():
            if name not in call.indices:
                self._check_name(call, name)
                continue
            index = call.indices[name]
            expected = [n_examples, *self._parameters[index].shape]
            is_whole = not isinstance(gradients, Tensor) or list(gradients.shape) == expected
            if not is_whole or {len(t) for t in tensors_of(gradients)} != {n_examples}:
                got = [list(t.shape) for t in tensors_of(gradients)]
                raise ValueError(
                    f"the rule of {call.name!r} ({type(call.layer).__name__}) must give {name!r} as a tensor "
                    f"{expected} or as factors of {n_examples} examples, got {got}"
                )
            measured.append((index, gradients))
        return measured

    @staticmethod
    def _check_name(call: Call, name: str) -> None:
        """Refuse what a rule has given for no parameter of its layer. Others need not be measured."""
        owner, _, last = name.rpartition(".")
        # Looked up and not read: a parametrization or a property may compute it.
        found = dict(call.layer.named_modules()).get(owner)
        if name not in dict(call.layer.named_parameters()) and (found is None or last not in dir(found)):
            raise AttributeError(
                f"the rule of {call.name!r} ({type(call.layer).__name__}) gives {name!r}, and the layer has no such "
                "parameter"
            )

    def _may_meet_others(self, index: int) -> bool:
        """Whether a parameter has been used before in this piece, or may be used again."""
        again = self._several_backwards or index in self._used_again
        return again or self._sums[index].n_uses > 0 or len(self._waiting[index]) > 0

    def _note_shape(self, call: Call, index: int, grad: Tensor) -> None:
        sums = self._sums[index]
        sums.sizes.add(len(grad))
        sums.dtypes.add(grad.dtype)
        if call.table is not None and grad.dim() == 2:
            self._lookups[index] = len(grad)
        if grad.dim() == 3 and grad.shape[1] == len(grad):
            self._has_positions.add(len(grad))

    def _add_to_others(self, index: int, call: Call, parts: list[PerExample]) -> None:
        """Add one use of a parameter that has others: |x + y|² = |x|² + |y|² + 2⟨x, y⟩."""
        sums = self._sums[index]
        if index in self._reasons:
            return
        found, n_found = (call.found, call.n_found) if call.table == index else (None, 0)
        if sums.n_kept + n_found != sums.n_uses:
            self._used_again.add(index)
            self.refuse(
                [index],
                "it was used again after its first use had been reduced: from the next piece on its uses are kept",
            )
            return
        if any(versions_of(tensors_of(kept)) != versions for kept, versions in sums.kept):
            self.refuse([index], CHANGED_IN_PLACE)
            return
        gradients = _join(parts)
        if len(sums.sizes) == 1:
            squares = sq_norms(gradients, self._staging_bytes)
            for kept, _ in sums.kept:
                squares += 2 * inner_products(gradients, kept, self._staging_bytes)
            if found is not None:
                assert isinstance(gradients, RowSums)
                squares += 2 * dot_at_rows(gradients, found, self._staging_bytes)
            sums.sq_norms = squares if sums.sq_norms is None else sums.sq_norms + squares
        sums.n_uses += 1
        call.found, call.n_found = None, 0
        self._keep_for_others(index, gradients)

    def _keep_for_others(self, index: int, gradients: PerExample) -> None:
        """Keep what later uses of the parameter need of this one."""
        waiting = list(self._waiting[index])
        tables = [call for call in waiting if call.table == index and call.rows is not None]
        always = self._several_backwards or index in self._used_again
        if not always and len(tables) == len(waiting) and not isinstance(gradients, RowSums):
            # Only lookups are to come, as of an input embedding that is the output head too: they need their rows.
            for call in tables:
                self._keep_rows(index, call, gradients)
        elif always or waiting:
            self._keep(index, gradients)

    def _keep_rows(self, index: int, call: Call, gradients: Tensor | OuterProducts) -> None:
        assert call.rows is not None
        n_columns = self._parameters[index].shape[1]
        if len(call.rows) != len(tensors_of(gradients)[0]):
            self._sums[index].sizes.add(len(call.rows))
            return
        if not self._fits(index, 4 * call.rows.numel() * n_columns):
            return
        rows = at_rows_by_chunks(gradients, call.rows, self._staging_bytes)
        call.found = rows if call.found is None else call.found.add_(rows)
        call.n_found += 1

    def _keep(self, index: int, gradients: PerExample) -> None:
        sums = self._sums[index]
        shape = self._parameters[index].shape
        n_examples = len(tensors_of(gradients)[0])
        n_formed = n_examples * shape.numel() * wide(tensors_of(gradients)[-1][:0]).element_size()
        n_kept = sum(n_bytes_of(kept) for kept, _ in sums.kept)
        if n_kept + n_bytes_of(gradients) >= n_formed and len(sums.sizes) == 1:
            # Gradients of every example take less than the factors of several uses.
            if not self._fits(index, n_formed):
                return
            total = formed(gradients, shape)
            for kept, _ in sums.kept:
                total = total + formed(kept, shape)
            sums.kept = [(total, versions_of([total]))]
        elif self._fits(index, n_kept + n_bytes_of(gradients)):
            sums.kept.append((gradients, versions_of(tensors_of(gradients))))
        else:
            return
        sums.n_kept += 1

    def _fits(self, index: int, n_bytes: int) -> bool:
        """Whether a parameter's uses may be kept; if not, it is not covered."""
        most = max(self._staging_bytes, 4 * self._parameters[index].numel())
        if n_bytes > most:
            self.refuse(
                [index],
                f"it is used several times, and multiplying the uses takes {n_bytes:,} bytes, more than {most:,}: "
                f"say staging_bytes={n_bytes:_}",
            )
            self._sums[index].kept = []
        return n_bytes <= most

    def take(
        self, n_examples: int, reason_for_unseen: Mapping[str, str], reason_for_all: str | None
    ) -> PerExampleSquares:
        """The squared norms of the piece.

        Args:
            n_examples: examples in the piece.
            reason_for_unseen: why a parameter's gradient may be seen by no rule.
            reason_for_all: why nothing is covered, if so.
        """
        zeros = zero_sums(N_PROJECTIONS, device=self._parameters[0].device)
        nothing = zeros.new_zeros(n_examples)
        reasons: dict[str, str] = {}
        rows: list[Row] = []
        for index, (name, sums) in enumerate(zip(self._names, self._sums, strict=True)):
            reason = reason_for_all or self._reason(index, n_examples, reason_for_unseen[name])
            if reason is not None:
                reasons[name] = reason
            # A parameter without a gradient adds nothing, whatever its layers did: `backward(inputs=…)` leaves it out.
            has_row = sums.whole is not None and sums.sq_norms is not None and sums.sizes == {n_examples}
            row = sums.sq_norms if has_row and sums.sq_norms is not None else nothing
            whole = zeros if sums.whole is None else sums.whole
            seen = zeros if sums.whole is None or sums.seen is None else sums.seen
            parameter = self._parameters[index]
            dtypes = [parameter.dtype, *sums.dtypes]
            row, whole, seen = (to_device(t, zeros.device) for t in (row, whole, seen))
            rows.append(Row(row, whole, seen, tolerance(dtypes, parameter.device), rounding(dtypes)))
        projections = self._projected.get(n_examples, zeros.new_zeros(n_examples, N_PROJECTIONS))
        self.new_piece()
        return assemble(self._names, rows, reasons, projections)

    def _reason(self, index: int, n_examples: int, reason_for_unseen: str) -> str | None:
        sums = self._sums[index]
        if index in self._replaced:
            return "its layer holds another parameter in its place now: attach anew (or make a new PerExampleNorms)"
        if sums.whole is None:
            return None
        if index in self._reasons:
            return self._reasons[index]
        if sums.n_uses == 0:
            return reason_for_unseen
        if sums.sizes != {n_examples}:
            others = " and ".join(map(str, sorted(sums.sizes)))
            return (
                f"the first dim of what its layer returned is {others}, not {n_examples} examples: count the rows if "
                "they are the examples; documents packed into rows and tokens cannot be told apart; an output that all "
                "examples share (position embeddings) must be expanded before the layer"
            )
        if index in self._lookups and n_examples in self._has_positions:
            return (
                f"it was looked up once for each of {n_examples} rows, which may be the examples or the positions of a "
                f"sequence: take another number of examples than the {n_examples} positions"
            )
        return None


def _join(parts: list[PerExample]) -> PerExample:
    """Chunks of examples as one."""
    first = parts[0]
    if len(parts) == 1:
        return first
    joined = [torch.cat(tensors) for tensors in zip(*map(tensors_of, parts), strict=True)]
    if isinstance(first, OuterProducts):
        return OuterProducts(*joined)
    return RowSums(joined[0], joined[1], first.n_rows) if isinstance(first, RowSums) else joined[0]
