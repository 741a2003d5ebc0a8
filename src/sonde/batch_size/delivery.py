"""The way back of a window: its numbers travel from the device to the probe while training goes on."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor

from sonde.batch_size.log import KnownOfWindow, MeasuredWindow
from sonde.batch_size.measuring_cost import WindowCosts
from sonde.batch_size.taps.metric import Adds
from sonde.batch_size.taps.window_reader import Window
from sonde.batch_size.taps.window_sums import named, packed, read_rows, those_under
from sonde.batch_size.units import as_vector
from sonde.batch_size.window_clock import NO_COST, OwnTime
from sonde.parallel.devices import HostCopy, start_copy_to_host

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
        names, sizes, adds, shapes = tuple(on_device), window.witness_sizes, self._adds, window.shapes

        def read(vectors: list[Tensor]) -> MeasuredWindow:
            numbers = named(vectors[0], shapes) | named(vectors[1], own_shapes)
            rows = read_rows(numbers, adds, sizes)
            by_name = dict(zip(names, numbers[_SCALARS].tolist(), strict=True)) | on_host
            of_window = replace(known, rate=by_name.pop(RATE, None))
            examples = those_under("examples", numbers)
            costs = WindowCosts(*numbers["costs"].tolist())
            return MeasuredWindow(rows, of_window, by_name, costs, numbers["frozen"], examples)

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
                    with self._own.on(NO_COST):
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
                with self._own.on(NO_COST):
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
