"""Ctrl-C reaches the launcher and every rank at once; the ranks then stop together, after the same step."""

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
"""The exit status that shells expect of a command ended by Ctrl-C."""


@contextmanager
def interrupts_left_to_ranks() -> Iterator[None]:
    """In the launcher: processes started inside are born with SIGINT held back, until they make a `StopRequest`.

    The launcher itself does nothing about it, and gets its own signal handlers back from torch's on the way out.
    """
    handlers = {s: signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)}
    resource_tracker.ensure_running()  # multiprocessing would start it with the first rank, and that unblocks SIGINT
    signal.signal(signal.SIGINT, lambda *_: None)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        for number, handler in handlers.items():
            signal.signal(number, handler)


class StopRequest:
    """In a rank: takes Ctrl-C as a request to stop; the second one ends the process at once."""

    def __init__(self) -> None:
        self._made = False
        signal.signal(signal.SIGINT, self._on_interrupt)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})

    def agreed(self) -> bool:
        """Whether any rank was asked to stop. All ranks call it together and get the same answer."""
        made = torch.tensor(float(self._made))  # on the CPU, through gloo: the GPU is not waited for
        dist.all_reduce(made, op=dist.ReduceOp.MAX)
        return bool(made)

    def _on_interrupt(self, number: int, frame: FrameType | None) -> None:
        if self._made:
            os._exit(INTERRUPTED)
        self._made = True
