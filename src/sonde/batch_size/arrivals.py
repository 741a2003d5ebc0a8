"""What becomes of a window's numbers: their way to the host while training goes on, and what they change there."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor

from sonde.batch_size.log import KnownOfWindow, MeasuredWindow, NoiseScaleLog
from sonde.batch_size.mechanism import Mechanism
from sonde.batch_size.model_watch import FrozenWatch
from sonde.batch_size.pace import Pace, WindowCosts
from sonde.batch_size.setup import describe_window
from sonde.batch_size.stats.columns import MAX_NORM, NORM, UPDATE_NORM
from sonde.batch_size.stats.norm_watch import NormWatch, OwnNorm
from sonde.batch_size.stats.tracker import NoiseScaleTracker
from sonde.batch_size.stats.window_row import Drop, RoundingTolerance, WindowRow
from sonde.batch_size.taps.metric import Adds
from sonde.batch_size.taps.window_reader import Window, WindowReader
from sonde.batch_size.taps.window_sums import named, packed, read_rows, unprefixed
from sonde.batch_size.units import as_vector
from sonde.batch_size.window_clock import OwnTime
from sonde.parallel.devices import HostCopy, start_copy_to_host
from sonde.stats.sealed_state import Stateful
from sonde.wording import plural

Read = Callable[[list[Tensor]], MeasuredWindow]
"""Makes a window of its vectors on the CPU."""
_SCALARS = "scalars"
RATE = "learning rate"
"""The scalar that is one, perhaps on the device: no name of the user's has spaces."""


class Delivery:
    """Hands over windows whose numbers have arrived on the host: they are put in, sent by one copy, and received.

    A thread that reads must not meet the thread that trains, so both work inside `alone`.

    Args:
        take: called with each window, in order.
        device: of the numbers.
        adds: what adds up over parameters in each metric.
        own: the probe's time, which does not count waits.
    """

    def __init__(
        self, take: Callable[[MeasuredWindow], None], device: torch.device, adds: Sequence[Adds], own: OwnTime
    ) -> None:
        self._take, self._device, self._adds = take, device, tuple(adds)
        self._own = own
        self._put: list[tuple[dist.Work | None, list[Tensor], Read]] = []
        self._copies: list[tuple[HostCopy, list[tuple[list[int], Read]]]] = []
        """Several windows in one host tensor, which a copy may still be filling; the sizes of each one's vectors."""
        self.alone = threading.RLock()
        """Other threads wait outside; a thread that is inside may enter again.

        The lock itself: a KeyboardInterrupt on the way in or out of a context of our own could leave it held."""
        self.n_put = 0
        """Windows put in."""

    @property
    def is_empty(self) -> bool:
        """Whether no window is on its way."""
        return not (self._put or self._copies)

    def put_window(self, window: Window, scalars: Mapping[str, float | Tensor], known: KnownOfWindow) -> None:
        """Put in a window that has ended.

        Args:
            window: its numbers on the device.
            scalars: by name; tensors travel with the numbers. The one called `RATE` becomes `known.rate`.
            known: what the host knows of it.
        """
        on_device = {name: n for name, n in scalars.items() if isinstance(n, Tensor)}
        on_host = {name: n for name, n in scalars.items() if not isinstance(n, Tensor)}
        own, own_shapes = packed({**window.own, _SCALARS: as_vector(list(on_device.values()), self._device)})
        # `read` must not hold the window itself, so that its memory is freed once it is sent.
        names, shapes, adds = tuple(on_device), window.shapes, self._adds
        sizes, classes = window.witness_sizes, window.classes

        def read(vectors: list[Tensor]) -> MeasuredWindow:
            numbers = named(vectors[0], shapes) | named(vectors[1], own_shapes)
            rows = read_rows(numbers, adds, sizes, classes)
            by_name = dict(zip(names, numbers[_SCALARS].tolist(), strict=True)) | on_host
            of_window = replace(known, rate=by_name.pop(RATE, None))
            if sq_norm_update := float(numbers["sq_norm_update"]):
                by_name[UPDATE_NORM] = math.sqrt(sq_norm_update)
            own_norm = None
            if "own_norm" in numbers and numbers["own_norm"].any():
                own_norm = OwnNorm(*numbers["own_norm"].tolist(), *numbers["own_norm_squares"].tolist())
            examples = unprefixed("examples", numbers)
            costs = WindowCosts(*numbers["costs"].tolist())
            return MeasuredWindow(rows, of_window, by_name, costs, numbers["frozen"], examples, own_norm)

        self.put([window.sums, own], read, window.work)

    def put(self, vectors: list[Tensor], read: Read, work: dist.Work | None = None) -> None:
        """Put a window in.

        Args:
            vectors: 1-D tensors of one floating dtype on one device; they must not be written to again.
            read: makes the window of the vectors once they are on the CPU.
            work: a collective that is still writing to them.
        """
        self.n_put += 1
        self._put.append((work, vectors, read))

    def send(self, *, abandon_unfinished: bool = False) -> None:
        """Start copying the windows that were put in.

        Args:
            abandon_unfinished: leave out windows whose collective has failed or has not finished; if its peers have
                failed, it never will.

        Raises:
            RuntimeError: when a collective has failed; the other windows are sent.
        """
        put, self._put = self._put, []
        finished: list[tuple[list[Tensor], Read]] = []
        failure: RuntimeError | None = None
        # A collective that fails must not keep the others from the host: the failure is raised at the end.
        for work, vectors, read in put:
            if abandon_unfinished and work is not None and not work.is_completed():
                continue
            try:
                if work is not None:
                    with self._own.no_cost:
                        work.wait()  # on a GPU only the stream waits; gloo has usually finished in the windows since
            except RuntimeError as error:
                failure = error
            else:
                finished.append((vectors, read))
        if finished:
            flat = torch.cat([vector for vectors, _ in finished for vector in vectors])
            sizes = [([vector.numel() for vector in vectors], read) for vectors, read in finished]
            self._copies.append((start_copy_to_host(flat), sizes))
        if failure is not None and not abandon_unfinished:
            raise failure

    def wait_for_ranks(self, seconds: float) -> None:
        """Wait until every collective has finished or failed, but no longer than these seconds.

        A collective that is still under way when its process group is destroyed may end the process.
        """
        deadline = time.perf_counter() + seconds
        works = [work for work, _, _ in self._put if work is not None]
        while not all(work.is_completed() for work in works) and time.perf_counter() < deadline:
            time.sleep(0.001)

    def receive(self, *, wait: bool) -> None:
        """Hand over the windows that have arrived.

        Args:
            wait: wait for everything that was sent; this is the only place that waits for the device.
        """
        while self._copies:
            copy, sent = self._copies[0]
            if not copy.has_arrived():
                if not wait:
                    return
                with self._own.no_cost:
                    copy.wait()
            del self._copies[0]
            vectors = iter(copy.host.split([n for sizes, _ in sent for n in sizes]))
            for sizes, read in sent:
                self._take(read([next(vectors) for _ in sizes]))

    def receive_all(self) -> None:
        """Send every window that has ended, and wait for it."""
        with self.alone:
            self.send()
            self.receive(wait=True)


