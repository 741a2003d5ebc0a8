"""A thread that reads a probe while another trains, as a dashboard does."""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
import time

import torch

import sonde
from tests.batch_size.loops import attached, small_model, train


def test_a_thread_may_read_while_another_trains() -> None:
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    failures: list[BaseException] = []
    is_done = threading.Event()
    with attached(model, optimizer, log_every=1) as probe:

        def read() -> None:
            try:
                while not is_done.is_set():
                    probe.reading()
                    probe.state_dict()
                    time.sleep(1e-3)  # without a pause, one reader after the other takes the lock, and training waits
            except BaseException as error:
                failures.append(error)

        readers = [threading.Thread(target=read) for _ in range(3)]
        # They take turns often, at any line of sonde. By default a turn lasts 5 ms, in which training only waits.
        before = sys.getswitchinterval()
        sys.setswitchinterval(2e-5)
        for reader in readers:
            reader.start()
        try:
            train(model, probe, optimizer, windows=60)
        finally:
            is_done.set()
            sys.setswitchinterval(before)
            for reader in readers:
                reader.join(timeout=60)
        assert failures == []
        assert probe.reading().windows == 60  # none twice, none lost


class _Interrupted(Exception):
    pass


def _enter_and_leave(probe: sonde.NoiseScaleProbe, end: float) -> None:
    while time.monotonic() < end:
        with probe._delivery.alone:
            pass


def _is_free(probe: sonde.NoiseScaleProbe) -> bool:
    """Whether another thread gets in."""
    found: list[bool] = []

    def enter() -> None:
        if lock.acquire(timeout=10):
            lock.release()
            found.append(True)

    lock = probe._delivery.alone
    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    return found == [True]


def test_an_interrupt_on_the_way_in_or_out_leaves_no_lock_held() -> None:
    def interrupt(*_: object) -> None:
        raise _Interrupted

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        with attached(small_model()) as probe:
            for _ in range(500):
                with contextlib.suppress(_Interrupted):
                    signal.setitimer(signal.ITIMER_REAL, 2e-4)
                    _enter_and_leave(probe, time.monotonic() + 1)
                assert _is_free(probe)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
