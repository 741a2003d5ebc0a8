"""What depends on a device: asked once, copied without waiting, timed where events can be timed."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from sonde.batch_size.window_clock import HostMark, WindowClock, marks_of
from sonde.parallel import devices
from tests.pretend_device import DEVICE, PretendDevice, PretendEvent, on_host

CPU = torch.device("cpu")


def test_a_cpu_has_no_streams_and_is_not_waited_for() -> None:
    x = torch.ones(3)
    assert not devices.runs_beside_host(CPU)
    assert devices.stream_of(x) is None
    assert not devices.is_capturing(CPU)
    assert not devices.has_timed_events(CPU)
    assert devices.to_device(x, CPU) is x
    copy = devices.start_copy_to_host(x)
    assert copy.has_arrived()
    devices.keep_for_present_stream(x)


def test_a_copy_to_the_host_arrives_later_and_whole() -> None:
    with PretendDevice() as device:
        x = torch.arange(4.0, device="cpu").to(DEVICE)
        copy = devices.start_copy_to_host(x)
        assert not copy.has_arrived()
        assert torch.isnan(copy.host).all()
        device.catch_up()
        assert copy.has_arrived()
        assert copy.host.tolist() == [0.0, 1.0, 2.0, 3.0]
        late = devices.start_copy_to_host(x + 1)
        late.wait()
        assert late.host.tolist() == [1.0, 2.0, 3.0, 4.0]
        assert device.reads  # it was waited for, and that was noticed


def test_fp64_numbers_arrive_in_fp32_where_there_is_no_fp64() -> None:
    numbers = torch.tensor([1.0 + 2.0**-40, 1e-30, -3.3], dtype=torch.float64)
    with PretendDevice(has_float64=False):
        assert not devices.has_float64(DEVICE)
        assert devices.accumulation_dtype(DEVICE) == torch.float32
        assert torch.equal(on_host(devices.to_device(numbers, DEVICE)), numbers.float())
        assert devices.widened(torch.zeros(2, device=DEVICE)).dtype == torch.float32
        assert devices.zero_sums(2, device=DEVICE).dtype == torch.float32
        assert (devices.exact_bits(DEVICE, 1), devices.exact_bits(DEVICE, 1000)) == (24, 14)
    with PretendDevice():
        assert devices.has_float64(DEVICE)
        assert torch.equal(on_host(devices.to_device(numbers, DEVICE)), numbers)


def test_events_without_timing_leave_the_clock_to_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(self: PretendEvent, later: Any) -> float:
        raise NotImplementedError("elapsedTime is not supported")

    with PretendDevice() as device:
        assert marks_of(DEVICE).func is devices.record_event  # type: ignore[attr-defined]
        clock = WindowClock(marks_of(DEVICE))
        for number in range(3):
            clock.window_ended(number, was_measured=True)
        assert clock.take()["n_measured"] == 0
        device.catch_up()
        assert clock.take()["n_measured"] == 2
    monkeypatch.setattr(PretendEvent, "elapsed_time", refuses)
    with PretendDevice(), pytest.warns(UserWarning, match="cannot be timed .elapsedTime is not supported.: windows"):
        assert marks_of(DEVICE) is HostMark


def test_random_numbers_go_on_as_if_nothing_had_happened() -> None:
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    with devices.preserve_randomness():
        torch.manual_seed(random.randrange(100))
        torch.rand(7)
    assert torch.equal(torch.rand(4), expected)


def test_whole_numbers_that_sum_exactly_have_53_bits_less_the_sums_growth() -> None:
    assert devices.exact_bits(CPU, 1) == 53
    assert devices.exact_bits(CPU, 4096) == 41
