"""No batch is judged while the learning rate rises; a verdict comes once it stays."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch

from tests.batch_size.loops import attached, batch, mean_loss, small_model
from tests.pretend_device import DEVICE, PretendDevice


def rises_then_stays(
    device: torch.device, *, is_given: bool = True, has_tensor: bool = False, pretended: PretendDevice | None = None
) -> None:
    """A warm-up of 160 steps: there is no verdict at step 150, and one at step 300."""
    model, generator = small_model().to(device), torch.Generator(device="cpu").manual_seed(0)
    rate: Any = torch.zeros((), device=device) if has_tensor else 0.0
    # The other group's rate is smaller, and a plain number.
    groups = [{"params": list(model[:3].parameters()), "lr": rate}, {"params": list(model[3:].parameters())}]
    optimizer = torch.optim.SGD(groups, lr=1e-12, foreach=False)
    kinds = {}
    every = 1 if pretended is None else 5  # the pretended device is slow
    with attached(model, optimizer if is_given else None, every=every) as probe:
        for window in range(1, 301):
            new = 1e-9 * min(window, 160)  # so small that the weights stay
            if has_tensor:
                rate.fill_(new)
            else:
                optimizer.param_groups[0]["lr"] = new
            with pretended.no_reads() if pretended is not None else contextlib.nullcontext():
                for _ in range(2):
                    x, y = (t.to(device, non_blocking=True) for t in batch(4, generator))
                    with probe.piece(units=4):
                        mean_loss(model, x, y).backward()
                probe.step()
            optimizer.step()
            optimizer.zero_grad()
            if pretended is not None:
                pretended.catch_up(but=5)  # the device lags behind
            if window in (150, 300):
                reading = probe.reading()
                kinds[window] = reading.warms_up, reading.verdict.kind == "unknown", probe.metrics()["gns/warms_up"]
                if window == 150:
                    assert "learning rate is still rising" in reading.verdict.detail
        assert probe.alerts == {}
    assert kinds == {150: (True, True, 1.0), 300: (False, False, 0.0)}


@pytest.mark.parametrize("is_given", [True, False])
def test_the_rate_of_the_optimizer_decides(is_given: bool) -> None:
    """Also of an optimizer that is found by its steps."""
    rises_then_stays(torch.device("cpu"), is_given=is_given)


def test_a_rate_that_is_a_tensor_on_the_host_decides_too() -> None:
    rises_then_stays(torch.device("cpu"), has_tensor=True)


def test_a_rate_on_the_device_decides_and_is_not_waited_for() -> None:
    with PretendDevice() as device:
        rises_then_stays(DEVICE, has_tensor=True, pretended=device)
