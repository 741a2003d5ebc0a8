"""The batches of a measurement: how many units each holds, how much each weighs, and its loss."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from numbers import Real
from typing import Any

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


def counted_batches(
    batches: Any, *, units: NumberOf | None, weight: NumberOf | None, most: int | None
) -> Iterator[CountedBatch]:
    """This rank's batches, each taken from the user's iterable no sooner than it is asked for.

    Args:
        batches: the user's iterable.
        units: units in a batch; None to count the rows of its tensors.
        weight: of a batch; None for its units.
        most: most batches to take; None for all.

    Raises:
        ValueError: when `batches` is not iterable, or for a number that cannot be.
    """
    if isinstance(batches, (str, bytes, Tensor)) or not isinstance(batches, Iterable):
        raise ValueError(
            f"batches must be an iterable of micro-batches, got {type(batches).__name__}: pass a DataLoader or a "
            "list of batches"
        )
    for index, data in enumerate(itertools.islice(batches, most)):
        n_units = units(data) if callable(units) else units
        if n_units is None:
            remedy = f"pass units= a number, or a function of a batch that returns its number of units (batch {index})"
            n_units = units_in_batch(data, remedy)
        n_units = _positive("units", n_units, index)
        counts = weight(data) if callable(weight) else weight
        yield CountedBatch(data, index, n_units, n_units if counts is None else _positive("weight", counts, index))


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


def finite_losses(losses: Iterable[tuple[CountedBatch, Tensor]]) -> list[float]:
    """The losses of batches. Waits for the device.

    Raises:
        ValueError: with the first batch whose loss is not finite.
    """
    values = []
    for batch, loss in losses:
        values.append(float(loss))
        if not math.isfinite(values[-1]):
            raise ValueError(
                f"the loss of batch {batch.index} is {values[-1]}, so it has no usable gradient: look at that batch, "
                "and at the range of the dtype"
            )
    return values
