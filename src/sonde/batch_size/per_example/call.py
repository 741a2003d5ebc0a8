"""One call of a layer, from its forward to its backward."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from sonde.batch_size.per_example.rules import Inputs, LayerRule


@dataclass(eq=False)
class Call:
    """One call of a layer in a forward. It lives as long as the graph that it is in.

    Attributes:
        name: the layer's name in the model.
        layer: the layer.
        rule: its rule.
        indices: the measured parameters of the layer, by their names within it.
        inputs: what it was called with; None before a checkpoint has run it again, and once it was taken.
        versions: how often each tensor of `inputs` had been written to.
        is_run_again: whether a checkpoint will run it again, for its input.
        table: the parameter whose rows it looks up; None for layers that are no tables.
        rows: those rows, [examples, positions].
        found: rows of this parameter's gradient by its other uses, which have come earlier in backward.
        n_found: the number of those uses.
        is_time_first: whether the examples are in dim 1 of what it was called with.
    """

    name: str
    layer: nn.Module
    rule: LayerRule
    indices: Mapping[str, int]
    inputs: Inputs | None = None
    versions: tuple[int, ...] = ()
    is_run_again: bool = False
    table: int | None = None
    rows: Tensor | None = None
    found: Tensor | None = None
    n_found: int = 0
    is_time_first: bool = False

    def read_time_first(self) -> None:
        """Take the examples from dim 1."""
        if not self.is_time_first and self.rows is not None:
            self.rows = self.rows.mT
        self.is_time_first = True

    def by_example(self, inputs: Inputs) -> Inputs:
        """What it was called with, with the examples in dim 0."""
        if not self.is_time_first:
            return inputs
        return tuple(t.movedim(1, 0) if isinstance(t, Tensor) and t.dim() > 1 else t for t in inputs)


def versions_of(values: Sequence[object]) -> tuple[int, ...]:
    """How often each tensor has been written to."""
    return tuple(t._version for t in values if isinstance(t, Tensor))
