"""The noise scale now: a local trend of B_simple, with a confidence set that stays honest when |G|² is not resolved.

While training moves, a ratio of averages answers for the past: |G|² of old windows outweighs that of new ones. So the
ratio is allowed to drift within the horizon. With x_i and y_i the unbiased tr Σ and |G|² of window i, a_i its age and
h the horizon, both in windows, k_i = e^(−a_i/h) and τ_i = −a_i/h:

    E[x_i] = B e^(c g(τ_i)) E[y_i],     r_i(B, c) = x_i − B e^(c g(τ_i)) y_i,     m(B, c) = Σ k_i r_i (1, τ_i).

At the true B and c the two moments m are 0 up to noise with the covariance V = Σ k_i² r_i² (1, τ_i)(1, τ_i)ᵀ. Every B
for which some drift c brings mᵀV⁻¹m below its critical value is in the confidence set. This is Fieller's construction
with one nuisance parameter. At a given c the set is where a quartic in B is not positive, so that its ends, and
whether it reaches 0 or infinity, are found without any root having to exist.

The shape g(τ) = τ is an exponential trend. g(τ) = τ − s τ² rose faster in the past than now, as noise scales do early
in training. Both are tried, so that the set holds the present value under either. For a fall, the second would leave
nearly all weight to the few oldest windows, too few to measure an error, so falls are exponential.

Reference:
    J. H. Stock and J. H. Wright, "GMM with weak identification", Econometrica 68 (2000) 1055–1096.
    E. C. Fieller, "Some problems in interval estimation", J. R. Stat. Soc. B 16 (1954) 175–185.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from sonde.batch_size.stats.quartic_sets import HOST, holds, product, refined_end
from sonde.batch_size.stats.window_weights import REACH, kernel, local_horizon
from sonde.stats.intervals import RatioInterval, student_t_quantile

_SHAPES = (0.0, 0.5)
"""s in g(τ) = τ − s τ², for a rise."""
_FASTEST_FALL, _FASTEST_RISE = -1.5, 3.0
"""Range of c: B_simple may fall by a factor of e^1.5, or rise by e^3, within a horizon."""
_FASTEST_PER_WINDOW = 0.1
"""Largest |c| per window of training, for short horizons: B_simple doubles in no less than 7 windows."""
_WIDEST = 1000.0
"""A two-sided interval whose ends differ by more than this factor is given as the lower bound that it is."""
_RECENT = (7.0, 2.0)
"""Weights e^(7 τ) and e^(2 τ) of the check that the trend fits the last windows, an eighth and a third of a horizon."""
_MISFIT = 3.5
"""Standard errors by which the last windows' residuals must differ from 0 before the horizon is halved."""
_SHORTEST = 12.0
"""Shortest horizon in windows that is checked, or that a misfit leads to."""
_OLDEST = 2 * REACH
"""Horizons at which a window's age stops growing: its weight is below 0.04 %, and e^(c τ) stays a finite number."""
_N_DRIFTS, _N_DRIFTS_NEAR, _N_RATIOS, _N_RATIOS_NEAR = 33, 17, 65, 9
"""Points of the grids: of drifts over their range and near the root; of log B likewise."""
_MIN_WINDOWS = 4
"""A level and a drift take two windows; their errors take two more."""

Misfit = Literal["", "jump", "drift"]
"""Why a trend over the whole horizon does not fit: the last windows contradict it, or no drift in range does."""


@dataclass(frozen=True)
class TrendFit:
    """The present ratio of one series, and how it drifts.

    Attributes:
        interval: confidence interval of the present ratio.
        ratio: the estimate; None unless the interval is two-sided. Where the moments have no root in the range of
            drifts, it is the middle of the interval on a log scale.
        drift: change of log(ratio) per window of training, now; None without roots. It has a value beside a bound too.
        drift_error: standard error of the drift.
        log_error: standard error of log(ratio), to first order, or from the interval's width; None where neither is
            known.
        influence: change of log(ratio) that each window makes, to first order, [windows]; empty without a root.
        horizon: windows of training in which a window's weight fell by a factor of e; None if nothing was fitted.
        misfit: "jump" where the horizon was shortened, since the last windows contradict a longer one; "drift" where no
            drift in range fits; otherwise empty.
    """

    interval: RatioInterval
    ratio: float | None = None
    drift: float | None = None
    drift_error: float | None = None
    log_error: float | None = None
    influence: tuple[float, ...] = ()
    horizon: float | None = None
    misfit: Misfit = ""


