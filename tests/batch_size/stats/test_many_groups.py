"""Thousands of groups: the same numbers as few, in bounded memory."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
import torch

from sonde.batch_size.stats.averages import NoiseScaleAverages
from sonde.batch_size.stats.blocks import on_host
from sonde.batch_size.stats.group_estimates import GroupEstimates
from sonde.batch_size.stats.noise_scale import PieceSums, WindowEstimate, estimate_window
from sonde.batch_size.stats.piece_class import PieceClass
from sonde.batch_size.stats.scale_witness import ScaleReading
from sonde.batch_size.stats.solved_window import SolvedWindow
from sonde.batch_size.stats.summary import summarise


def windows(n: int, n_groups: int) -> list[SolvedWindow]:
    """Windows of groups whose noise scale is 40."""
    generator = torch.Generator().manual_seed(0)
    made = []
    for _ in range(n):
        noise = 40 + 4 * torch.rand(n_groups, generator=generator, dtype=torch.float64)
        signal = 0.5 + torch.rand(n_groups, generator=generator, dtype=torch.float64)
        table = torch.stack([noise, signal])
        total = WindowEstimate(*table.sum(1).tolist())
        norm = math.sqrt(total.grad_sq + total.trace_cov / 64)
        made.append(SolvedWindow(total, GroupEstimates(table), None, norm, 64.0, 1 / 8, 1.0, 1.0))
    return made


def averaged(of: list[SolvedWindow], n_groups: int) -> NoiseScaleAverages:
    averages = NoiseScaleAverages([f"g{i}" for i in range(n_groups)])
    for number, window in enumerate(of, start=1):
        averages.n_seen = number
        averages.see_units(64)
        averages.add(window, ScaleReading(1.0, 0.0, "scaled"))
    return averages


def test_a_group_reads_as_if_it_were_alone() -> None:
    """130 groups: each reads as one of two groups does."""
    of_all = windows(60, 130)
    reading = summarise(averaged(of_all, 130), unit="rows")
    assert len(reading.groups) == 130
    for i in (0, 63, 64, 129):
        pairs = []
        for window in of_all:
            table = window.per_group.table  # type: ignore[attr-defined]
            rest = table.sum(1) - table[:, i]
            pairs.append(
                SolvedWindow(**(vars(window) | {"per_group": GroupEstimates(torch.stack([table[:, i], rest], 1))}))
            )
        alone = summarise(averaged(pairs, 2), unit="rows")
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
    for number, window in enumerate(of_all[40:], start=41):
        second.n_seen = number
        second.see_units(64)
        second.add(window, ScaleReading(1.0, 0.0, "scaled"))
    assert second.state_dict() == whole.state_dict()


def test_estimates_of_groups_are_those_of_one_by_one() -> None:
    small, big = [3.0, 0.5, 7.0], [1.0, 0.1, 2.0]
    sums: dict[str, Any] = {
        "weight": 4.0, "weight_over_units": 1.5, "sq_weight_over_units": 1.0, "n_pieces": 3,
    }  # fmt: skip
    got = GroupEstimates(PieceClass(on_host(small), on_host(big), **sums).estimates(scale=0.5, to_unit=0.25))
    expected = [estimate_window(PieceSums(s, **sums), 0.25 * b, scale=0.5) for s, b in zip(small, big, strict=True)]
    assert got == tuple(expected)
    assert (len(got), got[1], got[-1]) == (3, expected[1], expected[2])
    assert got[1:] == tuple(expected[1:])
