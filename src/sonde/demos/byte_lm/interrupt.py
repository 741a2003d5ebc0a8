"""Ctrl-C reaches the launcher and every rank at once. The ranks then stop together, after the same step."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import resource_tracker
from types import FrameType

import torch
import torch.distributed as dist

INTERRUPTED = 128 + signal.SIGINT
"""The exit status that shells expect from a command that Ctrl-C ended."""


@contextmanager
def interrupts_left_to_ranks() -> Iterator[None]:
    """In the launcher: block SIGINT in processes started inside, until they make a `StopRequest`.

    The launcher itself ignores SIGINT inside. torch's launcher replaces signal handlers; they are restored on exit.
    """
    handlers = {s: signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)}
    resource_tracker.ensure_running()  # otherwise it starts with the first rank, which unblocks SIGINT
    signal.signal(signal.SIGINT, lambda *_: None)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        for number, handler in handlers.items():
            signal.signal(number, handler)


class StopRequest:
    """In a rank: the first Ctrl-C is a request to stop. The second Ctrl-C ends the process at once."""

    def __init__(self) -> None:
        self._is_made = False
        signal.signal(signal.SIGINT, self._on_interrupt)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})

    def agreed(self) -> bool:
        """Whether any rank was asked to stop. All ranks call this together and get the same answer."""
        requested = torch.tensor(float(self._is_made))  # on the CPU, through gloo, so that nothing waits for the GPU
        dist.all_reduce(requested, op=dist.ReduceOp.MAX)
        return bool(requested)

    def _on_interrupt(self, number: int, frame: FrameType | None) -> None:
        if self._is_made:
            os._exit(INTERRUPTED)
        self._is_made = True
