"""On a GPU: windows are timed by events, no call waits for the device, and sparse windows change nothing."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import sonde
from sonde.batch_size.window_clock import WindowClock, marks_of
from sonde.parallel.devices import record_event
from tests.gpu.set_ups import no_waiting

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


def train(*, every: int | None) -> list[torch.Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 8)).to(DEVICE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    data = torch.randn(2, 16, 64, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    probe = (
        sonde.attach(model, optimizer, unit="rows", units_per_piece=16, every=every, verbose=False) if every else None
    )
    with no_waiting(DEVICE):
        for _ in range(40):
            for x in data:
                model(x).square().mean().backward()
            if probe:
                probe.step()
            optimizer.step()
            optimizer.zero_grad()
    if probe:
        assert 8 <= probe.reading().windows < 20
        share = probe.cost().share
        assert share is not None
        assert share > 0
        probe.close()
    return [p.detach().clone() for p in model.parameters()]


def test_sparse_windows_change_nothing_and_nothing_waits_for_the_device() -> None:
    for on, off in zip(train(every=3), train(every=None), strict=True):
        assert torch.equal(on, off)