def fit_trends(
    x: Tensor, y: Tensor, ages: Tensor, horizon: float, *, level: float = 0.95, spacing: float = 1.0
) -> list[TrendFit]:
    """Estimate the present ratio E[x]/E[y] of several series.

    Args:
        x: unbiased estimates of the numerator, one row a series, float64; [series, windows].
        y: unbiased estimates of the denominator, likewise. A factor that x and y of one window share does not bias the
            fit; dividing both by the window's expected squared gradient norm lets every window count alike.
        ages: how many windows ago each was, 0 for the present one; [windows].
        horizon: h in measured windows, at most 0.8 of the windows seen. With `math.inf` it is always 0.8 of them, so
            that the first window has 0.29 of the last one's weight.
        level: confidence level.
        spacing: windows of training for each measured one, at least 1. Ages count windows of training.

    Returns:
        A fit for each series. It is unresolved with fewer than four entries, or if all of them are old.
    """
    # All that follows counts time in measured windows, as the shortest horizon does.
    fits = _fit_measured(x, y, ages / spacing, horizon, level, fastest=_FASTEST_PER_WINDOW * spacing)
    return fits if spacing == 1 else [_in_training(fit, spacing) for fit in fits]


def _in_training(fit: TrendFit, spacing: float) -> TrendFit:
    """A fit with times in windows of training."""
    drift, error, horizon = fit.drift, fit.drift_error, fit.horizon
    return replace(
        fit,
        drift=None if drift is None else drift / spacing,
        drift_error=None if error is None else error / spacing,
        horizon=None if horizon is None else horizon * spacing,
    )


def _fit_measured(
    x: Tensor, y: Tensor, ages: Tensor, horizon: float, level: float, *, fastest: float
) -> list[TrendFit]:
    """`fit_trends` with ages in measured windows, and the largest |c| from one of these to the next."""
    n_series, n_windows = x.shape
    if n_windows < _MIN_WINDOWS:
        return [TrendFit(_unresolved("too few windows for an interval: measure more"))] * n_series
    if (youngest := float(ages.min())) > REACH * local_horizon(ages, horizon):
        reason = (
            f"the last window is {youngest:.0f} windows old, which says nothing about now: measure more of "
            "them, by every= or a larger budget="
        )
        return [TrendFit(_unresolved(reason))] * n_series
    solver = _Solver(x, y, ages, horizon, level, fastest)
    fits = solver.fits()
    # A noise scale that has jumped is no trend. Then the past is given up, half by half, until a trend fits.
    misfits = [i for i, misfit in enumerate(solver.misfits) if misfit]
    if misfits:
        horizon = solver.horizon / 2
        if horizon < _SHORTEST:
            reason = "the noise scale has just changed by more than a trend can follow: measure more windows"
            shorter = [TrendFit(_unresolved(reason), horizon=horizon)] * len(misfits)
        else:
            kept = ages <= REACH * horizon
            rest = x[misfits][:, kept], y[misfits][:, kept], ages[kept]
            shorter = _fit_measured(*rest, horizon, level, fastest=fastest)
        for i, fit in zip(misfits, shorter, strict=True):
            fits[i] = replace(fit, influence=(), horizon=fit.horizon or horizon, misfit=fit.misfit or "jump")
    return fits


