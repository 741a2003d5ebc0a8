"""B_noise = tr(HΣ)/GᵀHG at the weights of a training, by single steps along the gradients of nested batches.

A step of size ε along the direction p = −P g of a batch of B units changes the loss of other data by

    ΔL(ε) = −ε a + ½ ε² b + …        E[a] = GᵀPG        E[b] = GᵀPHPG + tr(PHPΣ)/B

with P the identity or an optimizer's preconditioner, and H the Hessian. So the best step is ε_opt = a/b, and

    1/ε_opt(B) = (1 + B_noise/B)/ε_max        1/ΔL_opt(B) = (1 + B_noise/B)/ΔL_max        B_noise = tr(PHPΣ)/GᵀPHPG

Reference:
    McCandlish et al. 2018, arXiv:1812.06162, equations 2.7 to 2.10.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.func import functional_call

from evidence.replicas import mean_loss
from evidence.tasks import Units
from evidence.training import Training
from sonde.stats.intervals import RatioInterval, fieller_interval, unresolved

LOOKS = (-0.5, 0.5, 1.0)
"""Where the loss is looked at, in steps of the best size as far as it was known before."""
N_HELD_OUT = 16
FIRST_STEP = 0.01
"""The first step size that is tried along a gradient; along an optimizer's direction it is its learning rate."""
MOST_TRIES = 20
NEAR = 3.0
"""A step is near the best if the fall of the loss is within this factor of what curvature takes from it."""
GROWTH, SHRINKAGE = 4.0, 8.0
"""From one try to the next. Together they leave no gap between a step that is too small and one that is too large."""
ROUNDING = 64.0
"""Changes of the loss below so many of its roundings say nothing."""
LINEAR = (0.45, 0.55)
"""The direction of half a gradient over that of the whole: 1/2 if it is linear, 1 for a sign."""
WELL_KNOWN = 0.3
"""Largest relative error of a slope that may be squared in a denominator."""
N_FITS = 4
"""Repetitions of the fit, each weighted by the line before; the weights are settled after two."""


Moves = list[Tensor]
"""What a step of size 1 adds to each parameter."""


def b_noise(
    training: Training, batches: Iterator[Units], *, own_direction: bool, sizes: Sequence[int], draws: int
) -> RatioInterval:
    """B_noise in units. The training stays as it is.

    Args:
        training: at whose weights it is measured.
        batches: of one size, without end. The held-out ones are taken first.
        own_direction: along the optimizers' steps for a gradient alone, without momentum; else along the gradient.
        sizes: how many batches make each nested one, ascending.
        draws: of nested batches. One more is drawn, to find step sizes.
    """
    steps = SingleSteps(training, batches, own_direction, sizes)
    found = steps.find()
    if found is None:
        return unresolved("the loss curves by no more than its rounding, or does not fall along the largest batch")
    best, is_linear = found
    changes = [
        steps.changes(steps.moves(gradients), [x * step for x in LOOKS])
        for _ in range(draws)
        for gradients, step in zip(steps.draw(), best, strict=True)
    ]
    looks = torch.stack(changes).unflatten(0, (draws, len(best)))  # [draws, sizes, looks, held-out batches]
    n_units = [float(size * len(steps.held_out[0][0])) for size in sizes]
    return read_looks(looks.permute(0, 3, 1, 2), torch.tensor(best).double(), torch.tensor(n_units).double(), is_linear)


