"""Single steps from a checkpoint: how far the loss of other data falls along the direction of batches of several sizes.

`OneSteps.run` is the story: batches are held out, a first draw finds step sizes at which the curvature shows, and each
further draw gives looks at the loss. A draw adds up micro-batches; every batch size is a prefix of it, so a draw costs
one pass over its largest batch. `stats/one_step.py` has the equations.
"""

from __future__ import annotations

import copy
import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from sonde.batch_size.measured_model import MeasuredModel
from sonde.batch_size.stats.one_step import LOOKS, PLAIN, CurvatureReading, Looks, read_looks
from sonde.batch_size.units import check_counts
from sonde.parallel.model_state import preserve_modes_and_randomness
from sonde.parallel.placements import is_dtensor, local_tensor, reshard
from sonde.parallel.unwrap import given_optimizers, parameters_of
from sonde.probe import Metric, ReportSection
from sonde.record_values import whole_number
from sonde.stats.intervals import unresolved

_FIRST_STEP = 0.01
"""The first step size that is tried along a plain gradient; along an optimizer's direction it is its learning rate."""
_MOST_TRIES = 20
_NEAR, _FAR = 3.0, 32.0
"""The step of a try may be wrong by the first factor, and is changed by the second at most."""
_ROUNDING = 64.0
"""Changes of the loss below so many of its roundings say nothing."""
_LINEAR = (0.45, 0.55)
"""The direction of half a gradient over that of the whole: 1/2 if it is linear, 1 for a sign."""


@dataclass(frozen=True)
class Curvature:
    """How `measure` looks at the curvature of the loss.

    Attributes:
        optimizer: that trains the model, or several in a list: the direction is what its step would be for a batch's
            gradient alone, without momentum and weight decay, and a step size of 1 is its present learning rate. None
            for the plain gradient, whose step size is a learning rate of SGD.
        batches: micro-batches of their own, on each rank; by default those of the measurement, of which an iterator
            gives its first and another iterable is gone through twice.
        sizes: micro-batches of each rank in each batch, ascending.
        draws: of nested batches, each of as many micro-batches as the largest size. One more is drawn, to find steps.
        held_out: micro-batches of each rank at whose loss is looked. They are kept in memory.

    Raises:
        ValueError: for fewer than two sizes, sizes that do not rise, or fewer than 4 draws or held-out batches.

    Example:
        >>> Curvature(draws=2)
        Traceback (most recent call last):
        ValueError: draws must be a whole number from 4 up, got 2: 12 are usual
    """

    optimizer: Any = None
    batches: Any = None
    sizes: Sequence[int] = (1, 3, 9, 27, 81)
    draws: int = 12
    held_out: int = 16

    def __post_init__(self) -> None:
        for name, usual in (("draws", 12), ("held_out", 16)):
            if whole_number(f"{name} must be a whole number", value := getattr(self, name)) < 4:
                raise ValueError(f"{name} must be a whole number from 4 up, got {value}: {usual} are usual")
        rising = all(a < b for a, b in zip((0, *self.sizes), self.sizes, strict=False))
        if len(self.sizes) < 2 or not rising:
            raise ValueError(f"sizes must be two or more rising numbers of micro-batches, got {self.sizes}: (1, 8, 64)")


class CurvatureLog:
    """Metrics of a reading, for a log; `RunLog.measure` takes it.

    Args:
        reading: what is logged.
    """

    SECTION = ReportSection(
        "The noise scale with curvature",
        "B_noise is the batch size at which gradient noise halves the best step and the fall of the loss in one step.",
        ("gns/b_noise", "gns/b_noise_low", "gns/b_noise_high"),
    )

    def __init__(self, reading: CurvatureReading) -> None:
        self._interval = reading.b_noise
        self.METRICS = {
            "gns/b_noise": Metric(reading.unit, "noise scale with curvature, by single steps"),
            "gns/b_noise_low": Metric(reading.unit, "lower end of its 95 % interval; 0 for an upper bound"),
            "gns/b_noise_high": Metric(reading.unit, "upper end of its 95 % interval; null without one"),
        }

    def metrics(self) -> dict[str, float | None]:
        """B_noise and its interval."""
        known = self._interval
        high = None if known.status == "lower_bound" else known.high
        return {"gns/b_noise": known.ratio, "gns/b_noise_low": known.low, "gns/b_noise_high": high}

    def step(self) -> None:
        """Nothing: the reading is there."""

    def close(self) -> None:
        """Nothing was installed."""


