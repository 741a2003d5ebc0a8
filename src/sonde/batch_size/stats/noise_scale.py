"""The gradient noise scale: from squared norms with their counts to tr Σ, |G|² and their ratio B_simple.

The symbols, for one window (all pieces of one optimizer step): piece k added the gradient h_k, weighs w_k in the loss
and holds n_k effective units; F = κ Σ_k h_k is the gradient the optimizer sees. With a_k = w_k/Σw and g_k = κ h_k/a_k,

    S = Σ a_k |g_k|²      E[S] = |G|² + u tr Σ      u = Σ a_k/n_k
    B = |F|²              E[B] = |G|² + v tr Σ      v = Σ a_k²/n_k

and these two equations are solved for |G|² (the squared norm of the true gradient) and tr Σ (the variance of one unit's
gradient, summed over parameters). For equal pieces they are those of McCandlish et al. 2018, arXiv:1812.06162, A.1.
Below are exponential averages of two such numbers, and the interval of their ratio.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import TYPE_CHECKING, TypeVar

from sonde.stats.intervals import TOO_FEW_WINDOWS, RatioInterval, fieller_interval
from sonde.stats.sealed_state import Stateful

if TYPE_CHECKING:  # a report needs this file where torch is not installed
    from torch import Tensor

T = TypeVar("T", float, "Tensor")


@dataclass(frozen=True)
class Pieces:
    """What the pieces of one window add up to; sums over ranks and micro-batches add further.

    Attributes:
        weight: Σ w_k.
        weight_over_units: Σ w_k/n_k.
        sq_weight_over_units: Σ w_k²/n_k.
        n_pieces: number of pieces.
    """

    weight: float
    weight_over_units: float
    sq_weight_over_units: float
    n_pieces: int

    @property
    def u(self) -> float:
        """Coefficient of tr Σ in E[S]: the mean of 1/n_k, in 1/units."""
        return self.weight_over_units / self.weight

    @property
    def v(self) -> float:
        """Coefficient of tr Σ in E[B]: one over the effective number of units in the window."""
        return self.sq_weight_over_units / self.weight**2

    @property
    def one_has_all(self) -> bool:
        """Whether one piece has all the weight, so that no other can be compared with it."""
        return not self.u - self.v > 1e-9 * self.u

    def solve(self, sq_norm_over_weight: T, sq_norm_big: T, *, scale: float = 1.0) -> tuple[T, T]:
        """tr Σ and |G|², numbers, or tensors of many groups.

        Args:
            sq_norm_over_weight: Σ |h_k|²/w_k.
            sq_norm_big: B = |F|², the squared norm of the gradient found at the end of the window.
            scale: κ, with F = κ Σ h_k.

        Returns:
            Both unbiased, in the units of F.

        Raises:
            ValueError: with fewer than 2 pieces, since noise and signal cannot then be separated.

        Example:
            >>> Pieces(2.0, 0.5, 0.5, n_pieces=2).solve(20.0, 4.0, scale=0.5)
            (48.0, -2.0)
        """
        if self.n_pieces < 2:
            raise ValueError(
                f"need at least 2 pieces to tell noise from signal, got {self.n_pieces}: "
                "use 2 micro-batches or 2 data-parallel ranks"
            )
        u, v = self.u, self.v
        sq_norm_small = scale**2 * self.weight * sq_norm_over_weight  # S
        return (sq_norm_small - sq_norm_big) / (u - v), (u * sq_norm_big - v * sq_norm_small) / (u - v)


@dataclass(frozen=True)
class WindowEstimate:
    """Unbiased estimates from one window.

    Attributes:
        trace_cov: tr Σ, per unit; never negative.
        grad_sq: |G|²; may be negative, and must stay so for averages to be unbiased.
    """

    trace_cov: float
    grad_sq: float


def noise_scale(sq_norm_small: float, sq_norm_big: float, *, n_small: float, n_big: float) -> WindowEstimate:
    """tr Σ and |G|² from the squared gradient norms at two batch sizes.

    Args:
        sq_norm_small: mean of |g|² over gradients of `n_small` units each, every g a mean over its units.
        sq_norm_big: |g|² of the mean gradient over `n_big` units.
        n_small: units behind each small gradient.
        n_big: units behind the big one.

    Returns:
        A `WindowEstimate`. Average its two fields over many windows *before* taking their ratio B_simple.

    Raises:
        ValueError: unless 0 < n_small < n_big.

    Reference:
        McCandlish et al. 2018, arXiv:1812.06162, appendix A.1.

    Example:
        >>> noise_scale(5.0, 2.0, n_small=8, n_big=32)
        WindowEstimate(trace_cov=32.0, grad_sq=1.0)
    """
    if not 0 < n_small < n_big:
        raise ValueError(f"need 0 < n_small < n_big, got {n_small} and {n_big}: the big gradient spans several small")
    return WindowEstimate(*Pieces(1.0, 1 / n_small, 1 / n_big, n_pieces=2).solve(sq_norm_small, sq_norm_big))


def effective_units(unit_weights: Sequence[float]) -> float:
    """Kish's effective number of units, (Σw)²/Σw²: their count when all weigh the same.

    Args:
        unit_weights: the weight of each unit within its piece, ≥ 0; [units].

    Raises:
        ValueError: when there is none, one is negative or not finite, or all are 0.

    Reference:
        L. Kish, *Survey Sampling*, Wiley 1965, section 11.7.
    """
    is_sequence = isinstance(unit_weights, Collection)
    if not is_sequence or not len(unit_weights) or any(not _is_weight(w) for w in unit_weights):
        raise ValueError(f"unit_weights must be numbers, finite and ≥ 0, one a unit, got {unit_weights!r:.80}")
    largest = max(unit_weights)
    if largest == 0:
        raise ValueError("unit_weights are all 0: leave out a piece that does not count")
    shares = [w / largest for w in unit_weights]  # whose squares neither overflow nor vanish
    return math.fsum(shares) ** 2 / math.fsum(w * w for w in shares)


def _is_weight(value: object) -> bool:
    return isinstance(value, Real) and 0 <= float(value) < math.inf


class RatioAverage(Stateful):
    """Exponential averages of two numbers, kept apart, with the covariance that their ratio's interval needs.

    The window before last counts 1 − 1/horizon times as much as the last one. The averages are normalised by the
    weights seen so far, so they are unbiased from the first window on, and they are not clamped.

    Args:
        horizon: length of the average, in windows; `math.inf` for the plain average.
    """

    STATE = ("windows", "weight", "_sq_weight", "x", "y", "_xx", "_xy", "_yy")

    def __init__(self, horizon: float = 100.0) -> None:
        if not horizon > 1:
            raise ValueError(f"horizon must be more than 1 window, got {horizon}: use 100, or math.inf to average all")
        self._decay = 1.0 - 1.0 / horizon
        self.windows = 0
        self.weight = self._sq_weight = 0.0
        """Σ d^i and Σ d^2i, of the windows' weights."""
        self.x = self.y = 0.0
        self._xx = self._xy = self._yy = 0.0  # weighted sums of products of deviations from the means

    def update(self, x: float, y: float = 1.0) -> None:
        """Add one window.

        Raises:
            ValueError: when it is not finite: one such value would stay in the average for ever.
        """
        if not (math.isfinite(x) and math.isfinite(y)):
            raise ValueError(f"a window must be finite to be averaged, got {x} and {y}: drop it and count it")
        decay, old = self._decay, self._decay * self.weight
        self.weight, self._sq_weight, self.windows = old + 1.0, decay**2 * self._sq_weight + 1.0, self.windows + 1
        # West's update for weighted moments: stable where Σx² − (Σx)² would cancel.
        dx, dy, gain = x - self.x, y - self.y, old / self.weight
        self._xx = decay * self._xx + gain * dx * dx
        self._xy = decay * self._xy + gain * dx * dy
        self._yy = decay * self._yy + gain * dy * dy
        self.x += dx / self.weight
        self.y += dy / self.weight

    @property
    def effective_windows(self) -> float:
        """1/Σω² for the weights ω of the average: how many equally weighted windows it is worth."""
        return self.weight**2 / self._sq_weight if self.windows else 0.0

    @property
    def error_of_x(self) -> float:
        """Standard error of the mean of x, from the scatter of the windows."""
        return math.sqrt(self._xx / self.weight / self.effective_windows) if self.windows else math.inf

    @property
    def standard_errors(self) -> float:
        """The mean of x over its standard error, if x has the variance 1 in each window."""
        return self.x * self.weight / math.sqrt(self._sq_weight) if self.windows else 0.0

    def interval(self, level: float = 0.95) -> RatioInterval:
        """Fieller's interval for the ratio of x to y; with fewer than 2 effective windows it is unresolved."""
        n = self.effective_windows
        if n < 2:
            return TOO_FEW_WINDOWS
        # Unbiased for weights of unit sum: Σω(x−x̄)²/(1−Σω²); the mean's variance is Σω² times that.
        of_mean = 1.0 / (self.weight * (n - 1.0))
        return fieller_interval(
            self.x,
            self.y,
            var_numerator=self._xx * of_mean,
            var_denominator=self._yy * of_mean,
            covariance=self._xy * of_mean,
            n_samples=n,
            level=level,
        )
