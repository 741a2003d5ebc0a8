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

from sonde.batch_size.curvature import Curvature
from sonde.batch_size.measured_model import MeasuredModel
from sonde.batch_size.stats.one_step import LOOKS, PLAIN, CurvatureReading, Looks, read_looks
from sonde.batch_size.units import check_counts
from sonde.parallel.devices import runs_beside_host
from sonde.parallel.model_state import preserve_modes_and_randomness
from sonde.parallel.placements import is_dtensor, local_tensor, reshard
from sonde.parallel.unwrap import given_optimizers, parameters_of
from sonde.stats.intervals import unresolved

_FIRST_STEP = 0.01
"""The first step size that is tried along a plain gradient; along an optimizer's direction it is its learning rate."""
_MOST_TRIES = 20
_NEAR = 3.0
"""A step is near the best if the fall of the loss is within this factor of what curvature takes from it."""
_GROWTH, _SHRINKAGE = 4.0, 8.0
"""From one try to the next. Together they leave no gap between a step that is too small and one that is too large."""
_ROUNDING = 64.0
"""Changes of the loss below so many of its roundings say nothing."""
_LINEAR = (0.45, 0.55)
"""The direction of half a gradient over that of the whole: 1/2 if it is linear, 1 for a sign."""


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


@dataclass
class OneSteps:
    """Single steps of a model, which is left as it is but for `.grad`, buffers and random numbers.

    Beside the gradient of one micro-batch it holds that of the whole batch, a copy of the weights, and for an
    optimizer's direction a copy of the optimizer.

    Attributes:
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

    target: MeasuredModel
    loss: Callable[[Any, Any], Tensor]
    piece: Callable[[Any, float], object]
    counts_of: Callable[[Any], tuple[float, float]]
    options: Curvature
    unit: str

    def __post_init__(self) -> None:
        parameters = self.target.parameters
        if any(p.dtype.itemsize < 4 for p in parameters):
            raise ValueError("parameters of 16 bits round small steps away: load the model in float32 for curvature=")
        self._optimizers = given_optimizers(self.options.optimizer)
        own, groups = {id(p) for p in parameters}, [g for each in self._optimizers for g in each.param_groups]
        if groups and not any(float(g.get("lr", 1.0)) and own & set(map(id, g["params"])) for g in groups):
            raise ValueError(
                "the optimizer of curvature= would not move the model: pass the one that trains it, with a learning "
                "rate above 0"
            )
        self._direction = " and ".join(type(each).__name__ for each in self._optimizers) or PLAIN
        # `.data` has a version counter of its own: a graph from before stays valid, since the weights are moved back.
        self._weights = [local_tensor(p.detach()).data for p in parameters]
        self._before = [weights.clone() for weights in self._weights]
        self._held_out: list[tuple[Any, float]] = []

    def run(self, batches: Iterator[Any]) -> CurvatureReading:
        """Look, and say what was seen.

        Args:
            batches: of this rank; the held-out ones are taken first.
        """
        held_out = self._taken(batches, self.options.held_out)
        self._held_out = [(data, self._counted(data)[1]) for data in held_out]
        try:
            looks = self._look(batches)
        finally:
            self.target.zero_grad()
        if isinstance(looks, str):
            return CurvatureReading(self.unit, self._direction, unresolved(looks))
        return read_looks(looks, unit=self.unit, direction=self._direction)

    def _look(self, batches: Iterator[Any]) -> Looks | str:
        """All looks, as far as the data go; or why there are none."""
        start = self._losses()
        if len(start) < self.options.held_out:
            return f"the data ended before {self.options.held_out} held-out batches: {self.options.need}"
        found = self._find_steps(batches, start)
        if isinstance(found, str):
            return found
        steps, is_linear = found
        changes, per_unit = [], []
        for _ in range(self.options.draws):
            rows, counts = [], []
            for batch, step in zip(self._draw(batches), steps, strict=False):
                moves = self._moves(batch)
                rows.append(torch.stack([self._changes(moves, x * step, start) for x in LOOKS], -1))
                counts.append(batch.per_unit)
            if len(rows) < len(steps):
                break  # the data have ended
            changes.append(torch.stack(rows, 1))  # [held-out batches, sizes, looks]
            per_unit.append(counts)
        if not changes:
            return f"the data ended before two draws of {self.options.sizes[-1]} micro-batches: {self.options.need}"
        sizes = 1 / torch.tensor(per_unit, dtype=torch.float64, device="cpu").mean(0)
        return Looks(
            torch.stack(changes), torch.tensor(steps, dtype=torch.float64, device="cpu"), sizes, is_linear=is_linear
        )

    # Batches and their gradients.

    def _taken(self, batches: Iterator[Any], n: int) -> Iterator[Any]:
        for _ in range(n):
            found = list(islice(batches, 1))
            if not self.target.in_step(here=bool(found)):
                return
            yield found.pop()

    def _counted(self, data: Any) -> tuple[float, float]:
        """Units and weight of a batch."""
        n_units, weight = self.counts_of(data)
        check_counts(n_units, weight, None)
        return float(n_units), float(weight)

    def _draw(self, batches: Iterator[Any]) -> Iterator[_Batch]:
        """Batches of each size, each a prefix of the next; ends early if the data of a rank do."""
        total: list[Tensor | None] = [None] * len(self._weights)
        taken, weight, spread = 0, 0.0, 0.0
        written = self.target.written()
        for size in self.options.sizes:
            self.target.zero_grad()
            rows = []
            for data in self._taken(batches, size - taken):
                n_units, its_weight = self._counted(data)
                self.piece(data, its_weight)
                rows.append((its_weight, its_weight**2 / n_units))
            self.target.check_unwritten(written)
            if not self.target.on_all_ranks(here=len(rows) == size - taken):
                return
            taken = size
            own = [sum(column) for column in zip(*rows, strict=True)] if self.target.counts_pieces else [0.0, 0.0]
            more_weight, more_spread = self.target.summed(own)
            weight, spread = weight + more_weight, spread + more_spread
            self.target.reduce_gradients()
            total = list(map(_plus, total, (p.grad for p in self.target.parameters)))
            yield _Batch(spread / weight**2, total, self.target.n_averaged / weight)

    @torch.no_grad()
    def _moves(self, batch: _Batch, part: float = 1.0) -> list[tuple[Tensor, Tensor]]:
        """This rank's weights, each with its step of size 1 along the direction of a part of the batch's gradient."""
        for p, gradient in zip(self.target.parameters, batch.gradients, strict=True):
            p.grad = None if gradient is None else gradient * (part * batch.scale)
            if is_dtensor(p) and p.grad is not None and p.grad.placements != p.placements:  # type: ignore[attr-defined]
                p.grad = p.grad.redistribute(placements=p.placements)  # type: ignore[attr-defined]
        weights = {id(p): own for p, own in zip(self.target.parameters, self._weights, strict=True)}
        if not self._optimizers:
            return [(weights[id(p)], local_tensor(p.grad).neg()) for p in self.target.parameters if p.grad is not None]
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
        sums = torch.zeros(2, self.options.held_out, dtype=torch.float64, device="cpu")
        with preserve_modes_and_randomness(self.target.module):
            # Every look has the same dropout. Without an accelerator, `torch.manual_seed` would note its call for one.
            generator: Any = torch if runs_beside_host(self._weights[0].device) else torch.default_generator
            generator.manual_seed(0)
            random.seed(0)
            for k, (data, weight) in enumerate(self._held_out):
                loss = float(self.loss(self.target.module, data))
                if self.target.counts_pieces:
                    sums[0, k], sums[1, k] = loss * weight, weight
        total = torch.tensor(self.target.summed(sums.flatten().tolist()), dtype=torch.float64, device="cpu")
        losses: Tensor = total[: self.options.held_out]
        weights = total[self.options.held_out :]
        return losses[weights > 0] / weights[weights > 0].mean()

    def _changes(self, moves: Sequence[tuple[Tensor, Tensor]], step: float, start: Tensor) -> Tensor:
        """By how much the loss of each held-out batch changes with a step; the weights are restored bit for bit."""
        try:
            with torch.no_grad():
                for weights, move in moves:
                    weights.add_(move, alpha=step)
            reshard(self.target.module)
            return self._losses() - start
        finally:
            for weights, before in zip(self._weights, self._before, strict=True):
                weights.copy_(before)
            reshard(self.target.module)

    def _find_steps(self, batches: Iterator[Any], start: Tensor) -> tuple[list[float], bool] | str:
        """About the best step size for each batch size, and whether the direction is linear; or why there is none."""
        found: list[tuple[float, float]] = []
        guess, is_linear = 1.0 if self._optimizers else _FIRST_STEP, True
        for batch in self._draw(batches):
            moves = self._moves(batch)
            tried = self._try_steps(moves, guess, start)
            if tried is None:
                return "no step size was found along which the loss curves by more than its rounding"
            found.append(tried)
            guess = abs(tried[0]) / tried[1] / _NEAR or guess
            if self._optimizers and len(found) == len(self.options.sizes):
                is_linear = self._is_linear(batch, moves)
        if len(found) < len(self.options.sizes):
            return f"the data ended before one draw of {self.options.sizes[-1]} micro-batches: {self.options.need}"
        slope = found[-1][0]
        if slope <= 0:
            return "the held-out loss does not fall along the direction of the largest batch: use larger ones"
        return [slope / b if is_linear or a <= 0 else a / b for a, b in found], is_linear

    def _is_linear(self, batch: _Batch, moves: Sequence[tuple[Tensor, Tensor]]) -> bool:
        """Whether half a gradient makes half a step."""
        half, whole = self.target.summed(
            [
                sum(float((a * b).sum(dtype=torch.float64)) for (_, a), (_, b) in zip(moves, other, strict=True))
                for other in (self._moves(batch, 0.5), moves)
            ]
        )
        return _LINEAR[0] < half / whole < _LINEAR[1]

    def _try_steps(
        self, moves: Sequence[tuple[Tensor, Tensor]], step: float, start: Tensor
    ) -> tuple[float, float] | None:
        """Slope, and curvature without its sign, of the held-out loss at a step size near the best; None without."""
        found, has_shrunk = None, False
        rounding = _ROUNDING * torch.finfo(self._weights[0].dtype).eps * float(start.mean().abs())
        for _ in range(_MOST_TRIES):
            back, ahead = (float(self._changes(moves, side * step, start).mean()) for side in (-0.5, 0.5))
            fall, bend = abs(back - ahead), abs(4 * (back + ahead))  # step · |a| and step² · |b|
            if bend <= rounding or (fall >= bend * _NEAR and not has_shrunk):
                step *= _GROWTH
                continue
            if math.isfinite(bend):
                found = (back - ahead) / step, bend / step**2
                if fall > bend / _NEAR:
                    break
            # From below: far from a small step, the loss need not be a parabola. What has shrunk never grows again.
            step, has_shrunk = step / _SHRINKAGE, True
        return found


def _plus(total: Tensor | None, gradient: Tensor | None) -> Tensor | None:
    return gradient if total is None else total if gradient is None else total + gradient