@dataclass(frozen=True)
class _Batch:
    """The gradient of a batch.

    Attributes:
        per_unit: one over its effective number of units.
        gradients: of each parameter, the sum over micro-batches with their weights; None without a gradient.
        scale: that makes the mean of the sum.
    """

    per_unit: float
    gradients: list[Tensor | None]
    scale: float


class OneSteps:
    """Single steps of a model, which is left as it is but for `.grad`, buffers and random numbers.

    Beside the gradient of one micro-batch it holds that of the whole batch, a copy of the weights, and for an
    optimizer's direction a copy of the optimizer.

    Args:
        target: the model.
        loss: of the model and a batch.
        piece: runs one batch with its weight forward and backward.
        counts_of: units and weight of a batch.
        options: what the user asked for.
        unit: plural name of the unit.

    Raises:
        ValueError: for parameters of 16 bits, which do not hold small steps; for an optimizer that would not move the
            model.
    """

    def __init__(
        self,
        target: MeasuredModel,
        loss: Callable[[Any, Any], Tensor],
        piece: Callable[[Any, float], object],
        counts_of: Callable[[Any], tuple[float, float]],
        options: Curvature,
        unit: str,
    ) -> None:
        self._target, self._loss, self._piece, self._counts_of = target, loss, piece, counts_of
        self._options, self._unit = options, unit
        self._optimizers = given_optimizers(options.optimizer)
        if any(p.dtype.itemsize < 4 for p in target.parameters):
            raise ValueError("parameters of 16 bits round small steps away: load the model in float32 for curvature=")
        own = {id(p) for p in target.parameters}
        groups = [group for each in self._optimizers for group in each.param_groups]
        if groups and not any(float(g.get("lr", 1.0)) and own & set(map(id, g["params"])) for g in groups):
            raise ValueError(
                "the optimizer of curvature= would not move the model: pass the one that trains it, with a learning "
                "rate above 0"
            )
        self._held_out: list[tuple[Any, float]] = []
        # `.data` has a version counter of its own: the weights are moved and moved back, and graphs that need them stay
        # valid.
        self._weights = [local_tensor(p.detach()).data for p in target.parameters]
        self._before = [weights.clone() for weights in self._weights]

    def run(self, batches: Iterator[Any]) -> CurvatureReading:
        """Look, and say what was seen.

        Args:
            batches: of this rank; the held-out ones are taken first.
        """
        n_sizes, changes, per_unit = len(self._options.sizes), [], []
        held_out = self._taken(batches, self._options.held_out)
        self._held_out = [(data, self._counted(data)[1]) for data in held_out]
        start = self._losses()
        found = self._find_steps(batches, start)
        if isinstance(found, str):
            return CurvatureReading(self._unit, self._direction_name, unresolved(found))
        steps, is_linear = found
        for _ in range(self._options.draws):
            draw = [
                (batch.per_unit, torch.stack([self._changes(moves, x * step, start) for x in LOOKS], -1))
                for batch, step in zip(self._draw(batches), steps, strict=False)
                for moves in [self._moves(batch)]
            ]
            if len(draw) < n_sizes:
                break  # the data have ended
            per_unit.append(torch.tensor([row[0] for row in draw], dtype=torch.float64, device="cpu"))
            changes.append(torch.stack([row[1] for row in draw], 1))  # [held-out batches, sizes, looks]
        self._target.zero_grad()
        if not changes:
            few = f"the data ended before two draws of {self._options.sizes[-1]} micro-batches: give more"
            return CurvatureReading(self._unit, self._direction_name, unresolved(few))
        in_order = torch.tensor(steps, dtype=torch.float64, device="cpu")
        looks = Looks(torch.stack(changes), in_order, 1 / torch.stack(per_unit).mean(0), is_linear)
        return read_looks(looks, unit=self._unit, direction=self._direction_name)

    @property
    def _direction_name(self) -> str:
        return " and ".join(type(each).__name__ for each in self._optimizers) or PLAIN

    # Batches and their gradients.

    def _taken(self, batches: Iterator[Any], n: int) -> Iterator[Any]:
        for _ in range(n):
            found = list(islice(batches, 1))
            if not self._target.in_step(here=bool(found)):
                return
            yield found.pop()

    def _counted(self, data: Any) -> tuple[float, float]:
        """Units and weight of a batch."""
        n_units, weight = self._counts_of(data)
        check_counts(n_units, weight, None)
        return float(n_units), float(weight)

    def _draw(self, batches: Iterator[Any]) -> Iterator[_Batch]:
        """Batches of each size, each a prefix of the next; ends early if the data of a rank do."""
        total: list[Tensor | None] = [None] * len(self._weights)
        taken, weight, spread = 0, 0.0, 0.0
        written = self._target.written()
        for size in self._options.sizes:
            self._target.zero_grad()
            rows = []
            for data in self._taken(batches, size - taken):
                n_units, its_weight = self._counted(data)
                self._piece(data, its_weight)
                rows.append((its_weight, its_weight**2 / n_units))
            self._target.check_unwritten(written)
            if not self._target.on_all_ranks(here=len(rows) == size - taken):
                return
            taken = size
            own = [sum(column) for column in zip(*rows, strict=True)] if self._target.counts_pieces else [0.0, 0.0]
            more_weight, more_spread = self._target.summed(own)
            weight, spread = weight + more_weight, spread + more_spread
            self._target.reduce_gradients()
            total = list(map(_plus, total, (p.grad for p in self._target.parameters)))
            yield _Batch(spread / weight**2, total, self._target.n_averaged / weight)

    @torch.no_grad()
    def _moves(self, batch: _Batch, part: float = 1.0) -> list[tuple[Tensor, Tensor]]:
        """This rank's weights, each with its step of size 1 along the direction of a part of the batch's gradient."""
        for p, gradient in zip(self._target.parameters, batch.gradients, strict=True):
            p.grad = None if gradient is None else gradient * (part * batch.scale)
            if is_dtensor(p) and p.grad is not None and p.grad.placements != p.placements:  # type: ignore[attr-defined]
                p.grad = p.grad.redistribute(placements=p.placements)  # type: ignore[attr-defined]
        weights = {id(p): own for p, own in zip(self._target.parameters, self._weights, strict=True)}
        if not self._optimizers:
            return [(weights[id(p)], local_tensor(p.grad).neg()) for p in self._target.parameters if p.grad is not None]
        moves = []
        for optimizer in self._optimizers:
            twin = copy.deepcopy(optimizer)  # its own tensors and state, and no hooks: the user's stays untouched
            for group in twin.param_groups:
                group.update({name: 0.0 for name in ("weight_decay", "momentum") if name in group})
                if "betas" in group:
                    group["betas"] = (0.0, *group["betas"][1:])
            pairs = list(zip(parameters_of(optimizer), parameters_of(twin), strict=True))
            for own, copied in pairs:
                copied.grad = own.grad if id(own) in weights else None
            twin.step()
            for own, copied in pairs:
                if copied.grad is not None:
                    moves.append((weights[id(own)], local_tensor(copied.detach()).sub_(weights[id(own)])))
        return moves

    # Looks at the loss.

    @torch.no_grad()
    def _losses(self) -> Tensor:
        """The loss of each held-out batch over all ranks, times its weight over the mean weight; [held-out batches]."""
        sums = torch.zeros(2, self._options.held_out, dtype=torch.float64, device="cpu")
        with preserve_modes_and_randomness(self._target.module):
            for k, (data, weight) in enumerate(self._held_out):
                torch.manual_seed(k)  # every look at a batch has the same dropout
                random.seed(k)
                loss = float(self._loss(self._target.module, data))
                if self._target.counts_pieces:
                    sums[:, k] = torch.tensor([loss * weight, weight])
        total = torch.tensor(self._target.summed(sums.flatten().tolist()), dtype=torch.float64, device="cpu")
        losses: Tensor = total[: self._options.held_out]
        weights = total[self._options.held_out :]
        return losses[weights > 0] / weights[weights > 0].mean()

    def _changes(self, moves: Sequence[tuple[Tensor, Tensor]], step: float, start: Tensor) -> Tensor:
        """By how much the loss of each held-out batch changes with a step; the weights are restored bit for bit."""
        try:
            with torch.no_grad():
                for weights, move in moves:
                    weights.add_(move, alpha=step)
            reshard(self._target.module)
            return self._losses() - start
        finally:
            for weights, before in zip(self._weights, self._before, strict=True):
                weights.copy_(before)
            reshard(self._target.module)

    def _find_steps(self, batches: Iterator[Any], start: Tensor) -> tuple[list[float], bool] | str:
        """About the best step size for each batch size, and whether the direction is linear; or why there is none."""
        found: list[tuple[float, float]] = []
        guess, is_linear = 1.0 if self._optimizers else _FIRST_STEP, True
        for batch in self._draw(batches):
            moves = self._moves(batch)
            tried = self._try_steps(moves, guess, start)
            if tried is None:
                return "no step size was found along which the loss curves up by more than its rounding"
            found.append(tried)
            guess = abs(tried[0]) / tried[1] or guess
            if self._optimizers and len(found) == len(self._options.sizes):
                halves = self._moves(batch, 0.5)
                dots = [
                    [float((a * b).sum(dtype=torch.float64)) for (_, a), (_, b) in zip(moves, other, strict=True)]
                    for other in (halves, moves)
                ]
                half, whole = self._target.summed([sum(dot) for dot in dots])
                is_linear = _LINEAR[0] < half / whole < _LINEAR[1]
        if len(found) < len(self._options.sizes):
            return f"the data ended before one draw of {self._options.sizes[-1]} micro-batches: give more"
        slope = found[-1][0]
        if slope <= 0:
            return "the held-out loss does not fall along the direction of the largest batch: use larger ones"
        own = [slope / b if is_linear or a <= 0 else a / b for a, b in found]
        return own, is_linear

    def _try_steps(
        self, moves: Sequence[tuple[Tensor, Tensor]], step: float, start: Tensor
    ) -> tuple[float, float] | None:
        """Slope and curvature of the held-out loss along a direction, at a step size near the best; None without."""
        found = None
        rounding = _ROUNDING * torch.finfo(self._weights[0].dtype).eps * float(start.mean().abs())
        for _ in range(_MOST_TRIES):
            back, ahead = (float(self._changes(moves, side * step, start).mean()) for side in (-0.5, 0.5))
            if not math.isfinite(back + ahead):
                step /= _FAR
                continue
            fall, bend = back - ahead, 4 * (back + ahead)  # step · a and step² · b
            if bend <= rounding:
                step *= _FAR / 2
                continue
            found = fall / step, bend / step**2
            if 1 / _NEAR < abs(fall) / bend < _NEAR:
                break
            step *= min(max(abs(fall) / bend, 1 / _FAR), _FAR)
        return found


def _plus(total: Tensor | None, gradient: Tensor | None) -> Tensor | None:
    return gradient if total is None else total if gradient is None else total + gradient
