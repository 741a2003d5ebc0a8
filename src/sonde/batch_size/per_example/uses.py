"""The uses of one parameter in one piece, added up before they are squared."""

from __future__ import annotations

import functools
import itertools
import weakref
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from sonde.batch_size.per_example.gradients import (
    PerExample,
    RowSums,
    formed,
    inner_products,
    n_bytes_of,
    only_rows,
    sq_norms,
    tensors_of,
    wide,
)
from sonde.batch_size.per_example.rules import Inputs, LayerRule

_clock = itertools.count()
"""Numbers calls, and moments between them."""

CHANGED_IN_PLACE = "what its layer was called with was changed in place before backward: change a copy instead"


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
        inputs: what it was called with; None before a checkpoint has run it again, and once it was taken.
        versions: how often each tensor of `inputs` had been written to.
        is_run_again: whether a checkpoint will run it again, for its input.
        dim: the dim of the inputs that holds the examples.
        number: later calls have larger ones.
    """

    layer: Layer
    shape: torch.Size
    inputs: Inputs | None = None
    versions: tuple[int, ...] = ()
    is_run_again: bool = False
    dim: int = 0
    number: int = field(default_factory=lambda: next(_clock))

    def receive(self, inputs: Inputs) -> None:
        """Take what it was called with."""
        self.inputs, self.versions, self.is_run_again = inputs, versions_of(*inputs), False

    def examples_first(self) -> Inputs:
        """What it was called with, with the examples in dim 0."""
        dim, inputs = self.dim, self.inputs or ()
        return tuple(t.movedim(dim, 0) if isinstance(t, Tensor) and t.dim() > dim else t for t in inputs)

    def rows(self) -> Tensor:
        """What a call of a table looks up, [examples, positions]."""
        assert self.layer.rule.rows is not None
        return self.layer.rule.rows(self.layer.module, self.examples_first())


def versions_of(*values: object) -> tuple[int, ...]:
    """How often each tensor has been written to."""
    return tuple(t._version for t in values if isinstance(t, Tensor))


class Uses:
    """What a piece has of one parameter.

    Args:
        parameter: as forward uses it.
        staging_bytes: memory for intermediate results, and for uses that are kept.
    """

    def __init__(self, parameter: Tensor, staging_bytes: int) -> None:
        self.parameter = parameter
        self._staging_bytes = staging_bytes
        self.waiting: weakref.WeakSet[Call] = weakref.WeakSet()
        """The calls whose backward may still come."""
        self.keeps_all = False
        """Whether a use may follow that forward has not shown."""
        self.forget(refusals=True)

    def forget(self, *, refusals: bool) -> None:
        """Forget what backward has added, and what forward has refused if that is said too."""
        if refusals:
            self._reason: str | None = None
            self.is_replaced = False
            """Whether its layer holds another parameter in its place."""
        self.sq_norms: Tensor | None = None
        """|Σ over uses so far|² of each example; None before the first use."""
        self._kept: list[tuple[PerExample, tuple[int, ...]]] = []
        """Gradients of uses that later ones must be multiplied with, and the versions of their tensors."""
        self._last_call: int | None = None
        """What is kept is enough for calls up to this number; None if it is for all."""
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
        self._reason = self._reason or reason

    def is_alone(self) -> bool:
        """Whether it has not been used in this piece, but for one call, and will not be used again."""
        return not self.keeps_all and self.sq_norms is None and not self.waiting

    def add_alone(self, squares: Tensor) -> None:
        """Take |h_b|² of each example by its only use."""
        self.sq_norms, self._last_call = squares, next(_clock)

    def add(self, call: Call, gradients: PerExample) -> None:
        """Add one use of several: |x + y|² = |x|² + |y|² + 2⟨x, y⟩."""
        if self._reason is not None:
            return
        if self._last_call is not None and call.number > self._last_call:
            self.keeps_all = True
            self.refuse(
                "it was used again after its first use had been reduced: from the next piece on its uses are kept"
            )
        elif any(versions_of(*tensors_of(kept)) != versions for kept, versions in self._kept):
            self.refuse(CHANGED_IN_PLACE)
        elif len(self.sizes) == 1:
            squares = sq_norms(gradients, self._staging_bytes)
            for kept, _ in self._kept:
                squares += 2 * inner_products(gradients, kept, self._staging_bytes)
            self.sq_norms = squares if self.sq_norms is None else self.sq_norms + squares
            self._keep(gradients)

    def _keep(self, gradients: PerExample) -> None:
        """Keep what later uses need of this one."""
        if not self.keeps_all and all(call.layer.rule.rows is not None for call in self.waiting):
            if not self.waiting:
                self._last_call = next(_clock)
                return
            if not isinstance(gradients, RowSums):
                # Only lookups are to come, as of an input embedding that is the output head too: they need their rows.
                self._last_call = next(_clock)
                rows = [call.rows() for call in self.waiting]
                self.sizes.update(map(len, rows))
                n_rows, n_columns = self.parameter.shape
                if len(self.sizes) > 1 or not self._fits(4 * n_columns * sum(r.numel() for r in rows)):
                    return
                gradients = only_rows(gradients, torch.cat(rows, 1), n_rows, self._staging_bytes)
        kept = [*(kept for kept, _ in self._kept), gradients]
        n_bytes = sum(map(n_bytes_of, kept))
        first = tensors_of(gradients)[-1]
        n_formed = len(first) * self.parameter.numel() * wide(first[:0]).element_size()
        if self._fits(min(n_bytes, n_formed)):
            if n_formed <= n_bytes:  # gradients of every example take less than the factors of several uses
                kept = [functools.reduce(torch.add, (formed(each, self.parameter.shape) for each in kept))]
            self._kept = [(each, versions_of(*tensors_of(each))) for each in kept]

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

    def why_not(self, n_examples: int, if_unseen: str, is_square: bool) -> str | None:
        """Why the parameter is not covered, as far as the host knows.

        Args:
            n_examples: examples in the piece.
            if_unseen: why no rule may have seen its gradient.
            is_square: whether sequences in the piece have as many positions as there are examples.
        """
        if self.is_replaced:
            return "its layer holds another parameter in its place now: attach anew (or make a new PerExampleNorms)"
        if self.whole is None:
            return None
        if self._reason is not None:
            return self._reason
        if not self.sizes:
            return if_unseen
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
