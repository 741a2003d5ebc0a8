"""What looks wrong in the norms of a run's steps: the loop's own norm, the coefficient of its clip, the update."""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

from sonde.wording import number, plural

OWN_NORM = "own_norm"
"""The alert about the loop's own norm."""
_OFF = 0.02
"""Relative difference of the loop's own norm from the true one that misleads. Norms that torch takes in bf16 are off by
0.4 %."""
_SAME = 0.01
"""Relative difference of two norms that are taken of the same."""
_OWN_AFTER = 5
"""Windows from which the loop's own norm is judged."""
_LEAST_COEFFICIENT, _SCALED_AFTER = 1e-3, 20
"""A clip that scales gradients by less, in so many measured windows in a row, is one that sets their length."""
_REMEMBERED, _JUDGED_FROM = 32, 16
"""Measured windows whose median is the usual update, and the fewest of them."""
_SPIKE, _CALMER = 2.5, 1.5
"""An update so many times as large as usual is a spike, if the largest gradient is so much less unusual. Healthy
trainings have none: `benchmarks.update_spikes`."""


@dataclass(frozen=True)
class OwnNorm:
    """A loop's own 2-norm of the gradient of one window, and |F|² as it was when that was taken, before a clip.

    Attributes:
        norm: on this rank.
        held: |F|² of what this rank holds, copies and partial gradients too.
        n_ranks: how many ranks have taken a norm.
        counted: |F|² in which every element of all ranks counts once, without partial gradients.
        held_by_all: the ranks' `held`, added up.
        partial: |F|² of the partial gradients, once summed, at the end of the window.
        final: |F|² of all gradients, likewise.
    """

    norm: float
    held: float
    n_ranks: float
    counted: float
    held_by_all: float
    partial: float
    final: float

    def true_norm(self, n_ranks: int) -> float | None:
        """The true norm; None where it is not known, as where only some ranks take one.

        Args:
            n_ranks: ranks that hold the model.
        """
        rest = self.final - self.partial
        if round(self.n_ranks) != n_ranks or not (self.counted > 0 and rest > 0 and math.isfinite(self.norm)):
            return None
        # Whatever scales the gradient later scales all of it.
        square = self.counted * (1.0 + self.partial / rest)
        return math.sqrt(square) if math.isfinite(square) else None

    def cause(self, n_parts: int) -> str:
        """Of what it is the norm, if not of the whole gradient.

        Args:
            n_parts: shards and stages that the model is cut into.
        """
        if _is_same(self.norm, self.held):
            return f"each rank sees its own shard of {n_parts}"
        if _is_same(self.norm, self.held_by_all):
            return "what several ranks hold whole is counted on each of them"
        return "it is the norm of something else than the whole gradient"


def _is_same(norm: float, square: float) -> bool:
    return square > 0 and abs(norm / math.sqrt(square) - 1.0) <= _SAME


class NormWatch:
    """Finds what looks wrong in the norms of measured windows, in order.

    Args:
        n_parts: shards and stages that the model is cut into.
        n_ranks: ranks that hold it.
    """

    def __init__(self, n_parts: int = 1, n_ranks: int = 1) -> None:
        self._n_parts, self._n_ranks = n_parts, n_ranks
        self._n_own = self._n_scaled = 0
        self._factors: list[float] = []
        self.begin_anew()

    def begin_anew(self) -> None:
        """Forget the usual update: other parameters are trained from now on."""
        self._last: tuple[int, float | None, float | None] | None = None
        """Number, gradient and rate of the window before."""
        self._updates: deque[tuple[float, float]] = deque(maxlen=_REMEMBERED)
        self._gradients: deque[float] = deque(maxlen=_REMEMBERED)

    def add(
        self,
        window: int,
        *,
        gradient: float | None = None,
        max_norm: float | None = None,
        own: OwnNorm | None = None,
        update_before: float | None = None,
        rate: float | None = None,
    ) -> Iterator[tuple[str, str]]:
        """Take a window's norms, None where one is not known; yields alerts, each with its name and its message.

        Args:
            window: its number.
            gradient: its norm before any clip.
            max_norm: of the loop's clip.
            own: the loop's own norm, where the model is cut over ranks.
            update_before: by how far the step of the measured window before has moved the parameters.
            rate: the learning rate.
        """
        if own is not None and (wrong := self._wrong(own)):
            yield OWN_NORM, wrong
        if scaled := self._scaled(gradient, max_norm):
            yield "clipped_to_length", scaled
        if self._last is not None and update_before and (spike := self._spike(update_before, *self._last)):
            yield "update_spike", spike
        self._last = window, gradient, rate

    def corrected(self, own: OwnNorm) -> float | None:
        """The true norm, if the loop's own is not that."""
        true = own.true_norm(self._n_ranks)
        return None if true is None or abs(own.norm / true - 1.0) <= _OFF else true

    def _wrong(self, own: OwnNorm) -> str:
        self._n_own += 1
        if (true := self.corrected(own)) is None:
            return ""
        self._factors.append(own.norm / true)
        if self._n_own < _OWN_AFTER or 2 * len(self._factors) < self._n_own:
            return ""
        return (
            f"your grad norm was {statistics.median(self._factors):.2f} of the true one in {len(self._factors):,} of "
            f"{plural(self._n_own, 'window')}: {own.cause(self._n_parts)}. Use sonde.clip_grad_norm_, or full_tensor() "
            "of the norm that torch's returns"
        )

    def _scaled(self, gradient: float | None, max_norm: float | None) -> str:
        if not gradient or not max_norm or not math.isfinite(gradient):
            return ""
        coefficient = max_norm / gradient
        self._n_scaled = self._n_scaled + 1 if coefficient < _LEAST_COEFFICIENT else 0
        if self._n_scaled < _SCALED_AFTER:
            return ""
        return (
            f"the clip has scaled the gradient by less than {_LEAST_COEFFICIENT:g} in the last "
            f"{plural(self._n_scaled, 'measured window')}, by {number(coefficient, 2)} now, so it sets the length of "
            "every step: is the loss a sum where a mean was meant, or are gradients still multiplied by a loss scale? "
            "If not, raise max_norm"
        )

    def _spike(self, update: float, window: int, gradient: float | None, rate: float | None) -> str:
        """Whether the update of a step is a spike, while no gradient was; then remember both.

        A schedule may raise the rate, so the update must also be large for its rate. Momentum carries a large gradient
        on, so none of those remembered may be one.
        """
        updates, gradients = list(self._updates), list(self._gradients)
        per_rate = update / rate if rate else update
        if not math.isfinite(per_rate):
            return ""
        self._updates.append((update, per_rate))
        if gradient and math.isfinite(gradient):  # without a gradient, momentum alone moves the parameters
            gradients.append(gradient)
            self._gradients.append(gradient)
        if len(updates) < _JUDGED_FROM or len(gradients) < _JUDGED_FROM:
            return ""
        usual, usual_per_rate = map(statistics.median, zip(*updates, strict=True))
        times = min(update / usual, per_rate / usual_per_rate)
        of_gradient = max(gradients) / statistics.median(gradients)
        if times < _SPIKE or of_gradient > times / _CALMER:
            return ""
        return (
            f"the step of window {window} moved the parameters {number(times, 2)} times as far as usual, while "
            f"no gradient was more than {number(of_gradient, 2)} times as large as usual: was the optimizer's state "
            "lost, or has its second moment become too small? The gradient may spike next: lower the learning rate or "
            "beta2, or go back to a checkpoint"
        )
