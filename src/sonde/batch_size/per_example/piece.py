"""Adds up one piece: what backward gives of each call of a layer, and of all uses of each parameter."""

from __future__ import annotations

import functools
import weakref
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from sonde.batch_size.batch_dim import LayerSaw, is_time_first
from sonde.batch_size.per_example.covered import N_PROJECTIONS, PerExampleSquares, Projections, rounding, tolerance
from sonde.batch_size.per_example.gradients import (
    PerExample,
    RowSums,
    formed,
    in_one,
    inner_products,
    joined,
    n_bytes_of,
    only_rows,
    sq_norms,
    tensors_of,
    wide,
)
from sonde.batch_size.per_example.rules import Inputs, LayerRule, NotCoveredError, layer_gradients
from sonde.parallel.devices import to_device, zero_sums


@dataclass(eq=False)
class Layer:
    """A layer whose calls are watched.

    Attributes:
        name: in the model.
        module: the layer itself.
        rule: its rule.
        parameters: the measured ones, by their names within it.
    """

    name: str
    module: nn.Module
    rule: LayerRule
    parameters: Mapping[str, Uses]

    def refuse(self, reason: str) -> None:
        """Note why its parameters are not covered in this piece."""
        for uses in self.parameters.values():
            uses.refuse(reason)


@dataclass(eq=False)
class Call:
    """One call of a layer in a forward. It lives as long as the graph that it is in.

    Attributes:
        layer: the layer.
        shape: of what it returned.
        saw: what layers of the same forward were called with that know which dim is the batch.
        inputs: what it was called with; None before a checkpoint has run it again, and once it was taken.
        is_run_again: whether a checkpoint will run it again, for its input.
        why_not: why its rule cannot be used; empty if it can.
    """

    layer: Layer
    shape: torch.Size
    saw: Sequence[LayerSaw]
    inputs: Inputs | None = None
    is_run_again: bool = False
    why_not: str = ""

    def examples_first(self) -> Inputs:
        """What it was called with, with the examples in dim 0."""
        dim, inputs = self._time_first(), self.inputs or ()
        return tuple(t.movedim(dim, 0) if isinstance(t, Tensor) and t.dim() > dim else t for t in inputs)

    def gradient_examples_first(self, grad: Tensor) -> Tensor:
        """The gradient of what it returned, likewise."""
        dim = self._time_first() or self.layer.rule.example_dim(self.layer.module)
        return grad.movedim(dim, 0) if dim < grad.dim() else grad

    def rows(self) -> Tensor:
        """What a call of a table looks up, [examples, positions]."""
        assert self.layer.rule.rows is not None
        return self.layer.rule.rows(self.layer.module, self.examples_first())

    def _time_first(self) -> int:
        return int(self.layer.rule.may_read_time_first and is_time_first(self.shape[:-1], self.saw))


