"""B_noise from single steps: the best step size at each batch size, and the batch at which noise costs half of it.

One step of size ε along the direction p of a batch of B units changes the loss of other data by

    ΔL(ε) = −ε a + ½ ε² b + …        E[a] = GᵀPG        E[b] = GᵀPHPG + tr(PHPΣ)/B

with p = −P g, P the identity or an optimizer's preconditioner, and H the Hessian. So the best step is ε_opt = a/b, and

    1/ε_opt(B) = (1 + B_noise/B)/ε_max        1/ΔL_opt(B) = (1 + B_noise/B)/ΔL_max        B_noise = tr(PHPΣ)/GᵀPHPG

The loss is looked at on a few held-out batches, for each of several draws of nested batches. Both are samples: the
variance of a mean is that over draws plus that over held-out batches. What the two share is counted twice, which errs
on the safe side.

Reference:
    McCandlish et al. 2018, arXiv:1812.06162, equations 2.7 to 2.10.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from sonde.stats.intervals import RatioInterval, fieller_interval, student_t_quantile, unresolved
from sonde.wording import interval, number

LOOKS = (-0.5, 0.5, 1.0)
"""Where the loss is looked at, in steps of the best size as far as it was known before."""
PLAIN = "SGD"
"""The name of the plain gradient's direction."""
FEWEST_DRAWS = 4
_FARTHEST = 2.0
"""The best step, over that of the farthest look: beyond this, the loss there is not known from the looks."""
_BENT = 0.3
"""Largest part of the fall of the loss that its cubic term may have, where a parabola still describes it."""
_WELL_KNOWN = 0.3
"""Largest relative error of a slope that may be squared in a denominator."""
_SURE = 0.9995
"""Quantile of Student's t beyond which a point is off the line: one measurement in 200 would be by chance."""
_OFF = 0.1
"""Part of a value by which it may be off the line, however surely."""
_ROUNDS = 4
"""Repetitions of the fit, each weighted by the line before; the weights are settled after two."""


@dataclass(frozen=True)
class BestStep:
    """The best single step along the direction of a batch.

    Attributes:
        batch: units of the batch.
        size: the step size at which the loss is lowest, as a learning rate, or in learning rates of the optimizer.
        fall: by how much the loss falls there; None where the looks do not reach there.
        fall_error: its standard error.
    """

    batch: float
    size: RatioInterval
    fall: float | None
    fall_error: float | None


@dataclass(frozen=True)
class CurvatureReading:
    """What single steps along the gradient of batches of several sizes say.

    Attributes:
        unit: plural name of the independent sample.
        direction: whose steps: "SGD" for the plain gradient, or the names of optimizers.
        b_noise: the noise scale with curvature, in units.
        steps: the best step at each batch size, from the smallest batch.
        largest_step: the best step size at an infinite batch, ε_max.
        n_draws: draws of nested batches.
        n_held_out: held-out batches.
        doubt: what makes the numbers doubtful, in words; empty if nothing does.
    """

    unit: str
    direction: str
    b_noise: RatioInterval
    steps: tuple[BestStep, ...] = ()
    largest_step: float | None = None
    n_draws: int = 0
    n_held_out: int = 0
    doubt: str = ""

    def __str__(self) -> str:
        known = self.b_noise
        text = f"B_noise not known ({known.reason})"
        if known.ratio is not None:
            text = f"B_noise {number(known.ratio)} {self.unit} [{number(known.low)} – {number(known.high)}]"
        elif known.status != "unresolved":
            text = f"B_noise {interval(known.low, known.high)} {self.unit}"
        known_steps = [(number(s.size.ratio), number(s.batch)) for s in self.steps if s.size.ratio is not None]
        if known_steps:
            of = "" if self.direction == PLAIN else f" × {self.direction}'s learning rate"
            ends = [known_steps[0], *known_steps[1:][-1:]]
            text += ". Best single step: " + ", ".join(f"{size}{of} at a batch of {batch}" for size, batch in ends)
        return f"{text}. In doubt: {self.doubt}" if self.doubt else text


