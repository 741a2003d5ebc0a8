"""Alerts: when they begin, when they end, and when there is none."""

from __future__ import annotations

import math
import re

import torch
from torch import nn

from tests.batch_size.loops import (
    Recording,
    attached,
    piece_losses,
    small_model,
    train,
)


def test_an_alert_is_over_with_its_cause() -> None:
    """An alert is raised once, written with every reading while its cause lasts, and with none afterwards."""
    model = small_model()
    sink = Recording()
    losses = piece_losses(model, [4, 4])
    with attached(model, sinks=[sink], log_every=1) as probe:
        for window in range(4):
            for loss in losses:
                with probe.piece(units=4):
                    (loss() * (math.nan if window in (1, 2) else 1.0)).backward()
            probe.step()
            model.zero_grad()
    assert [list(r["alerts"]) for r in sink.of_kind("reading")] == [[], ["not_finite"], ["not_finite"], []]
    assert [a["name"] for a in sink.of_kind("alert")] == ["not_finite"]


def test_healthy_data_raise_no_alert() -> None:
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with attached(model, optimizer, log_every=1) as probe:
        train(model, probe, optimizer, windows=40)
        assert probe.reading().status == "resolved"
        assert probe.alerts == {}


def test_too_few_data_are_no_alert_but_come_with_advice() -> None:
    """Pure noise: the true gradient is 0, so no number of windows finds an upper bound."""
    model = nn.Linear(30, 1, bias=False)
    generator = torch.Generator().manual_seed(0)
    with attached(model, log_every=10, units_per_piece=2) as probe:
        for _ in range(60):
            for _ in range(3):
                (model.weight * torch.randn(1, 30, generator=generator)).sum().backward()
            probe.step()
            model.zero_grad()
        reading = probe.reading()
        assert reading.status != "resolved"
        assert reading.b_simple is None
        assert "cannot yet be distinguished from 0" in reading.reason
        assert re.search(r"horizon|units in each window|more windows", reading.advice)
        assert probe.alerts == {}


def test_parameters_replaced_later_are_noticed() -> None:
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with attached(model, optimizer, log_every=1) as probe:
        model[0].weight = nn.Parameter(model[0].weight.detach().clone())
        train(model, probe, optimizer, windows=2)
        assert "0.weight" in probe.alerts["not_watched"]


def test_parameters_unfrozen_later_are_noticed() -> None:
    model = small_model()
    model[0].requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with attached(model, optimizer, log_every=1) as probe:
        train(model, probe, optimizer, windows=2)
        assert "not_watched" not in probe.alerts
        model[0].requires_grad_(True)
        train(model, probe, optimizer, windows=2)
        assert "0.weight" in probe.alerts["not_watched"]