class Uses:
    """What a piece has of one parameter. Its uses are added up before they are squared.

    Args:
        name: of the parameter.
        parameter: as forward uses it.
        staging_bytes: memory for intermediate results, and for uses that are kept.
    """

    def __init__(self, name: str, parameter: Tensor, staging_bytes: int) -> None:
        self.name, self.parameter, self._staging_bytes = name, parameter, staging_bytes
        self.if_unseen = ""
        """What it means if no rule sees its gradient."""
        self.waiting: weakref.WeakSet[Call] = weakref.WeakSet()
        """The calls whose backward may still come."""
        self.keeps_all = False
        """Whether a use may follow that forward has not shown."""
        self.forget()

    def forget(self) -> None:
        """Forget what backward has added."""
        self.reason: str | None = None
        """Why it is not covered."""
        self.sq_norms: Tensor | None = None
        """|Σ over uses so far|² of each example; None before the first use."""
        self._kept: list[PerExample] = []
        """Gradients of uses that later ones must be multiplied with."""
        self._enough_for: set[Call] | None = None
        """The calls for which what is kept is enough; None if it is for all."""
        self.sizes: set[int] = set()
        """Numbers of examples in its uses; empty before the first use."""
        self.dtypes = {self.parameter.dtype}
        """Its own, and those that its layers have returned and that backward computed in."""
        self.seen: Tensor | None = None
        """Projections of what the rules have seen."""
        self.whole: Tensor | None = None
        """Projections of its whole gradient; None if it had none."""
        self.is_looked_up = False
        """Whether it was looked up once for each row."""

    def refuse(self, reason: str) -> None:
        """Note why it is not covered in this piece. The first reason stays."""
        self.reason = self.reason or reason

    def is_alone(self) -> bool:
        """Whether it has not been used in this piece, but for one call, and will not be used again."""
        return not self.keeps_all and self.sq_norms is None and not self.waiting

    def add_alone(self, squares: Tensor) -> None:
        """Take |h_b|² of each example by its only use."""
        self.sq_norms, self._enough_for = squares, set()

    def add(self, call: Call, gradients: PerExample) -> None:
        """Add one use of several: |x + y|² = |x|² + |y|² + 2⟨x, y⟩."""
        if self.reason is not None:
            return
        if self._enough_for is not None and call not in self._enough_for:
            self.keeps_all = True
            self.refuse(
                "it was used again after its first use had been reduced: from the next piece on its uses are kept"
            )
        elif len(self.sizes) == 1:
            squares = sq_norms(gradients, self._staging_bytes)
            for kept in self._kept:
                squares += 2 * inner_products(gradients, kept, self._staging_bytes)
            self.sq_norms = squares if self.sq_norms is None else self.sq_norms + squares
            self._keep(gradients)

    def _keep(self, gradients: PerExample) -> None:
        """Keep what later uses need of this one."""
        if not self.keeps_all and all(call.layer.rule.rows is not None for call in self.waiting):
            self._enough_for = set(self.waiting)
            if not self.waiting:
                return
            if not isinstance(gradients, RowSums):
                # Only lookups are to come, as of an input embedding that is the output head too: they need their rows.
                rows = [call.rows() for call in self.waiting]
                self.sizes.update(map(len, rows))
                n_rows, n_columns = self.parameter.shape
                if len(self.sizes) > 1 or not self._fits(4 * n_columns * sum(r.numel() for r in rows)):
                    return
                gradients = only_rows(gradients, torch.cat(rows, 1), n_rows, self._staging_bytes)
        kept = [*self._kept, gradients]
        n_bytes = sum(map(n_bytes_of, kept))
        first = tensors_of(gradients)[-1]
        n_formed = len(first) * self.parameter.numel() * wide(first[:0]).element_size()
        if self._fits(min(n_bytes, n_formed)):
            if n_formed <= n_bytes:  # gradients of every example take less than the factors of several uses
                kept = [functools.reduce(torch.add, (formed(each, self.parameter.shape) for each in kept))]
            self._kept = kept

    def _fits(self, n_bytes: int) -> bool:
        """Whether its uses may be kept; if not, it is not covered."""
        most = max(self._staging_bytes, 4 * self.parameter.numel())
        if n_bytes > most:
            self.refuse(
                f"it is used several times, and multiplying the uses takes {n_bytes:,} bytes, more than {most:,}: "
                f"say staging_bytes={n_bytes:_}"
            )
            self._kept = []
        return n_bytes <= most

    def why_not(self, n_examples: int, *, is_square: bool) -> str | None:
        """Why the parameter is not covered, as far as the host knows.

        Args:
            n_examples: examples in the piece.
            is_square: whether sequences in the piece have as many positions as there are examples.
        """
        if self.whole is None or self.reason is not None:
            return None if self.whole is None else self.reason
        if not self.sizes:
            return self.if_unseen
        if self.sizes != {n_examples}:
            others = " and ".join(map(str, sorted(self.sizes)))
            return (
                f"the first dim of what its layer returned is {others}, not {n_examples} examples: count the rows if "
                "they are the examples; documents packed into rows and tokens cannot be told apart; an output that all "
                "examples share (position embeddings) must be expanded before the layer"
            )
        if self.is_looked_up and is_square:
            return (
                f"it was looked up once for each of {n_examples} rows, which may be the examples or the positions of a "
                f"sequence: take another number of examples than the {n_examples} positions"
            )
        return None


