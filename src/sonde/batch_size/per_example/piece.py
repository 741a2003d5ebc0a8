"""Adds up one piece: what backward gives of each call, and the check of each parameter's sum."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from sonde.batch_size.batch_dim import LayerSaw, is_time_first
from sonde.batch_size.per_example.covered import N_PROJECTIONS, PerExampleSquares, Projections, compared
from sonde.batch_size.per_example.gradients import PerExample, in_one, joined, sq_norms, tensors_of
from sonde.batch_size.per_example.rules import Inputs, NotCoveredError, layer_gradients
from sonde.batch_size.per_example.uses import CHANGED_IN_PLACE, Call, Layer, Uses, versions_of
from sonde.parallel.devices import to_device, zero_sums


class PieceSums:
    """The squared norms of each example's gradient, as backward gives its parts.

    Args:
        parameters: measured parameters by name.
        staging_bytes: memory for intermediate results and, for each parameter, for the uses that are kept.
    """

    def __init__(self, parameters: Mapping[str, Tensor], staging_bytes: int) -> None:
        self._names = tuple(parameters)
        self._staging_bytes = staging_bytes
        self.uses = [Uses(parameter, staging_bytes) for parameter in parameters.values()]
        self._device = self.uses[0].parameter.device
        self._projections = Projections(list(parameters.values()))
        self.several_backwards = False
        self.forget(refusals=True)

    def forget(self, *, refusals: bool) -> None:
        """Forget what backward has added. Calls whose backward is still to come stay.

        Args:
            refusals: whether to forget too what forward has refused and seen. Its backward may be still to come.
        """
        for uses in self.uses:
            uses.forget(refusals=refusals)
        if refusals:
            self.saw: list[LayerSaw] = []
            """What layers were called with that know which dim is the batch."""
        self._squares: set[int] = set()
        """Numbers of examples that are numbers of positions too."""
        self._projected: dict[int, Tensor] = {}
        """Projections of each row's gradient over all parameters, by the number of rows; [rows, projections]."""
        self.again: defaultdict[Layer, list[Inputs]] = defaultdict(list)
        """What layers were called with when a checkpoint ran them again, until their first calls get it."""
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
        """Use the gradients whose calls have their inputs, now that no checkpoint is being run again.

        A checkpoint runs its own calls again, in the order of the first forward, and backward comes to the last
        checkpoint first. So k calls of a layer that were run again are the last k of those without an input. Where that
        is wrong, as in branches that backward takes in another order, the check of the gradients' sum shows it.
        """
        for layer, again in self.again.items():
            waiting = next(iter(layer.parameters.values())).waiting
            missing = [call for call in waiting if call.layer is layer and call.is_run_again]
            missing.sort(key=lambda call: call.number)
            for call, inputs in zip(reversed(missing), reversed(again), strict=False):
                call.receive(inputs)
        self.again.clear()
        early, self._early = self._early, []
        for call, grad in early:
            if call.is_run_again:  # backward runs a checkpoint's last layer again only after its hook
                self._early.append((call, grad))
            else:
                self._use(call, grad)

    def _use(self, call: Call, grad: Tensor) -> None:
        """Take the gradient of what a call has returned, whose input is there."""
        for uses in call.layer.parameters.values():
            uses.waiting.discard(call)
        if call.inputs is None:
            call.layer.refuse("backward went through its layer's call twice: say several_backwards=True")
            return
        if versions_of(*call.inputs) != call.versions:
            call.layer.refuse(CHANGED_IN_PLACE)
            return
        for each in {call, *(other for uses in call.layer.parameters.values() for other in uses.waiting)}:
            # A lookup that is still to come too: another use of its table may ask for its rows.
            each.dim = int(each.layer.rule.may_read_time_first and is_time_first(each.shape[:-1], self.saw))
        dim = call.dim or call.layer.rule.example_dim(call.layer.module)
        try:
            self._add(call, grad.movedim(dim, 0) if dim < grad.dim() else grad)
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

    def take(
        self, n_examples: int, reason_for_unseen: Mapping[str, str], reason_for_all: str | None
    ) -> PerExampleSquares:
        """The squared norms of the piece. `forget` follows.

        Args:
            n_examples: examples in the piece.
            reason_for_unseen: why a parameter's gradient may be seen by no rule.
            reason_for_all: why nothing is covered, if so.
        """
        self._settle()
        for call, _ in self._early:
            call.layer.refuse("its checkpoint did not run it again in backward")
        reasons: dict[str, str] = {}
        for name, uses in zip(self._names, self.uses, strict=True):
            why_not = uses.why_not(n_examples, reason_for_unseen[name], is_square=n_examples in self._squares)
            if (reason := reason_for_all or why_not) is not None:
                reasons[name] = reason
        projections = self._projected.get(n_examples, zero_sums(n_examples, N_PROJECTIONS, device=self._device))
        return compared(self._names, self.uses, reasons, projections)


def _measured(layer: Layer, found: Mapping[str, PerExample], n_examples: int) -> Iterator[tuple[Uses, PerExample]]:
    """What a rule has given for measured parameters, after a look at its names and shapes."""
    for name, gradients in found.items():
        rule = f"the rule of {layer.name!r} ({type(layer.module).__name__})"
        if (uses := layer.parameters.get(name)) is None:  # others need not be measured
            if not _has(layer.module, name):
                raise AttributeError(f"{rule} gives {name!r}, and the layer has no such parameter")
            continue
        expected, got = [n_examples, *uses.parameter.shape], [list(t.shape) for t in tensors_of(gradients)]
        is_whole = not isinstance(gradients, Tensor) or got == [expected]
        if not is_whole or {*map(len, tensors_of(gradients))} != {n_examples}:
            raise ValueError(
                f"{rule} must give {name!r} as a tensor {expected} or as factors of {n_examples} examples, got {got}"
            )
        yield uses, gradients


def _has(layer: nn.Module, name: str) -> bool:
    """Whether a layer has a parameter. It is looked up and not read: a parametrization or a property may compute it."""
    owner, _, last = name.rpartition(".")
    found = dict(layer.named_modules()).get(owner)
    return name in dict(layer.named_parameters()) or (found is not None and last in dir(found))