class MetricTrackers(Stateful):
    """One tracker for each metric that was asked for. The first is the headline.

    Args:
        names: of the metrics that were asked for.
        measured: names of all that are measured, in the order of a window's rows.
        make: makes a tracker, called with the name of its metric.
    """

    STATE = ("all",)

    def __init__(self, names: Sequence[str], measured: Sequence[str], make: Callable[[str], NoiseScaleTracker]) -> None:
        self._row = {name: measured.index(name) for name in names}
        self.all = {name: make(name) for name in names}
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

    def follow_rate(self, factor: Callable[[], float]) -> None:
        """Have rates that a batch schedule multiplies not taken for a warm-up."""
        for tracker in self.all.values():
            tracker.rate_factor = factor

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
        pace: of the measured windows.
        reader: of the windows; its tap learns that only declared pieces count, once some rank has declared one.
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
        pace: Pace,
        reader: WindowReader,
        counted_in: Callable[[], str],
        say: Callable[[str], None],
    ) -> None:
        self._metrics, self._tracker, self._log = metrics, metrics.headline, log
        self._rounding, self._mechanism, self._pace, self._tap = rounding, mechanism, pace, reader.tap
        self._wrapper, self._say, self._frozen = (wrapper := reader.wrapper), say, frozen
        self._counted_in, self._has_seen_one = counted_in, False
        self._norms = NormWatch(reader.final.n_parts, reader.final.n_ranks)
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
            self._norms.begin_anew()
            self._log.alert(*change, window=number)
        read_examples = self._mechanism.reads_examples
        row = self._mechanism.row_of(window)
        drop = self._metrics.update(row, window)
        if drop is None:
            self._begin_anew_if_it_speaks_of_something_else(row, number)
            self._mechanism.averaged(row)
            self._tracker.coverage = self._mechanism.covered.coverage if row.examples is not None else None
        elif drop.kind == "changed":  # the model may have been converted
            self._metrics.set_rounding(self._rounding())
        for alert, message in self._mechanism.take_news():
            if alert:
                self._log.alert(alert, message, window=number)
            else:
                self._say(message)
        if self._mechanism.reads_examples != read_examples:
            self._pace.is_changed = True
        self._pace.take(window.known.n_ended, window.costs)
        if window.row.n_ranks_declaring and not self._shares_pieces:
            self._tap.only_declared = True
        self._say_first(window.row)
        plain = self._metrics.all.get("euclidean")
        solved = None if plain is None else plain.last
        norm = None if solved is None else solved.norm
        own = window.own_norm
        if own is not None and (true := self._norms.corrected(own)):
            window = replace(window, scalars={**window.scalars, NORM: true})
        alerts = self._norms.add(
            number,
            gradient=window.scalars.get(NORM, norm),
            max_norm=window.scalars.get(MAX_NORM),
            own=own,
            update_before=window.scalars.get(UPDATE_NORM),
            rate=window.known.rate,
        )
        for alert, message in alerts:
            self._log.alert(alert, message, window=number)
        self._log.window(window, drop, norm)

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