class SingleSteps:
    """Steps from the weights of a training, which are copied: neither it nor its optimizers are touched.

    Args:
        training: where the steps begin.
        batches: as for `b_noise`.
        own_direction: likewise.
        sizes: likewise.
    """

    def __init__(self, training: Training, batches: Iterator[Units], own_direction: bool, sizes: Sequence[int]) -> None:
        self._training, self._batches, self._own, self._sizes = training, batches, own_direction, sizes
        self._weights = dict(training.model.named_parameters())
        self.held_out = list(itertools.islice(batches, N_HELD_OUT))
        self._start = self._losses([torch.zeros_like(p) for p in self._weights.values()], 0.0)

    def draw(self) -> Iterator[list[Tensor]]:
        """The mean gradient of a batch of each size, each of which is a part of the next."""
        total = [torch.zeros_like(p) for p in self._weights.values()]
        for before, size in itertools.pairwise((0, *self._sizes)):
            for units in itertools.islice(self._batches, size - before):
                loss = mean_loss(self._training.task, self._training.model, units)
                total = list(map(torch.add, total, torch.autograd.grad(loss, list(self._weights.values()))))
            yield [g / size for g in total]

    def moves(self, gradients: Sequence[Tensor]) -> Moves:
        """The direction of a batch with these gradients."""
        if not self._own:
            return [-g for g in gradients]
        twin = self._training.kept()
        for p, gradient in zip(twin.model.parameters(), gradients, strict=True):
            p.grad = gradient
        for optimizer in twin.optimizers:
            for group in optimizer.param_groups:
                group.update({"betas": (0.0, group["betas"][1])} if "betas" in group else {"momentum": 0.0})
            optimizer.step()
        pairs = zip(twin.model.parameters(), self._weights.values(), strict=True)
        return [after.detach() - before.detach() for after, before in pairs]

    @torch.no_grad()
    def _losses(self, moves: Moves, step: float) -> Tensor:
        """After a step: [held-out batches]."""
        named = zip(self._weights.items(), moves, strict=True)
        moved = {name: torch.add(p, move, alpha=step) for (name, p), move in named}
        outputs = (functional_call(self._training.model, moved, (units[0],)) for units in self.held_out)
        losses = [self._training.task.loss(out, units[1]) for out, units in zip(outputs, self.held_out, strict=True)]
        return torch.stack(losses).double()

    def changes(self, moves: Moves, steps: Sequence[float]) -> Tensor:
        """By how much steps of several sizes change the loss: [steps, held-out batches]."""
        return torch.stack([self._losses(moves, step) - self._start for step in steps])

    def find(self) -> tuple[list[float], bool] | None:
        """About the best step size for each batch size, and whether the direction is linear in the gradient."""
        found, guess = list[tuple[float, float]](), 1.0 if self._own else FIRST_STEP
        for gradients in self.draw():
            moves = self.moves(gradients)
            if (tried := self._tried(moves, guess)) is None:
                return None
            found.append(tried)
            guess = abs(tried[0]) / tried[1] / NEAR or guess
        if (slope := found[-1][0]) <= 0:
            return None
        half = self.moves([g / 2 for g in gradients])
        is_linear = LINEAR[0] < _product(half, moves) / _product(moves, moves) < LINEAR[1]
        return [slope / b if is_linear or a <= 0 else a / b for a, b in found], is_linear

    def _tried(self, moves: Moves, step: float) -> tuple[float, float] | None:
        """Slope, and curvature without its sign, of the held-out loss at a step size near the best."""
        found, has_shrunk = None, False
        rounding = ROUNDING * torch.finfo(torch.float32).eps * float(self._start.mean().abs())
        for _ in range(MOST_TRIES):
            back, ahead = self.changes(moves, (-step / 2, step / 2)).mean(1).tolist()
            fall, bend = abs(back - ahead), abs(4 * (back + ahead))  # step · |a| and step² · |b|
            if bend <= rounding or (fall >= bend * NEAR and not has_shrunk):
                step *= GROWTH
                continue
            if math.isfinite(bend):
                found = (back - ahead) / step, bend / step**2
                if fall > bend / NEAR:
                    break
            # From below: far from a small step, the loss need not be a parabola. What has shrunk never grows again.
            step, has_shrunk = step / SHRINKAGE, True
        return found


