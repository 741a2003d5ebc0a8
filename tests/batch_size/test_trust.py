"""When a number is not to be trusted, and when it is: no false alarms, no changed gradient that goes unsaid."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.batch_size.loops import Recording, attached, batch, mean_loss, piece_losses, sgd, small_model, train


class Many(nn.Module):
    """Many matrices: the witness takes many windows to read each of them."""

    def __init__(self, n: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6, bias=False) for _ in range(n))

    def forward(self, x: Tensor) -> Tensor:
        joined: Tensor = sum(layer(x) for layer in self.layers)  # type: ignore[assignment]
        return joined / len(self.layers)


def statuses(
    model: nn.Module, n: int, *, read_every: int, change: Callable[[int], object] = lambda window: None
) -> dict[int, str]:
    """Train `n` windows of two pieces of a regression; the status after each one that is read, by its number."""
    generator, found = torch.Generator().manual_seed(0), {}
    with attached(model, groups=None) as probe:
        for window in range(1, n + 1):
            for _ in range(2):
                x, noise = torch.randn(2, 4, 6, generator=generator)
                with probe.piece(units=4):
                    (model(x) - x - noise).square().sum(1).mean().backward()
            change(window)
            probe.step()
            model.zero_grad()
            if window % read_every == 0:
                found[window] = probe.reading().status
    return found


def test_one_matrix_of_many_changed_in_every_window_stays_in_doubt() -> None:
    """The matrix is compared only in every 40th window, which is about as long as the averages remember."""
    model = Many(80)
    middle: Any = model.layers[41].weight
    status = statuses(model, 120, read_every=5, change=lambda window: middle.grad.copy_(middle.grad.flip(0)))
    first = next(window for window in status if status[window] == "unresolved" and window > 6)
    assert first <= 45
    assert {status[window] for window in status if window >= first} == {"unresolved"}


def test_a_dominant_matrix_changed_in_every_window_is_found_by_the_median_scale() -> None:
    """The matrix dominates the gradient and therefore κ. The κ of most parameters is right, and the matrix is wrong."""
    torch.manual_seed(0)
    model = Many(41)
    middle: Any = model.layers[20].weight
    middle.register_hook(lambda g: 30 * g)
    status = statuses(model, 100, read_every=10, change=lambda window: middle.grad.mul_(0.9))
    assert {status[window] for window in status if window > 60} == {"unresolved"}


def test_gradients_present_at_attach_do_not_silence_a_large_model() -> None:
    model = Many(80)
    model(torch.ones(1, 6)).sum().backward()  # stale: never zeroed before the first window
    assert statuses(model, 40, read_every=40) == {40: "resolved"}


def test_one_changed_window_in_a_deep_model_is_soon_forgotten() -> None:
    """Every parameter compared in that window was changed, among them matrices that are compared again much later."""
    model, generator = Many(80), torch.Generator().manual_seed(0)

    def change(window: int) -> None:
        for p in model.parameters() if window == 61 else ():
            p.grad.mul_(1 + torch.rand(p.shape, generator=generator))  # type: ignore[union-attr]

    status = statuses(model, 80, read_every=1, change=change)
    assert {status[window] for window in range(62, 81)} == {"resolved"}


def test_rare_changes_end_their_doubt() -> None:
    """Two changed windows of many do not hide the number for ever."""
    model = small_model()

    def noise() -> None:
        for p in model.parameters():
            p.grad.add_(torch.randn_like(p))  # type: ignore[union-attr]

    with attached(model) as probe:
        train(model, probe, windows=2, before_step=noise)
        assert probe.reading().status == "unresolved"
        assert "changed" in probe.reading().doubts
        train(model, probe, windows=150)
        assert (probe.reading().status, probe.reading().doubts) == ("resolved", {})
        assert sum(probe.reading().dropped.values()) == 2


def test_windows_between_changed_ones_are_not_trusted() -> None:
    """Those windows were clipped too, at elements that were not compared: their numbers would be wrong."""
    model = small_model()

    def clip_few_by_value() -> None:
        """By a value that one element in ten thousand reaches: most windows show no change where it is compared."""
        joined = torch.cat([p.grad.abs().flatten() for p in model.parameters()])  # type: ignore[union-attr]
        nn.utils.clip_grad_value_(model.parameters(), float(joined.quantile(0.9999)))

    with attached(model) as probe:
        train(model, probe, windows=100, before_step=clip_few_by_value)
        reading = probe.reading()
    assert reading.windows > 30  # averaged, since no change was seen in them
    assert (reading.status, reading.b_simple, reading.low, reading.grad_sq) == ("unresolved", None, None, None)
    assert "clipped by value" in reading.reason or "not a multiple" in reading.reason
    assert "others may have been" in reading.reason
    assert all(group.b_simple is None for group in reading.groups.values())


def test_a_parameter_that_is_no_longer_used_raises_no_doubt() -> None:
    model, generator = nn.ModuleDict({"body": nn.Linear(12, 3), "unused": nn.Linear(12, 3)}), torch.Generator()
    with attached(model) as probe:
        for window in range(120):
            for _ in range(2):
                x, y = batch(4, generator)
                with probe.piece(units=4):
                    mean_loss(model["body"], x, y).backward()
                    if window < 10:
                        mean_loss(model["unused"], x, y).backward()
            if window == 9:
                model["unused"].weight.grad.add_(1.0)  # type: ignore[union-attr,operator]
            probe.step()
            model.zero_grad()
        assert probe.reading().status == "resolved"


# 16 bits.


def test_sixteen_bit_sums_raise_no_false_alarm() -> None:
    """Where pieces nearly cancel, rounding is large beside their sum and small beside the pieces."""
    model = small_model(torch.bfloat16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with attached(model, optimizer) as probe:
        train(
            model, probe, optimizer, windows=60, sizes=[4] * 8, scale_loss=lambda loss: loss / 8, dtype=torch.bfloat16
        )
        assert (probe.reading().dropped, probe.reading().doubts) == ({}, {})


def test_large_pieces_in_sixteen_bits_are_not_the_same_data() -> None:
    model = nn.Linear(12, 3).bfloat16()
    with attached(model) as probe:
        train(model, probe, windows=20, sizes=[2048] * 4, scale_loss=lambda loss: loss / 4, dtype=torch.bfloat16)
        assert "same_data" not in probe.reading().doubts
        assert probe.reading().windows == 20


def test_a_model_may_be_converted_after_attach() -> None:
    """Its sums round differently from then on."""
    model = small_model()
    with attached(model) as probe:
        train(model.bfloat16(), probe, windows=10, sizes=[4] * 4, dtype=torch.bfloat16)
        assert (probe.reading().windows, dict(probe.reading().dropped)) == (10, {})


# Alerts.


def test_an_alert_is_over_with_its_cause() -> None:
    """An alert is raised once, written with every reading while its cause lasts, and with none afterwards."""
    model, sink = small_model(), Recording()
    with attached(model, sinks=[sink], log_every=1) as probe:
        for factor in (1.0, math.nan, math.nan, 1.0):
            train(model, probe, scale_loss=lambda loss, factor=factor: loss * factor)  # type: ignore[misc]
    assert [list(r["alerts"]) for r in sink.of_kind("reading")] == [[], ["not_finite"], ["not_finite"], []]
    assert [a["name"] for a in sink.of_kind("alert")] == ["not_finite"]


def test_too_few_data_are_no_alert_but_come_with_advice() -> None:
    """Pure noise: the true gradient is 0, so no number of windows finds an upper bound."""
    model, generator = nn.Linear(30, 1, bias=False), torch.Generator().manual_seed(0)
    with attached(model, units_per_piece=2) as probe:
        for _ in range(60):
            for _ in range(3):
                (model.weight * torch.randn(1, 30, generator=generator)).sum().backward()
            probe.step()
            model.zero_grad()
        reading = probe.reading()
        assert (reading.status != "resolved", reading.b_simple, probe.alerts) == (True, None, {})
        assert "cannot yet be distinguished from 0" in reading.reason
        assert re.search(r"horizon|units in each window|more windows", reading.advice)


@pytest.mark.parametrize("unfrozen", [False, True])
def test_parameters_unfrozen_later_are_noticed(unfrozen: bool) -> None:
    model = small_model()
    model[0].requires_grad_(False)
    with attached(model, sgd(model), log_every=1) as probe:
        model[0].requires_grad_(unfrozen)
        for loss in piece_losses(model, [4, 4]):
            with probe.piece(units=4):
                loss().backward()
        probe.step()
        probe.reading()
        assert ("0.weight" in probe.alerts.get("not_watched", "")) == unfrozen
