"""The way back of a window: its numbers travel from the device to the probe while training goes on."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor

from sonde.batch_size.log import KnownOfWindow, MeasuredWindow
from sonde.batch_size.measuring_cost import WindowCosts
from sonde.batch_size.per_example.window import read_examples
from sonde.batch_size.readback import Read, Readback
from sonde.batch_size.taps.tap import Adds
from sonde.batch_size.taps.window_reader import Window
from sonde.batch_size.taps.window_sums import as_vector, named, packed, read_rows, those_under
from sonde.batch_size.window_clock import OwnTime

_SCALARS = "scalars"
RATE = "learning rate on the device"
"""The scalar that is one: no name of the user's has spaces."""


class Delivery:
    """Hands over windows whose numbers have arrived on the host.

    A thread that reads must not meet the thread that trains, so both work inside `alone`.

    Args:
        take: called with each window, in order.
        device: of the numbers.
        adds: what adds up over parameters in each metric.
        own: the probe's time.
    """

    def __init__(
        self, take: Callable[[MeasuredWindow], None], device: torch.device, adds: Sequence[Adds], own: OwnTime
    ) -> None:
        self._take, self._device, self._adds = take, device, tuple(adds)
        self._readback: Readback[MeasuredWindow] = Readback(own)
        self._lock = threading.RLock()
        self.n_put = 0
        """Windows put in."""

    @property
    def is_empty(self) -> bool:
        """Whether no window is on its way."""
        return self._readback.is_empty

    def alone(self) -> AbstractContextManager[object]:
        """A context in which other threads wait. A thread that is inside may enter again.

        The lock itself: a KeyboardInterrupt on the way in or out of a context of our own could leave it held.
        """
        return self._lock

    def put_window(self, window: Window, scalars: Mapping[str, float | Tensor], known: KnownOfWindow) -> None:
        """Put in a window that has ended.

        Args:
            window: its numbers on the device.
            scalars: by name; they travel with the numbers. The one called `RATE` takes the place of `known.rate`.
            known: what the host knows of it.
        """
        own, own_shapes = packed({**window.own, _SCALARS: as_vector(list(scalars.values()), self._device)})
        # `read` must not hold the window itself, so that its memory is freed once it is sent.
        names, sizes, adds, shapes = tuple(scalars), window.witness_sizes, self._adds, window.shapes
        # As the host knows them: a device without fp64 rounds them.
        on_host = {name: n for name, n in scalars.items() if not isinstance(n, Tensor)}

        def read(vectors: list[Tensor]) -> MeasuredWindow:
            numbers = named(vectors[0], shapes) | named(vectors[1], own_shapes)
            rows = read_rows(numbers, adds, sizes)
            by_name = dict(zip(names, numbers[_SCALARS].tolist(), strict=True)) | on_host
            of_window = replace(known, rate=by_name.pop(RATE)) if RATE in by_name else known
            example_sums = those_under("examples", numbers)
            examples = read_examples(example_sums, rows[0]) if example_sums else None
            costs = WindowCosts(*numbers["costs"].tolist())
            return MeasuredWindow(rows, of_window, by_name, costs, numbers["frozen"], examples)

        self.put([window.sums, own], read, window.work)

    def put(self, vectors: list[Tensor], read: Read[MeasuredWindow], work: dist.Work | None) -> None:
        """Put a window in; see `Readback.put`."""
        self.n_put += 1
        self._readback.put(vectors, read, work)

    def send(self, *, abandon_unfinished: bool = False) -> None:
        """Start copying the windows that were put in; see `Readback.send`."""
        self._readback.send(abandon_unfinished=abandon_unfinished)

    def wait_for_ranks(self, seconds: float) -> None:
        """Wait for collectives; see `Readback.wait_for_ranks`."""
        self._readback.wait_for_ranks(seconds)

    def receive(self, *, wait: bool) -> None:
        """Hand over the windows that have arrived.

        Args:
            wait: wait for everything that was sent.
        """
        for window in self._readback.arrived(wait=wait):
            self._take(window)

    def receive_all(self) -> None:
        """Send every window that has ended, and wait for it."""
        with self.alone():
            self.send()
            self.receive(wait=True)
