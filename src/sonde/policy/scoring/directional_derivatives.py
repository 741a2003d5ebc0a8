"""How fast a model's outputs change along a direction in parameter space: central differences, without a backward.

Two passes without gradients, at θ + hΔ and θ − hΔ. Parameters of 32 bits or more are moved, and have their former bits
afterwards. Those of 16 bits would swallow so small a movement: they stay, and what they would move by is added to them
where they are converted to 32 bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from sonde.parallel.placements import local_tensor, reshard
from sonde.policy.scoring.optimizer_step import Direction, sum_over_shards
from sonde.policy.scoring.precision import NARROW

Outputs = tuple[Tensor, ...]
Passes = Callable[[Sequence[Any], Mapping[Tensor, Tensor]], list[Outputs]]
"""Outputs of micro-batches, with something added to this rank's part of each parameter of 16 bits."""

_RELATIVE_STEP = {torch.float32: 2e-3, torch.float64: 1e-5}
"""First choice of ‖hΔ‖/‖θ‖. The relative rounding error grows as 1/h, and the error of central differences as h²."""
_MOVED_BY = {torch.float32: 5e-3, torch.float64: 1e-4}
"""Nats, root mean square. h is reduced until outputs move by about as little: some models are very sensitive to Δ."""
_ROUGHEST = 0.5
"""Largest allowed ratio of even to odd part of the difference. Above it, rounding dominates or the function is not
differentiable. `_HARMLESS` makes an exception."""
_HARMLESS = 0.2
"""Fraction of `_MOVED_BY`. A smaller even part is allowed: of a policy that is certain, only the last bits move."""
_SHRUNK_AT_MOST = 8
"""How many times h is reduced at most."""
_LOST_AT_MOST = 0.1
"""Largest part of a direction that rounding may swallow, where elements of θ are too large to move by so little."""
_TOO_FAR = 0.3
"""Nats, root mean square. Outputs that move by more are too far apart for a derivative."""
LOST_IN_ROUNDING = (
    "not to be trusted: derivatives are lost in rounding, or the model has none. Scores change the same way whether "
    "parameters move up or down, or by far too much, or are not finite, or parameters are too large to move by so "
    "little. Score in fp32, without autocast"
)


@dataclass(frozen=True)
class Derivatives:
    """Derivatives of outputs along a direction.

    Attributes:
        batches: the derivatives of each micro-batch's outputs, in the outputs' unit per Δ.
        doubt: why the derivatives are not to be trusted; empty if they are.
    """

    batches: list[Outputs]
    doubt: str = ""


@torch.no_grad()
def derivatives_along(
    passes: Passes, model: nn.Module, direction: Direction, batches: Sequence[Any], *, pilot: Any
) -> Derivatives:
    """The derivative of every output along a direction, micro-batch by micro-batch.

    Args:
        passes: calls `model`; two calls must agree.
        model: plain or wrapped. If its parameters are sharded, all ranks call this with as many micro-batches.
        direction: Δ for some parameters, in their dtypes but 32 bits at least; the other parameters stay.
        batches: micro-batches.
        pilot: a small micro-batch that tells how small h must be, and whether differences are more than rounding.

    Returns:
        `Derivatives`, with a doubt if outputs are rounded too coarsely for differences, as under bf16 autocast.
        Parameters have their former bits, also if a pass fails. They are copied meanwhile.
    """
    moving = _Moving(direction)
    h = moving.first_h()
    # A smooth function's difference is odd in h. Rounding, and kinks, show in the even part f(+h) + f(−h) − 2f(0).
    base = _joined(passes([pilot], {}))
    counted = (base != 0).sum()

    def at(factor: float, of: Sequence[Any]) -> list[Outputs]:
        return passes(of, moving.of_narrow(factor))

    try:
        for _ in range(_SHRUNK_AT_MOST):
            moving.up(h)
            reshard(model)
            up = _joined(at(h, [pilot]))
            squares, count = moving.sums((up - base).square().sum(), counted)
            moved_by = (squares / max(count, 1.0)) ** 0.5
            if moved_by <= 2 * moving.most:
                break
            h *= max(moving.most / moved_by, 1 / 32) if moved_by < float("inf") else 1 / 32
        above = at(h, batches)
        is_lost = moving.lost() > _LOST_AT_MOST
        moving.mirror()
        reshard(model)
        down, below = _joined(at(-h, [pilot])), at(-h, batches)
    finally:
        moving.restore()
        reshard(model)
    even, odd, count = moving.sums((up + down - 2 * base).square().sum(), (up - down).square().sum(), counted)
    is_lost |= even > max(_ROUGHEST**2 * odd, (_HARMLESS * moving.most) ** 2 * count)
    halves = [tuple((a - b).div_(2.0) for a, b in zip(*sides, strict=True)) for sides in zip(above, below, strict=True)]
    is_lost |= _root_mean_square(halves) > _TOO_FAR  # other outputs move far more than the pilot's
    return Derivatives([tuple(d.div_(h) for d in batch) for batch in halves], LOST_IN_ROUNDING if is_lost else "")


