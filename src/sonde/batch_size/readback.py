"""Brings small vectors from the device to the host without making the training path wait."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from sonde.batch_size.window_clock import NO_COST, OwnTime
from sonde.parallel.devices import HostCopy, start_copy_to_host

T = TypeVar("T")
Read = Callable[[list[Tensor]], T]
"""Makes a value of vectors on the CPU."""


@dataclass(frozen=True)
class _Copy(Generic[T]):
    """Vectors of several puts in one host tensor, which a copy may still be filling."""

    copy: HostCopy
    sizes: list[list[int]]
    reads: list[Read[T]]


class Readback(Generic[T]):
    """Vectors are put in on the device, sent by one asynchronous copy, and yielded as values once they have arrived.

    Args:
        own: the probe's time, which does not count waits.
    """

    def __init__(self, own: OwnTime) -> None:
        self._own = own
        self._put: list[tuple[dist.Work | None, list[Tensor], Read[T]]] = []
        self._copies: list[_Copy[T]] = []

    @property
    def is_empty(self) -> bool:
        """Whether nothing is on its way."""
        return not (self._put or self._copies)

    def put(self, vectors: list[Tensor], read: Read[T], work: dist.Work | None = None) -> None:
        """Put the vectors of one value in.

        Args:
            vectors: 1-D tensors of one floating dtype on one device; they must not be written to again.
            read: makes the value of the vectors once they are on the CPU.
            work: a collective that is still writing to them.
        """
        self._put.append((work, vectors, read))

    def send(self, *, abandon_unfinished: bool = False) -> None:
        """Start copying everything that was put in.

        Args:
            abandon_unfinished: leave out vectors whose collective has failed or has not finished; if its peers have
                failed, it never will.

        Raises:
            RuntimeError: when a collective has failed; the vectors of the others are sent.
        """
        put, self._put = self._put, []
        finished: list[tuple[list[Tensor], Read[T]]] = []
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
                continue
            finished.append((vectors, read))
        if finished:
            self._copy(finished)
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

    def _copy(self, finished: list[tuple[list[Tensor], Read[T]]]) -> None:
        packed = torch.cat([vector for vectors, _ in finished for vector in vectors])
        sizes = [[vector.numel() for vector in vectors] for vectors, _ in finished]
        self._copies.append(_Copy(start_copy_to_host(packed), sizes, [read for _, read in finished]))

    def arrived(self, *, wait: bool) -> list[T]:
        """The values that have arrived since the last call, in the order in which they were put in.

        Args:
            wait: wait for everything that was sent; this is the only place that waits for the device.
        """
        values: list[T] = []
        while self._copies:
            sent = self._copies[0]
            if not sent.copy.has_arrived():
                if not wait:
                    break
                with self._own.on(NO_COST):
                    sent.copy.wait()
            flat_sizes = [size for sizes in sent.sizes for size in sizes]
            vectors = iter(sent.copy.host.split(flat_sizes))
            for sizes, read in zip(sent.sizes, sent.reads, strict=True):
                values.append(read([next(vectors) for _ in sizes]))
            del self._copies[0]
        return values
