"""Windows are timed from end to end, and a device that is behind is not waited for."""

from __future__ import annotations

import itertools
import random

import pytest
import torch

from sonde.batch_size.window_clock import HostMark, WindowClock, marks_of


class Device:
    """A device that lags behind: its moments pass when it is told to."""

    def __init__(self) -> None:
        self.now = 0.0
        self.given: list[float] = []

    def mark(self) -> DeviceMoment:
        return DeviceMoment(self)


class DeviceMoment:
    def __init__(self, device: Device) -> None:
        self.device, self.at = device, device.given[-1]

    def query(self) -> bool:
        return self.device.now >= self.at

    def elapsed_time(self, later: DeviceMoment, /) -> float:
        assert self.query()
        assert later.query()
        return (later.at - self.at) * 1e3


def test_each_duration_is_given_once_when_the_device_has_come_so_far() -> None:
    rng, device = random.Random(0), Device()
    clock = WindowClock(device.mark)
    ends, kinds, got = [0.0], [], []
    for number in range(200):
        device.given.append(ends[-1])
        kind = rng.random() < 0.3
        clock.window_ended(number, was_measured=kind)
        kinds.append(kind)
        ends.append(ends[-1] + rng.uniform(0.1, 1.0))
        if rng.random() < 0.4:
            device.now = max(device.now, ends[-1] - rng.uniform(0.0, 9.0))
            got.append(clock.take())
    device.now = ends[-1]
    got.append(clock.take())
    durations = [b - a for a, b in itertools.pairwise(ends[:-1])]  # without the first window, begun by nobody
    of = {kind: [d for d, k in zip(durations, kinds[1:], strict=True) if k is kind] for kind in (True, False)}
    assert sum(t["n_measured"] for t in got) == len(of[True])
    assert sum(t["n_idle"] for t in got) == len(of[False])
    assert sum(t["measured_time"] for t in got) == pytest.approx(sum(of[True]))
    assert sum(t["idle_time"] for t in got) == pytest.approx(sum(of[False]))
    assert not any(clock.take().values())


def test_the_hosts_clock_is_read_where_the_host_does_the_work() -> None:
    assert marks_of(torch.device("cpu")) is HostMark
    first, second = HostMark(), HostMark()
    assert first.query()
    assert first.elapsed_time(second) >= 0