class PieceSums:
    """The squared norms of each example's gradient, as backward gives its parts.

    Args:
        parameters: measured parameters by name.
        staging_bytes: memory for intermediate results and, for each parameter, for the uses that are kept.
        several_backwards: whether backwards of the same examples add up.
    """

    def __init__(self, parameters: Mapping[str, Tensor], staging_bytes: int, *, several_backwards: bool) -> None:
        self._staging_bytes, self.several_backwards = staging_bytes, False
        self.uses = [Uses(name, parameter, staging_bytes) for name, parameter in parameters.items()]
        self._device = self.uses[0].parameter.device
        self._projections = Projections(list(parameters.values()))
        if several_backwards:
            self.add_backwards_up()
        self.forget()

    def add_backwards_up(self) -> None:
        """From the next piece on, its backwards are of the same examples, and add up."""
        self.several_backwards = True
        for uses in self.uses:
            uses.keeps_all = True

    def forget(self) -> None:
        """Forget what backward has added. Calls whose backward is still to come stay."""
        for uses in self.uses:
            uses.forget()
        self._squares: set[int] = set()
        """Numbers of examples that are numbers of positions too."""
        self._projected: dict[int, Tensor] = {}
        """Projections of each row's gradient over all parameters, by the number of rows; [rows, projections]."""
        self.again: defaultdict[Layer, list[Inputs]] = defaultdict(list)
        """What layers were called with when a checkpoint ran them again, until their first calls get it, the last call
        first. Where that is wrong, the check of the gradients' sum shows it."""
        self._early: list[tuple[Call, Tensor]] = []
        """Calls whose gradient has come. In checkpoints, their input may not have."""

    def forget_calls(self) -> None:
        """Let go of what layers were called with."""
        for uses in self.uses:
            for call in uses.waiting:
                call.inputs, call.is_run_again = None, False
            uses.waiting.clear()

    def expect(self, call: Call) -> None:
        """Note a call whose backward may come."""
        for uses in call.layer.parameters.values():
            uses.waiting.add(call)

    def add_whole(self, uses: Uses, grad: Tensor) -> None:
        """Take a parameter's gradient, as autograd is about to add it to `.grad`."""
        self._settle()
        projected = self._projections.of_gradient(grad)
        uses.whole = projected if uses.whole is None else uses.whole + projected

    def add_use(self, call: Call, grad: Tensor, dtype: torch.dtype) -> None:
        """Take the gradient of what a call has returned.

        Args:
            call: as it was expected.
            grad: as autograd gives it.
            dtype: that backward computes in.
        """
        for uses in call.layer.parameters.values():
            uses.dtypes |= {grad.dtype, dtype}
        self._early.append((call, grad))
        self._settle()

    def _settle(self) -> None:
        """Use the gradients whose calls have their inputs, now that no checkpoint is being run again."""
        early, self._early = self._early, []
        for call, grad in early:
            if call.is_run_again and self.again[call.layer]:
                call.inputs, call.is_run_again = self.again[call.layer].pop(), False
            if call.is_run_again:  # backward runs a checkpoint's last layer again only after its hook
                self._early.append((call, grad))
            else:
                self._use(call, grad)

    def _use(self, call: Call, grad: Tensor) -> None:
        """Take the gradient of what a call has returned, whose input is there."""
        for uses in call.layer.parameters.values():
            uses.waiting.discard(call)
        if call.why_not or call.inputs is None:
            call.layer.refuse(
                call.why_not or "backward went through its layer's call twice: say several_backwards=True"
            )
            return
        try:
            self._add(call, call.gradient_examples_first(grad))
        except NotCoveredError as reason:
            call.layer.refuse(str(reason))
        if not self.several_backwards:
            call.inputs = None

    def _add(self, call: Call, grad: Tensor) -> None:
        if grad.shape[:1] == (0,):  # an expert without tokens
            for uses in call.layer.parameters.values():
                uses.sizes.add(0)
            return
        alone = {uses for uses in call.layer.parameters.values() if uses.is_alone()}
        parts: defaultdict[Uses, list[Any]] = defaultdict(list)
        projected: defaultdict[Uses, list[Tensor]] = defaultdict(list)
        found = layer_gradients(call.layer.rule, call.layer.module, call.examples_first(), grad, self._staging_bytes)
        for examples, of_chunk in found:
            for uses, gradients in _measured(call.layer, of_chunk, examples.stop - examples.start):
                projected[uses].append(self._projections.of_examples(gradients, uses.parameter, self._staging_bytes))
                parts[uses].append(sq_norms(gradients, self._staging_bytes) if uses in alone else gradients)
        if grad.dim() == 3 and grad.shape[1] == len(grad):
            self._squares.add(len(grad))
        for uses, of_chunks in parts.items():
            uses.sizes.add(len(grad))
            uses.is_looked_up |= call.layer.rule.rows is not None and grad.dim() == 2
            self._add_projections(uses, in_one(projected[uses]))
            if uses in alone:
                uses.add_alone(in_one(of_chunks))
            else:
                uses.add(call, joined(of_chunks))

    def _add_projections(self, uses: Uses, of_rows: Tensor) -> None:
        seen = of_rows.sum(0)
        uses.seen = seen if uses.seen is None else uses.seen + seen
        of_rows = to_device(of_rows, self._device)
        before = self._projected.get(len(of_rows))
        self._projected[len(of_rows)] = of_rows if before is None else before + of_rows

    def take(self, n_examples: int, reason_for_all: str | None) -> PerExampleSquares:
        """The squared norms of the piece. `forget` follows.

        Args:
            n_examples: examples in the piece.
            reason_for_all: why nothing is covered, if so.
        """
        self._settle()
        for call, _ in self._early:
            call.layer.refuse("its checkpoint did not run it again in backward")
        reasons: dict[str, str] = {}
        for uses in self.uses:
            why_not = uses.why_not(n_examples, is_square=n_examples in self._squares)
            if (reason := reason_for_all or why_not) is not None:
                reasons[uses.name] = reason
        projections = self._projected.get(n_examples, zero_sums(n_examples, N_PROJECTIONS, device=self._device))
        return _compared(self.uses, reasons, projections)