class _Solver:
    """All series at once: the arithmetic is small, and a call for each piece of it would cost more than the piece."""

    def __init__(self, x: Tensor, y: Tensor, ages: Tensor, horizon: float, level: float, fastest: float) -> None:
        self.horizon = local_horizon(ages, horizon)
        self.fastest = fastest * self.horizon
        weights = kernel(ages, self.horizon)
        self.weights = weights / weights.sum()
        time = (-ages / self.horizon).clamp(min=-_OLDEST)
        self.time = time
        self.bends = torch.tensor(_SHAPES, **HOST)[:, None] * time * time  # s τ², [shapes, windows]
        self.powers = torch.stack([torch.ones_like(time), time, time * time])  # 1, τ, τ²
        # In natural sizes the answer is near 1, whatever the units of the gradient.
        size_x = (self.weights * x).sum(1).abs()
        size_y = (self.weights * y * y).sum(1).sqrt()
        self.size_x = torch.where(size_x > 0, size_x, 1.0)
        self.size_y = torch.where(size_y > 0, size_y, 1.0)
        self.x, self.y = x / self.size_x[:, None], y / self.size_y[:, None]
        n = float(1.0 / self.weights.square().sum())
        self.dof = max(n - 2.0, 1.0)
        self.t = student_t_quantile(0.5 + level / 2, self.dof)
        self.small_sample = n / self.dof  # two parameters are fitted to n residuals
        # V is taken about the mean of the residuals: mᵀ(V − mmᵀ/n)⁻¹m ≤ q is mᵀV⁻¹m ≤ q/(1 + q/n).
        critical = self.t**2 * self.small_sample
        self.critical = critical / (1.0 + critical / n)
        self.moments_x = (self.weights * self.x) @ self.powers[:2].T  # [series, 2]
        self.squares_x = (self.weights.square() * self.x.square()) @ self.powers.T  # [series, 3]
        k, squares, powers = self.weights[:, None], self.weights.square()[:, None], self.powers.T
        x, y = self.x[..., None], self.y[..., None]  # [series, windows, 1]
        self.columns = (
            torch.cat([k * y * powers[:, :2], squares * x * y * powers], -1),
            squares * y.square() * powers,
        )
        """What a growth e, and its square, are summed with over windows; [series, windows, 5] and [.., 3]."""

    def fits(self) -> list[TrendFit]:
        slowest, fastest = max(_FASTEST_FALL, -self.fastest), min(_FASTEST_RISE, self.fastest)
        drifts = torch.linspace(slowest, fastest, _N_DRIFTS, **HOST)
        growth = self.growth(drifts.expand(1, len(_SHAPES), -1))
        sums = self._sums(growth)
        roots = _Roots(self, drifts, sums[0])
        near = torch.linspace(-4.0, 4.0, _N_DRIFTS_NEAR, **HOST) * roots.drift_error.clamp(max=1.0)[..., None]
        near = (roots.drift[..., None] + near).clamp(slowest, fastest)
        sums_near = self._sums(self.growth(near))
        quartic = self._quartic(*(torch.cat(pair, 1) for pair in zip(sums, sums_near, strict=True)))
        low, high = self._ends(quartic, roots)
        self.misfits = roots.misfits.tolist() if self.horizon >= _SHORTEST else [False] * len(self.x)
        return [self._fit(i, float(low[i]), float(high[i]), roots) for i in range(len(self.x))]

    def growth(self, drifts: Tensor) -> Tensor:
        """e^(c g(τ)): [series or 1, shapes, drifts] → [series or 1, shapes · drifts, windows]."""
        exponent = drifts[..., None] * self.time - drifts.clamp(min=0.0)[..., None] * self.bends[:, None, :]
        return torch.exp(exponent).flatten(1, 2)

    def _sums(self, growth: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Σk e y (1, τ), Σk² e x y (1, τ, τ²) and Σk² e² y² (1, τ, τ²): [series, candidates, 2 or 3]."""
        linear, quadratic = self.columns
        if len(growth) == 1:  # the same candidates for all series: one product of two matrices
            first, second = (
                torch.einsum("cn,sna->sca", e, c) for e, c in ((growth[0], linear), (growth[0].square(), quadratic))
            )
        else:
            first, second = growth @ linear, growth.square() @ quadratic
        return first[..., :2], first[..., 2:], second

    def _quartic(self, moments_y: Tensor, products: Tensor, squares_y: Tensor) -> Tensor:
        """det(V)·(mᵀV⁻¹m − critical value) as a polynomial in B, lowest power first; [series, candidates, 5]."""
        ones = torch.ones_like(products[..., 0])
        m = [torch.stack([self.moments_x[:, i, None] * ones, -moments_y[..., i]], -1) for i in (0, 1)]
        v = [
            torch.stack([self.squares_x[:, i, None] * ones, -2 * products[..., i], squares_y[..., i]], -1)
            for i in (0, 1, 2)
        ]
        # m₀²V₁₁ − 2 m₀m₁V₀₁ + m₁²V₀₀ − q (V₀₀V₁₁ − V₀₁²), V of the powers 1, τ, τ² in v.
        q = self.critical
        return (
            product(product(m[0], m[0]) - q * v[0], v[2])
            - product(2 * product(m[0], m[1]) - q * v[1], v[1])
            + product(product(m[1], m[1]), v[0])
        )

    def _ends(self, quartic: Tensor, roots: _Roots) -> tuple[Tensor, Tensor]:
        """The ends of each series' set, in natural sizes: 0 and infinity where it is open, NaN where it is empty."""
        grid = torch.linspace(math.log(1e-3), math.log(1e5), _N_RATIOS, **HOST).expand(len(quartic), -1)
        near = torch.linspace(-4.0, 4.0, _N_RATIOS_NEAR, **HOST) * roots.log_error.clamp(max=2.0)[..., None]
        grid = torch.cat([grid, (roots.log_ratio[..., None] + near).flatten(1)], 1).sort(1).values
        held = holds(quartic, grid)
        index, n = torch.arange(grid.shape[1], device="cpu"), grid.shape[1]
        first, last = torch.where(held, index, n).amin(1), torch.where(held, index, -1).amax(1)
        low = refined_end(quartic, grid, first, first - 1)
        high = refined_end(quartic, grid, last, last + 1)
        low = torch.where((quartic[..., 0] <= 0).any(1), 0.0, low)
        high = torch.where((quartic[..., 4] <= 0).any(1), math.inf, high)
        return low.where(held.any(1), math.nan), high.where(held.any(1), math.nan)

    def _fit(self, i: int, low: float, high: float, roots: _Roots) -> TrendFit:
        unit = float(self.size_x[i] / self.size_y[i])
        interval = _interval(low * unit, high * unit)
        fit = TrendFit(interval, horizon=self.horizon, misfit="drift" if math.isnan(low) else "")
        has_root = bool(roots.exists[i].all())
        if has_root:
            drift, drift_error = (float(v[i].mean()) / self.horizon for v in (roots.drift, roots.drift_error))
            log_error, influence = float(roots.log_error[i].mean()), tuple(roots.influence[i].tolist())
            fit = replace(fit, drift=drift, drift_error=drift_error, log_error=log_error, influence=influence)
        if interval.status != "resolved":
            return fit
        middle = math.sqrt(low * high)
        if not has_root:  # the middle of the interval on a log scale
            return replace(fit, ratio=middle * unit, log_error=math.log(high / low) / (2 * self.t))
        ratio = math.exp(float(roots.log_ratio[i].mean()))  # between the shapes
        return replace(fit, ratio=(ratio if low <= ratio <= high else middle) * unit)


class _Roots:
    """Where both moments are 0, for each series and shape: B and c, their errors; [series, shapes].

    Where the drifts in range hold no root, the nearer end of the range stands for the drift and only the first moment
    is 0.
    """

    def __init__(self, solver: _Solver, drifts: Tensor, moments_y: Tensor) -> None:
        x0, x1 = solver.moments_x[:, 0, None, None], solver.moments_x[:, 1, None, None]
        moments_y = moments_y.unflatten(1, (len(_SHAPES), len(drifts)))
        gap = x0 * moments_y[..., 1] - x1 * moments_y[..., 0]  # 0 at a root
        positive = moments_y[..., 0] > 0
        crosses = (gap[..., 1:] * gap[..., :-1] <= 0) & positive[..., 1:] & positive[..., :-1]
        slowest = torch.where(crosses, drifts[1:].abs(), math.inf)
        cell = slowest.argmin(-1)
        self.exists = crosses.any(-1) & (x0[..., 0] > 0)
        ends = torch.where(gap[..., 0].abs() < gap[..., -1].abs(), drifts[0], drifts[-1])
        low, high = drifts[cell], drifts[cell + 1]
        gap_low, gap_high = (gap.gather(-1, (cell + j)[..., None])[..., 0] for j in (0, 1))
        for _ in range(8):  # false position, kept off the ends: the function is smooth and nearly straight here
            share = (gap_low / (gap_low - gap_high)).nan_to_num(0.5).clamp(0.05, 0.95)
            middle = low + share * (high - low)
            at_middle = (solver.weights * solver.growth(middle[..., None]) * solver.y[:, None]) @ solver.powers[:2].T
            gap_middle = x0[..., 0] * at_middle[..., 1] - x1[..., 0] * at_middle[..., 0]
            same = gap_middle * gap_low > 0
            low, gap_low = torch.where(same, middle, low), torch.where(same, gap_middle, gap_low)
            high, gap_high = torch.where(same, high, middle), torch.where(same, gap_high, gap_middle)
        self.drift = torch.where(self.exists, (low + high) / 2, ends)
        self._linearise(solver)

    def _linearise(self, solver: _Solver) -> None:
        """Errors and influences from the moments' first derivatives: the sandwich of generalised moments."""
        growth = solver.growth(self.drift[..., None])  # [series, shapes, windows]
        grown = growth * solver.y[:, None]
        level = (solver.weights * grown).sum(-1)
        self.log_ratio = (solver.moments_x[:, :1] / level).clamp(min=1e-4).log().nan_to_num(0.0, 0.0, 0.0)
        model = solver.weights * self.log_ratio.exp()[..., None] * grown  # −∂m/∂log B, before summing over windows
        shape = solver.time - torch.where(self.drift[..., None] > 0, solver.bends, 0.0)  # g, [series, shapes, windows]
        jacobian = torch.stack(
            [torch.stack([(model * p).sum(-1), (model * p * shape).sum(-1)], -1) for p in solver.powers[:2]], -2
        )
        determinant = jacobian.det()
        self.exists = self.exists & (level > 0) & (determinant.abs() > 1e-12)
        safe = torch.where(self.exists[..., None, None], jacobian, torch.eye(2, **HOST))
        residual = solver.weights * (solver.x[:, None] - self.log_ratio.exp()[..., None] * grown)
        moments = residual[..., None, :] * solver.powers[:2]  # [series, shapes, 2, windows]
        change = torch.linalg.solve(safe, moments)  # what each window adds to (log B, c)
        errors = (change.square().sum(-1) * solver.small_sample).sqrt()
        errors = torch.where(self.exists[..., None], errors, 0.0)
        self.log_error, self.drift_error = errors[..., 0], errors[..., 1]
        self.influence = change[..., 0, :].mean(1)
        self.misfits = self._misfits(solver, residual, model, shape, change)

    def _misfits(self, solver: _Solver, residual: Tensor, model: Tensor, shape: Tensor, change: Tensor) -> Tensor:
        """Whether the last windows' residuals contradict every shape; [series].

        Two errors of their weighted sum are tried, and the smaller one counts. After a jump up, old windows are quiet:
        the scatter between neighbours shows it. After a jump down, the scatter of the residuals themselves does.
        """
        contradicted = torch.zeros_like(self.exists)
        differences = (residual / solver.weights).diff(dim=-1).square() / 2
        for rate in _RECENT:
            recent = torch.exp(rate * solver.time)
            slope = torch.stack([(model * recent).sum(-1), (model * shape * recent).sum(-1)], -1)
            parts = residual * recent - (slope[..., None, :] @ change)[..., 0, :]  # B and c were fitted
            between = differences * (solver.weights * recent)[1:].square()
            error = torch.minimum(parts.square().sum(-1), between.sum(-1)).sqrt()
            of_rounding = 1e-9 * (model * recent).abs().sum(-1)
            contradicted |= (residual * recent).sum(-1).abs() > _MISFIT * error + of_rounding
        return (contradicted & self.exists).all(1)


def _interval(low: float, high: float) -> RatioInterval:
    if math.isnan(low):
        return _unresolved(
            "the noise scale changes faster than a trend over the horizon can follow: use a shorter horizon"
        )
    if low > 0 and high <= _WIDEST * low:
        return RatioInterval("resolved", low, high)
    if low > 0:
        return RatioInterval("lower_bound", low, math.inf, "|G|² cannot yet be distinguished from 0")
    if math.isfinite(high):
        return RatioInterval("upper_bound", 0.0, high, "the noise tr Σ cannot yet be distinguished from 0")
    return _unresolved("neither the noise tr Σ nor |G|² can yet be distinguished from 0")


def _unresolved(reason: str) -> RatioInterval:
    return RatioInterval("unresolved", None, None, reason)