class _Moving:
    """Moves parameters of 32 bits and more along a direction. Ranks that hold parts of them get the same numbers."""

    def __init__(self, direction: Direction) -> None:
        self._direction = direction
        self._narrow = {p: local_tensor(step) for p, step in direction.items() if p.dtype in NARROW}
        self._pairs = [
            (local_tensor(p.detach()), local_tensor(d)) for p, d in direction.items() if p.dtype not in NARROW
        ]
        self._before = [theta.clone() for theta, _ in self._pairs]
        dtypes = {torch.promote_types(p.dtype, torch.float32) for p in direction}
        self._relative = max(_RELATIVE_STEP[dtype] for dtype in dtypes)
        self.most = max(_MOVED_BY[dtype] for dtype in dtypes)
        """Nats that outputs are to move by, root mean square."""
        self._sq_error = self._sq_moved = 0.0

    def first_h(self) -> float:
        """From the norms of θ and Δ. Waits for the device."""
        # Replicated parameters are counted once for each copy, in θ and in Δ alike: their ratio is right.
        sides = zip(*((local_tensor(p.detach()), local_tensor(d)) for p, d in self._direction.items()), strict=True)
        sq_theta, sq_step = self.sums(*(_sq_norm(side) for side in sides))
        return float(self._relative * (sq_theta / sq_step) ** 0.5) if sq_theta and sq_step else 1.0

    def up(self, h: float) -> None:
        """θ + hΔ, from wherever parameters are."""
        self._sq_error = self._sq_moved = 0.0
        for (theta, step), before in zip(self._pairs, self._before, strict=True):
            theta.copy_(torch.add(before, step, alpha=h))
            moved = theta - before
            self._sq_moved += float(_sq_norm([moved]))
            self._sq_error += float(_sq_norm([moved.sub_(step, alpha=h)]))

    def mirror(self) -> None:
        """2θ − (θ + hΔ): the movement down is as large as the rounded movement up."""
        for (theta, _), before in zip(self._pairs, self._before, strict=True):
            theta.neg_().add_(before, alpha=2.0)

    def restore(self) -> None:
        """Give parameters their former bits."""
        for (theta, _), before in zip(self._pairs, self._before, strict=True):
            theta.copy_(before)

    def of_narrow(self, factor: float) -> dict[Tensor, Tensor]:
        """What is added to parameters of 16 bits."""
        return {p: factor * step for p, step in self._narrow.items()}

    def lost(self) -> float:
        """The part of the movement up that rounding has swallowed."""
        sq_error, sq_moved = self.sums(torch.tensor(self._sq_error), torch.tensor(self._sq_moved))
        return (sq_error / sq_moved) ** 0.5 if sq_moved else float(sq_error > 0.0)

    def sums(self, *values: Tensor) -> tuple[float, ...]:
        """Sums over the ranks that hold parts of the parameters. Waits for the device."""
        return tuple(sum_over_shards(torch.stack([v.double().cpu() for v in values]), self._direction).tolist())


def _sq_norm(tensors: Iterable[Tensor]) -> Tensor:
    return torch.stack([torch.linalg.vector_norm(t).double().cpu() for t in tensors]).square().sum()


def _joined(outputs: Sequence[Outputs]) -> Tensor:
    return torch.cat([out.detach().double().flatten() for batch in outputs for out in batch])


def _root_mean_square(outputs: Sequence[Outputs]) -> float:
    flat = _joined(outputs)
    return float(flat.square().sum().div((flat != 0).sum().clamp(min=1)).sqrt())
