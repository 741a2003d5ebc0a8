"""What a window changes once its numbers are on the host: averages, mechanism, tap, pace and log."""

from __future__ import annotations

from collections.abc import Callable

from sonde.batch_size.budget import RANKS_DISAGREE
from sonde.batch_size.found_model import ChosenMetrics
from sonde.batch_size.frozen_watch import FrozenWatch
from sonde.batch_size.log import MeasuredWindow, NoiseScaleLog
from sonde.batch_size.mechanism import Mechanism
from sonde.batch_size.pacing import Pacing
from sonde.batch_size.setup import describe_window
from sonde.batch_size.stats.scale_witness import RoundingTolerance
from sonde.batch_size.stats.tracker import NoiseScaleTracker
from sonde.batch_size.stats.window_row import Drop, WindowRow
from sonde.batch_size.taps.tap import Tap
from sonde.parallel.wrappers import Wrapper
from sonde.stats.sealed_state import Stateful
from sonde.wording import plural


class MetricTrackers(Stateful):
    """One tracker for each metric that was asked for. The first is the headline.

    Args:
        metrics: of the probe.
        make: makes a tracker, called with the name of its metric.
    """

    STATE = ("all",)

    def __init__(self, metrics: ChosenMetrics, make: Callable[[str], NoiseScaleTracker]) -> None:
        rows = [metric.name for metric in metrics.measured]
        self._row: dict[str, int] = {name: rows.index(name) for name in metrics.names}
        self.all: dict[str, NoiseScaleTracker] = {name: make(name) for name in metrics.names}
        self.headline = next(iter(self.all.values()))
        self.further = {name: tracker for name, tracker in self.all.items() if tracker is not self.headline}
        """The others, by name."""

    def of(self, metric: str | None) -> NoiseScaleTracker:
        """The tracker of a metric; the headline for None.

        Raises:
            ValueError: for a metric that is not measured.
        """
        if metric is None:
            return self.headline
        if metric not in self.all:
            raise ValueError(
                f"metric must be one that this probe measures, {', '.join(map(repr, self.all))}, got {metric!r}: pass "
                "it to attach(metric=(..., ...)) too"
            )
        return self.all[metric]

    def set_rounding(self, rounding: RoundingTolerance) -> None:
        """Judge windows by another tolerance from now on."""
        for tracker in self.all.values():
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
            for name, tracker in self.all.items()
        ]
        return drops[0]


class Arrivals:
    """Takes in the windows that have arrived, in order.

    Args:
        metrics: average the windows.
        log: writes them.
        rounding: looks up how far rounding may move gradients now.
        frozen: which parameters are frozen, on any rank.
        mechanism: solves windows from their pieces or from single examples.
        pacing: of the measured windows.
        tap: learns that only declared pieces count, once some rank has declared one.
        wrapper: of the model.
        counted_in: gives the tensor whose rows are counted as units, in words; empty if none is.
        say: prints a sentence for people.
    """

    def __init__(
        self,
        metrics: MetricTrackers,
        log: NoiseScaleLog,
        rounding: Callable[[], RoundingTolerance],
        *,
        frozen: FrozenWatch,
        mechanism: Mechanism,
        pacing: Pacing,
        tap: Tap,
        wrapper: Wrapper,
        counted_in: Callable[[], str],
        say: Callable[[str], None],
    ) -> None:
        self._metrics, self._tracker, self._log = metrics, metrics.headline, log
        self._rounding, self._mechanism, self._pacing, self._tap = rounding, mechanism, pacing, tap
        self._wrapper, self._say, self._frozen = wrapper, say, frozen
        self._counted_in, self._has_seen_one = counted_in, False
        # Numbers come to each rank at a time of its own. Ranks that share pieces sum parts of each, so all of them must
        # take the same backwards for pieces: they learn it together, by the first piece that they declare.
        self._shares_pieces = bool(
            wrapper.data.n_sharing > 1 or wrapper.experts or wrapper.has_cut_leaves or wrapper.sequence_group
        )
        self.n_covered: int | None = None
        """Parameters that the averages speak of; None before the first window."""

    def take(self, window: MeasuredWindow) -> None:
        """Take in a window: the tracker averages it, the log writes."""
        if not self._has_seen_one:  # a communication hook may have come since attach
            self._metrics.set_rounding(self._rounding())
        number = window.known.number
        if window.frozen is not None and (change := self._frozen.arrived(window.frozen)) is not None:
            for tracker in self._metrics.all.values():
                tracker.run.begin_anew(number)
            self._log.alert(*change, window=number)
        read_examples = self._mechanism.reads_examples
        row = self._mechanism.row_of(window)
        drop = self._metrics.update(row, window)
        if drop is None:
            self._begin_anew_if_it_speaks_of_something_else(row, number)
        self._mechanism.saw(window, is_sound=drop is None, scale=self._tracker.scale)
        if drop is not None and drop.kind == "changed":  # the model may have been converted
            self._metrics.set_rounding(self._rounding())
        if drop is None:
            self._tracker.coverage = self._mechanism.covered.coverage if row.examples is not None else None
        for alert, message in self._mechanism.take_news():
            if alert:
                self._log.alert(alert, message, window=number)
            else:
                self._say(message)
        if self._mechanism.reads_examples != read_examples:
            self._pacing.measures_otherwise()
        self._pacing.pace.take(window.known.n_ended, window.costs)
        if self._pacing.pace.disagrees:
            self._log.alert("ranks_disagree", RANKS_DISAGREE, window=number)
        if window.row.n_ranks_declaring and not self._shares_pieces:
            self._tap.only_declared = True
        self._say_first(window.row)
        plain = self._metrics.all.get("euclidean")
        solved = None if plain is None else plain.last
        self._log.window(window, drop, None if solved is None else solved.norm)

    def _begin_anew_if_it_speaks_of_something_else(self, row: WindowRow, number: int) -> None:
        """Forget windows of other parameters, if examples cover only some.

        Args:
            row: of a window that was averaged.
            number: of the window.
        """
        n_covered = row.examples.n_covered if row.examples is not None else len(self._wrapper.parameters)
        if self.n_covered not in (None, n_covered) and self._tracker.windows > 1:
            self._tracker.run.begin_anew(number)
            parameters = plural(n_covered, "parameter")
            self._say(f"the noise scale speaks of {parameters} from window {number} on, and begins anew")
        self.n_covered = n_covered

    def _say_first(self, row: WindowRow) -> None:
        if self._has_seen_one or not row.n_pieces:
            return
        self._has_seen_one = True
        names = [self._tracker.unit, *self._tracker.further_units]
        counts = dict(zip(names, [row.n_units, *row.further_units], strict=True))
        self._say(describe_window(row.n_pieces, counts, self._wrapper.n_ranks, self._counted_in()))