@dataclass(frozen=True)
class Looks:
    """Changes of the loss that single steps made.

    Attributes:
        changes: at each of `LOOKS`; [draws, held-out batches, batch sizes, 3], fp64.
        steps: the step size that stands for 1 in `LOOKS`; [batch sizes].
        batches: units of each batch size, ascending; [batch sizes].
        is_linear: whether the direction is linear in the gradient, so that the mean slope is that of every batch size.
    """

    changes: Tensor
    steps: Tensor
    batches: Tensor
    is_linear: bool


def read_looks(looks: Looks, *, unit: str, direction: str) -> CurvatureReading:
    """B_noise and the best step at each batch size, from the loss after single steps.

    Args:
        looks: what was seen.
        unit: plural name of the independent sample.
        direction: whose steps were taken.

    Example:
        >>> a, b = 2.0, torch.tensor([1 + 30 / 4, 1 + 30 / 64])  # B_noise 30
        >>> best = a / b
        >>> change = torch.stack([-a * best * x + 0.5 * b * (best * x) ** 2 for x in LOOKS], -1)
        >>> scatter = torch.randn(8, 8, 1, 1, generator=torch.Generator().manual_seed(0)).mul(0.01).exp()
        >>> looks = Looks((scatter * change).double(), best, torch.tensor([4.0, 64.0]), True)
        >>> round(read_looks(looks, unit="rows", direction="SGD").b_noise.ratio)
        30
    """
    n_draws, n_held_out = looks.changes.shape[:2]
    few = f"{n_draws} draws and {n_held_out} held-out batches are too few: give data for {FEWEST_DRAWS} of each"
    nothing = CurvatureReading(unit, direction, unresolved(few), n_draws=n_draws, n_held_out=n_held_out)
    if min(n_draws, n_held_out) < FEWEST_DRAWS:
        return nothing
    if not looks.changes.isfinite().all():
        return replace(nothing, b_noise=unresolved("the loss was not finite after a step: use larger small batches"))
    slopes, curvatures, cubics = _taylor(looks)
    shared = slopes[..., -1:].expand_as(slopes) if looks.is_linear else slopes
    law, largest_step, doubt = _fit_law(shared, curvatures, looks)
    steps = []
    for k, batch in enumerate(looks.batches.tolist()):
        size = _ratio(shared[..., k], curvatures[..., k], what="the fall of the loss", against="its curvature")
        fall, error, bent = _fall(size.ratio, float(looks.steps[k]), *(t[..., k] for t in (slopes, curvatures, cubics)))
        steps.append(BestStep(batch, size, fall, error))
        if bent:
            doubt = doubt or f"at the best step for {number(batch)} {unit} the loss is no parabola any more"
    return replace(nothing, b_noise=law, steps=tuple(steps), largest_step=largest_step, doubt=doubt)


def _taylor(looks: Looks) -> tuple[Tensor, Tensor, Tensor]:
    """a, b and c of ΔL(ε) = −ε a + ½ ε² b + ε³ c, exactly through the three looks; [draws, held-out batches, sizes]."""
    back, half, whole = looks.changes.unbind(-1)
    curvature = 4 * (back + half)  # the odd terms cancel
    cubic = 4 / 3 * (whole - curvature / 2 + back - half)
    slope = back - half + cubic / 4
    return slope / looks.steps, curvature / looks.steps**2, cubic / looks.steps**3


def _fit_law(slopes: Tensor, curvatures: Tensor, looks: Looks) -> tuple[RatioInterval, float | None, str]:
    """B_noise and ε_max of the line 1/ΔL_opt = 2b/a² = (1 + B_noise/B)/ΔL_max, and a doubt.

    Where the direction is linear in the gradient, E[a] is the same for every batch size, so the line is that of b, and
    of 1/ε_opt = b/a. A direction like Muon's or Adam's sign has an a of its own for every batch size, and its ΔL_opt
    follows the same law in the mean-field theory of such steps (Naganuma et al. 2026, arXiv:2602.03001).
    """
    values, per_unit = curvatures, 1.0 / looks.batches.double()
    if not looks.is_linear:
        a, b = slopes.mean((0, 1)), curvatures.mean((0, 1))
        errors = torch.stack([_covariance(s.unsqueeze(-1))[0].sqrt().squeeze() for s in slopes.unbind(-1)])
        kept = (errors < _WELL_KNOWN * a) & (b > 0)
        if kept.sum() < 3:
            reason = "the loss falls too little along the direction of small batches: use larger ones or more draws"
            return unresolved(reason), None, ""
        # To first order in the deviations of a and b from their means.
        values = (2 * b / a**2 * (1 + (curvatures - b) / b - 2 * (slopes - a) / a))[..., kept]
        per_unit = per_unit[kept]
    solve = _weighted_line(values.mean((0, 1)), per_unit)
    intercept, slope = (values @ solve.T).unbind(-1)
    b_noise = _ratio(slope, intercept, what="the part of the noise", against="the curvature along the mean gradient")
    largest_step = float(slopes[..., -1].mean() / intercept.mean()) if looks.is_linear and b_noise.ratio else None
    off = values - intercept.unsqueeze(-1) - slope.unsqueeze(-1) * per_unit
    variances, freedom = _covariance(off)
    limit = student_t_quantile(_SURE, float(freedom.min())) * variances.diagonal().sqrt()
    if (off.mean((0, 1)).abs() > limit.maximum(_OFF * values.mean((0, 1)))).any():
        return b_noise, largest_step, "the best steps do not follow 1 + B_noise/B: are the micro-batches independent?"
    return b_noise, largest_step, ""


