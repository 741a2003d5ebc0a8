"""The running estimates of a probe in each of its metrics."""

from __future__ import annotations

from collections.abc import Callable

from sonde.batch_size.log import MeasuredWindow
from sonde.batch_size.metric_choice import ChosenMetrics
from sonde.batch_size.stats.scale_witness import RoundingTolerance
from sonde.batch_size.stats.tracker import NoiseScaleTracker
from sonde.batch_size.stats.window_row import Drop, WindowRow
from sonde.stats.sealed_state import Stateful


class MetricTrackers(Stateful):
    """One tracker for each metric that was asked for. The first is the headline.

    Args:
        metrics: of the probe.
        make: makes a tracker, called with the name of its metric.
    """

    STATE = ("_all",)

    def __init__(self, metrics: ChosenMetrics, make: Callable[[str], NoiseScaleTracker]) -> None:
        self._row: dict[str, int] = {name: metrics.measured.names.index(name) for name in metrics.names}
        self._all: dict[str, NoiseScaleTracker] = {name: make(name) for name in metrics.names}
        self.headline = next(iter(self._all.values()))
        self.further = {name: tracker for name, tracker in self._all.items() if tracker is not self.headline}
        """The others, by name."""

    def of(self, metric: str | None) -> NoiseScaleTracker:
        """The tracker of a metric; the headline for None.

        Raises:
            ValueError: for a metric that is not measured.
        """
        if metric is None:
            return self.headline
        if metric not in self._all:
            raise ValueError(
                f"metric must be one that this probe measures, {', '.join(map(repr, self._all))}, got {metric!r}: pass "
                "it to attach(metric=(..., ...)) too"
            )
        return self._all[metric]

    @property
    def plain(self) -> NoiseScaleTracker | None:
        """The tracker of the plain metric, if it was asked for."""
        return self._all.get("euclidean")

    def set_rounding(self, rounding: RoundingTolerance) -> None:
        """Judge windows by another tolerance from now on."""
        for tracker in self._all.values():
            tracker.rounding = rounding

    def update(self, row: WindowRow, window: MeasuredWindow) -> Drop | None:
        """Take one measured window.

        Args:
            row: its numbers in the first metric, from its pieces or its examples.
            window: all of its numbers.

        Returns:
            Why the headline's tracker dropped it; None when it was averaged.
        """
        known, rows = window.known, [row, *window.rows[1:]]
        drops = [
            tracker.update(rows[self._row[name]], number=known.number, rate=known.rate)
            for name, tracker in self._all.items()
        ]
        return drops[0]

    def begin_anew(self, first: int) -> None:
        """Forget the windows before one: other parameters were trained."""
        for tracker in self._all.values():
            tracker.run.begin_anew(first)
