"""The batches of a measurement: how many units each holds, how much each weighs, and its loss."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from sonde.batch_size.batch_dim import units_in_batch

LossOf = Callable[[Any, Any], Tensor]
"""Makes the mean loss of a batch, 0-dim with a graph, of the model and the batch."""
NumberOf = float | Callable[[Any], float]
"""A number that is the same for every batch, or a function of the batch."""


@dataclass(frozen=True)
class CountedBatch:
    """One batch.

    Attributes:
        data: as it came.
        index: its place among this rank's batches, from 0.
        n_units: units in it.
        weight: how much it counts in the average of the losses.
    """

    data: Any
    index: int
    n_units: float
    weight: float


class MeasuredBatches:
    """This rank's batches, each taken from the user's iterable no sooner than it is asked for.

    Args:
        batches: the user's iterable.
        units: units in a batch; None to count the rows of its tensors.
        weight: of a batch; None for its units.
        most: most batches to take; None for all.

    Raises:
        ValueError: when `batches` is not iterable.
    """

    def __init__(self, batches: Any, *, units: NumberOf | None, weight: NumberOf | None, most: int | None) -> None:
        if isinstance(batches, (str, bytes, Tensor)) or not isinstance(batches, Iterable):
            raise ValueError(
                f"batches must be an iterable of micro-batches, got {type(batches).__name__}: pass a DataLoader or a "
                "list of batches"
            )
        self._iterator: Iterator[Any] = iter(batches)
        self._units, self._weight, self._most = units, weight, most
        self._next: CountedBatch | None = None
        self._is_exhausted = False
        self.n_taken = 0

    def peek(self) -> CountedBatch | None:
        """The next batch, which stays the next; None at the end of the data, or of the batches that may be taken."""
        if self._next is None and not self._is_exhausted and not self.reached_most:
            for data in self._iterator:
                self._next = self._counted(data)
                return self._next
            self._is_exhausted = True
        return self._next

    def take(self) -> CountedBatch | None:
        """The next batch; None at the end."""
        batch = self.peek()
        if batch is not None:
            self._next = None
            self.n_taken += 1
        return batch

    @property
    def reached_most(self) -> bool:
        """Whether as many batches were taken as may be."""
        return self._most is not None and self.n_taken >= self._most

    def _counted(self, data: Any) -> CountedBatch:
        index = self.n_taken
        units = self._units(data) if callable(self._units) else self._units
        if units is None:
            remedy = f"pass units= a number, or a function of a batch that returns its number of units (batch {index})"
            units = units_in_batch(data, remedy)
        n_units = _positive("units", units, index)
        weight = self._weight(data) if callable(self._weight) else self._weight
        return CountedBatch(data, index, n_units, n_units if weight is None else _positive("weight", weight, index))


def _positive(name: str, value: object, index: int) -> float:
    if isinstance(value, Tensor) and value.numel() == 1:
        value = value.item()
    if isinstance(value, bool) or not isinstance(value, Real) or not 0 < float(value) < math.inf:
        raise ValueError(
            f"{name} of batch {index} must be a positive and finite number, got {value!r:.60}: pass {name}= a number, "
            "or a function of a batch that returns one; leave out batches that do not count"
        )
    return float(value)


def checked_loss(loss: object, batch: CountedBatch) -> Tensor:
    """A loss that a backward can be run from.

    Raises:
        ValueError: for anything else than a real tensor of no dims that has a graph.
    """
    if not isinstance(loss, Tensor):
        raise ValueError(
            f"loss(model, batch) must return a tensor of no dims, got {type(loss).__name__} for batch {batch.index}: "
            "return the loss itself, such as output.loss"
        )
    if loss.dim() or not loss.is_floating_point():
        raise ValueError(
            f"loss(model, batch) must return a real tensor of no dims, got {loss.dtype} of shape {tuple(loss.shape)} "
            f"for batch {batch.index}: average it over the batch, as loss.mean() does"
        )
    if not loss.requires_grad:
        raise ValueError(
            f"the loss of batch {batch.index} has no graph, so it has no gradient: compute it from the model's "
            "trainable parameters, without torch.no_grad() or detach()"
        )
    return loss


def check_finite(losses: Sequence[tuple[CountedBatch, Tensor]]) -> None:
    """Refuse losses that are not finite. Waits for the device.

    Raises:
        ValueError: with the first batch whose loss is not.
    """
    if not losses:
        return
    values = torch.stack([loss.detach().float() for _, loss in losses]).tolist()
    for (batch, _), value in zip(losses, values, strict=True):
        if not math.isfinite(value):
            raise ValueError(
                f"the loss of batch {batch.index} is {value}, so it has no usable gradient: look at that batch, and at "
                "the range of the dtype"
            )