def _measured(layer: Layer, found: Mapping[str, PerExample], n_examples: int) -> Iterator[tuple[Uses, PerExample]]:
    """What a rule has given for measured parameters, after a look at the shapes. Others need not be measured."""
    for name in found.keys() & layer.parameters.keys():
        uses, gradients = layer.parameters[name], found[name]
        expected, got = [n_examples, *uses.parameter.shape], [list(t.shape) for t in tensors_of(gradients)]
        is_whole = not isinstance(gradients, Tensor) or got == [expected]
        if not is_whole or {*map(len, tensors_of(gradients))} != {n_examples}:
            raise ValueError(
                f"the rule of {layer.name!r} ({type(layer.module).__name__}) must give {name!r} as a tensor {expected} "
                f"or as factors of {n_examples} examples, got {got}"
            )
        yield uses, gradients


def _compared(uses: Sequence[Uses], reasons: Mapping[str, str], projections: Tensor) -> PerExampleSquares:
    """Compare what the rules have seen with the whole gradients, and blank the rows that are not covered.

    Args:
        uses: what the piece has of each parameter.
        reasons: why parameters are not covered, as far as known.
        projections: of each example's gradient, [examples, projections].
    """
    names = tuple(each.name for each in uses)
    n_examples, n_projections = projections.shape

    def column(values: Iterable[Tensor | None], n: int) -> Tensor:
        nothing = projections.new_zeros(n)
        return torch.stack([nothing if v is None else to_device(v, projections.device) for v in values])

    def on_device(values: list[float]) -> Tensor:
        return to_device(torch.tensor(values, dtype=projections.dtype, device="cpu"), projections.device)

    # A parameter without a gradient adds nothing, whatever its layers did: `backward(inputs=…)` leaves it out.
    has_row = [each.whole is not None and each.sizes == {n_examples} for each in uses]
    squares = column((each.sq_norms if has else None for each, has in zip(uses, has_row, strict=True)), n_examples)
    whole = column((each.whole for each in uses), n_projections)
    seen = column((None if each.whole is None else each.seen for each in uses), n_projections)
    tolerances = on_device([tolerance(each.dtypes, each.parameter.device) for each in uses])
    # A bias of attention's keys, for one, has a gradient that is nothing but rounding of the layer's largest gradient.
    part_of_layer = on_device([rounding(each.dtypes) for each in uses]) / tolerances
    is_known = on_device([float(name not in reasons) for name in names]) > 0
    # A projection has the variance |H|². Where examples cancel, rounding goes by their own norms, not by the sum's.
    scale = whole.square().sum(1) + n_projections * squares.sum(1)
    difference = (whole - seen).square().sum(1)
    part = (difference / (scale + part_of_layer.square() * _largest_in_layer(names, scale))).sqrt()
    # |Σ h_b|² ≤ B Σ |h_b|², and a projection is hardly ever ten times as large as expected. If it is, squares have
    # vanished.
    has_vanished = whole.square().sum(1) > 100 * n_projections * n_examples * squares.sum(1)
    is_out_of_range = has_vanished | ~squares.isfinite().all(1)
    unexplained = torch.where(difference == 0, 0.0, part).masked_fill(is_out_of_range, float("nan"))
    is_covered = is_known & (unexplained <= tolerances)
    return PerExampleSquares(
        names, squares.where(is_covered[:, None], float("nan")), unexplained, tolerances, dict(reasons), projections
    )


def _largest_in_layer(names: tuple[str, ...], values: Tensor) -> Tensor:
    """For each parameter, the largest finite value in its layer, by the names: [parameters]."""
    numbers: dict[str, int] = {}
    layers = [numbers.setdefault(name.rpartition(".")[0], len(numbers)) for name in names]
    index = to_device(torch.tensor(layers, device="cpu"), values.device)
    finite = values.nan_to_num(nan=0.0, posinf=0.0)
    return torch.zeros_like(values).scatter_reduce(0, index, finite, "amax")[index]
