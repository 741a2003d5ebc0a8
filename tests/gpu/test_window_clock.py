"""On a GPU: windows are timed by events, which are not waited for."""

from __future__ import annotations

import pytest
import torch

from sonde.batch_size.window_clock import WindowClock, marks_of
from sonde.parallel.devices import record_event

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

DEVICE = torch.device("cuda", 0)


def work(seconds: float) -> None:
    """Keep the device busy; the host goes on."""
    torch.cuda._sleep(int(seconds * 1e9))  # cycles, at 1 to 2 GHz


def test_events_time_the_device_and_are_not_waited_for() -> None:
    clock = WindowClock(marks_of(DEVICE))
    assert marks_of(DEVICE).func is record_event  # type: ignore[attr-defined]
    clock.window_ended(1, was_measured=False)
    work(0.02)
    clock.window_ended(2, was_measured=True)
    work(0.2)
    clock.window_ended(3, was_measured=False)
    assert clock.take()["n_idle"] == 0  # the host is ahead
    torch.cuda.synchronize()
    times = clock.take()
    assert (times["n_idle"], times["n_measured"]) == (1, 1)
    assert times["idle_time"] > 3 * times["measured_time"] > 0