def _product(moves: Moves, others: Moves) -> float:
    return sum(float((a * b).sum(dtype=torch.float64)) for a, b in zip(moves, others, strict=True))


def read_looks(changes: Tensor, steps: Tensor, n_units: Tensor, is_linear: bool) -> RatioInterval:
    """B_noise from the line 1/ΔL_opt = 2b/a² = (1 + B_noise/B)/ΔL_max.

    Where the direction is linear in the gradient, E[a] is the same for every batch size, so the line is that of b. A
    direction like Muon's or Adam's sign has an a of its own for every batch size, and its ΔL_opt follows the same law
    in the mean-field theory of such steps (Naganuma et al. 2026, arXiv:2602.03001).

    Args:
        changes: of the loss, at each of `LOOKS`: [draws, held-out batches, batch sizes, looks], fp64.
        steps: the step size that stands for 1 in `LOOKS`: [batch sizes].
        n_units: of each batch size: [batch sizes].
        is_linear: whether the direction is linear in the gradient.
    """
    if not changes.isfinite().all():
        return unresolved("the loss was not finite after a step")
    back, half, whole = changes.unbind(-1)  # a, b and c of ΔL(ε) = −ε a + ½ ε² b + ε³ c go through all three
    bends = 4 * (back + half)  # the odd terms cancel
    cubics = 4 / 3 * (whole - bends / 2 + back - half)
    slopes, values, per_unit = (back - half + cubics / 4) / steps, bends / steps**2, 1 / n_units
    if not is_linear:
        a, b = slopes.mean((0, 1)), values.mean((0, 1))
        kept = (_covariance(slopes)[0].diagonal().sqrt() < WELL_KNOWN * a) & (b > 0)
        if kept.sum() < 3:
            return unresolved("along fewer than 3 batch sizes the fall of the loss is known well")
        # To first order in the deviations of a and b from their means.
        values = (2 * b / a**2 * (1 + (values - b) / b - 2 * (slopes - a) / a))[..., kept]
        per_unit = per_unit[kept]
    pair = (values @ _line(values.mean((0, 1)), per_unit).T).flip(-1)  # slope and intercept
    ((xx, xy), (_, yy)), dof = (found.tolist() for found in _covariance(pair))
    x, y = pair.mean((0, 1)).tolist()
    n_samples = max(min(dof) + 1, 2.0)
    return fieller_interval(x, y, var_numerator=xx, var_denominator=yy, covariance=xy, n_samples=n_samples)


def _line(values: Tensor, x: Tensor) -> Tensor:
    """The linear map from values to the intercept and slope of their line, each weighted by the fit itself; [2, n].

    The relative errors of all values are about alike, so a weight is one over the square of the fitted value.
    """
    design, fitted = torch.stack([torch.ones_like(x), x], 1), x  # all noise, to begin with
    for _ in range(N_FITS):
        weighted = design / fitted.square().unsqueeze(1)
        solve: Tensor = torch.linalg.solve(weighted.T @ design, weighted.T)
        fitted = design @ (solve @ values).clamp(min=0.0)
        if not (fitted > 0).all():
            break
    return solve


def _covariance(values: Tensor) -> tuple[Tensor, Tensor]:
    """Covariance of means over draws and held-out batches, and Satterthwaite's degrees of freedom of each variance.

    Draws and held-out batches are samples both, so their two covariances add up. What they share counts twice, which
    errs on the safe side.

    Args:
        values: [draws, held-out batches, n].

    Returns:
        [n, n] and [n].
    """
    parts = [torch.cov(values.mean(1 - axis).T) / values.shape[axis] for axis in (0, 1)]
    each = torch.stack([part.diagonal() for part in parts])  # [2, n]
    dof = each.new_tensor([[values.shape[0] - 1], [values.shape[1] - 1]])
    spread = (each.square() / dof).sum(0)
    return parts[0] + parts[1], torch.where(spread > 0, each.sum(0).square() / spread, dof.sum())
