"""Thousands of groups: the same numbers as few, in bounded memory."""

from __future__ import annotations

import json

import pytest
import torch
from torch import Tensor

from sonde.batch_size.stats.tracker import NoiseScaleTracker
from sonde.batch_size.stats.window_row import SolvedWindow
from tests.batch_size.stats.windows import solved, take, tracker_of


def windows(n: int, n_groups: int) -> list[SolvedWindow]:
    """Windows of groups whose noise scale is 40."""
    generator = torch.Generator().manual_seed(0)
    made = []
    for _ in range(n):
        noise = 40 + 4 * torch.rand(n_groups, generator=generator, dtype=torch.float64)
        signal = 0.5 + torch.rand(n_groups, generator=generator, dtype=torch.float64)
        table = torch.stack([noise, signal])
        made.append(with_total(table))
    return made


def with_total(groups: Tensor) -> SolvedWindow:
    return solved(torch.cat([groups.sum(1, keepdim=True), groups], 1).T.tolist(), 64.0)


def averaged(of: list[SolvedWindow], n_groups: int) -> NoiseScaleTracker:
    tracker = tracker_of([f"g{i}" for i in range(n_groups)])
    take(tracker, *of, units=64)
    return tracker


def test_a_group_reads_as_if_it_were_alone() -> None:
    """130 groups: each reads as one of two groups does."""
    of_all = windows(60, 130)
    reading = averaged(of_all, 130).reading()
    assert len(reading.groups) == 130
    for i in (0, 63, 64, 129):
        pairs = []
        for window in of_all:
            own = window.estimates[:, 1 + i]
            pairs.append(with_total(torch.stack([own, window.estimates[:, 0] - own], 1)))
        alone = averaged(pairs, 2).reading()
        for field in ("b_simple", "low", "high", "trace_cov", "grad_sq"):
            assert getattr(reading.groups[f"g{i}"], field) == pytest.approx(
                getattr(alone.groups["g0"], field), rel=1e-9
            )
        assert alone.b_simple == pytest.approx(reading.b_simple, rel=1e-9)


def test_the_state_of_many_groups_goes_on_alike() -> None:
    of_all = windows(60, 300)
    whole, first = averaged(of_all, 300), averaged(of_all[:40], 300)
    second = averaged([], 300)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    take(second, *of_all[40:], units=64)
    assert second.state_dict() == whole.state_dict()