def _weighted_line(values: Tensor, x: Tensor) -> Tensor:
    """The linear map from values to the intercept and slope of their line, each weighted by the fit itself; [2, n].

    The relative errors of all values are about alike, so a weight is one over the square of the fitted value.
    """
    design, fitted = torch.stack([torch.ones_like(x), x], 1), x  # all noise, to begin with
    for _ in range(_ROUNDS):
        weighted = design / fitted.square().unsqueeze(1)
        solve: Tensor = torch.linalg.solve(weighted.T @ design, weighted.T)
        fitted = design @ (solve @ values).clamp(min=0.0)
        if not (fitted > 0).all():
            break
    return solve


def _ratio(above: Tensor, below: Tensor, *, what: str, against: str) -> RatioInterval:
    """Fieller's interval for the ratio of two means over draws and held-out batches.

    Args:
        above: [draws, held-out batches].
        below: likewise.
        what: the first in words.
        against: the second.
    """
    pair = torch.stack([above, below], -1)
    ((xx, xy), (_, yy)), freedom = (found.tolist() for found in _covariance(pair))
    x, y = pair.mean((0, 1)).tolist()
    found = fieller_interval(
        x, y, var_numerator=xx, var_denominator=yy, covariance=xy, n_samples=max(min(freedom) + 1, 2.0)
    )
    if found.status == "resolved":
        return found
    unknown = {"lower_bound": against, "upper_bound": what}.get(found.status, f"{what} or {against}")
    more = "use more draws, more held-out batches or larger batches"
    return replace(found, reason=f"{unknown} cannot be distinguished from 0: {more}")


def _covariance(values: Tensor) -> tuple[Tensor, Tensor]:
    """Covariance of the means over draws and held-out batches, and Satterthwaite's degrees of freedom of each variance.

    Args:
        values: [draws, held-out batches, n].

    Returns:
        [n, n] and [n].
    """
    parts = [torch.cov(values.mean(1 - axis).T).reshape(2 * values.shape[2:]) / values.shape[axis] for axis in (0, 1)]
    each = torch.stack([part.diagonal() for part in parts])  # [2, n]
    dof = each.new_tensor([values.shape[0] - 1, values.shape[1] - 1]).unsqueeze(1)
    spread = (each.square() / dof).sum(0)
    return parts[0] + parts[1], torch.where(spread > 0, each.sum(0).square() / spread, dof.sum())


def _fall(
    size: float | None, reach: float, slopes: Tensor, curvatures: Tensor, cubics: Tensor
) -> tuple[float | None, float | None, bool]:
    """The fall of the loss at a step size, its standard error, and whether its cubic term is large there."""
    if size is None or size > _FARTHEST * reach:
        return None, None, False
    bends = cubics * size**3
    falls = slopes * size - curvatures * size**2 / 2 - bends
    both = torch.stack([falls, bends], -1)
    fall, bend = both.mean((0, 1)).tolist()
    fall_error, bend_error = _covariance(both)[0].diagonal().sqrt().tolist()
    is_bent = abs(bend) > max(_BENT * float(curvatures.mean()) * size**2 / 2, 3 * bend_error)
    return fall, fall_error, is_bent
