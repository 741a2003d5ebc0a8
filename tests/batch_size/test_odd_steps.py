"""Loops whose steps or backwards are not what a window is made of: said at once, and no number is made of them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import sonde
from sonde.batch_size.forward_units import UnitsPerPiece
from tests.batch_size.loops import attached, mean_loss, small_model

ROWS = torch.randn(8, 12, generator=torch.Generator().manual_seed(3))
TARGETS = torch.zeros(8, 3)


class InParts(nn.Module):
    """A model that is never called itself."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(12, 4), nn.Linear(4, 3)

    def loss(self, rows: Tensor) -> Tensor:
        """Of a micro-batch."""
        return self.head(torch.tanh(self.body(rows))).square().mean()


@pytest.mark.parametrize("units", ["first dim", 4])
def test_a_model_that_is_called_in_parts_needs_a_number_of_units(units: UnitsPerPiece) -> None:
    model = InParts()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with attached(model, optimizer, units_per_piece=units) as probe:
        for _ in range(3):
            for rows in ROWS.split(4):
                model.loss(rows).backward()
            optimizer.step()
            optimizer.zero_grad()
        reading = probe.reading()
    assert probe.n_windows == 3
    assert reading.windows == (3 if units == 4 else 0)
    assert ("no forward of the model was seen" in probe.alerts.get("units", "")) == (units != 4)


def test_an_optimizer_that_steps_inside_backward_is_named_though_no_window_ends() -> None:
    model = small_model()
    optimizers = {p: torch.optim.SGD([p], lr=0.01) for p in model.parameters()}

    def step(parameter: Tensor) -> None:
        optimizers[parameter].step()  # type: ignore[index]
        optimizers[parameter].zero_grad()  # type: ignore[index]

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(step)
    with attached(model, list(optimizers.values()), units_per_piece="first dim") as probe:
        for _ in range(40):
            mean_loss(model, ROWS, TARGETS).backward()
        assert list(probe.alerts) == ["stepped_in_backward"]
        assert "step after the last backward" in probe.alerts["stepped_in_backward"]
        assert probe.n_windows == 0


def test_a_further_backward_may_be_said_to_be_no_micro_batch() -> None:
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    why = "two losses"

    def backwards(n: int) -> None:
        for _ in range(n):
            mean_loss(model, ROWS, TARGETS).backward()

    with attached(model, optimizer, units_per_piece="first dim") as probe:
        probe.judge_further_backwards(lambda: why)
        backwards(2)
        optimizer.zero_grad()
        probe.discard()
        for n in (1, 2):
            backwards(n)
            optimizer.step()
            optimizer.zero_grad()
            assert (probe.alerts.get("units") == "two losses") == (n == 2)
        why = ""
        backwards(2)
        optimizer.step()
        reading = probe.reading()
    # The window of one backward is too small, and nothing else is wrong with it.
    assert (reading.windows, list(reading.dropped.values())) == (1, [1, 1]), reading.dropped


def test_a_step_that_began_before_attach_ends_its_window_once_its_closure_has_run() -> None:
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    probes: list[sonde.NoiseScaleProbe] = []

    def closure() -> Tensor:
        is_first = not probes
        if is_first:
            probes.append(attached(model, optimizer, units_per_piece="first dim"))
        optimizer.zero_grad()
        for rows, targets in zip(ROWS.split(4), TARGETS.split(4), strict=True):
            loss = mean_loss(model, rows, targets)
            loss.backward()
        if is_first:
            probes[0].step_has_begun(optimizer)
        return loss

    for _ in range(3):
        optimizer.step(closure)
    assert (probes[0].n_windows, probes[0].reading().windows) == (3, 3)
    probes[0].close()
