"""The running estimates of a probe in each of its metrics."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from sonde.batch_size.found_model import ChosenMetrics
from sonde.batch_size.frozen_on_ranks import TrainedChange
from sonde.batch_size.log import MeasuredWindow
from sonde.batch_size.stats.scale_witness import RoundingTolerance
from sonde.batch_size.stats.tracker import NoiseScaleTracker
from sonde.batch_size.stats.window_row import Drop, WindowRow


class MetricTrackers:
    """One tracker for each metric that was asked for. The first is the headline.

    Args:
        metrics: of the probe.
        make: makes a tracker, called with the name of its metric.
    """

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

    def parameters_changed(self, change: TrainedChange) -> None:
        """Forget the windows in which other parameters were trained than now."""
        for tracker in self._all.values():
            tracker.begin_anew(change.first, changed=change.groups, gone=change.gone)

    def state_dict(self) -> dict[str, Any]:
        """The averages of all but the headline, by metric."""
        return {name: tracker.state_dict() for name, tracker in self.further.items()}

    def load_state_dict(self, averages: Mapping[str, Any], further: Mapping[str, Any]) -> None:
        """Restore the averages of the headline, and what `state_dict` returned."""
        self.headline.load_state_dict(averages)
        for name, tracker in self.further.items():
            tracker.load_state_dict(further[name])
