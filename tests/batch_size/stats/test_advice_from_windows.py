"""The advice of readings that are made of windows: what `advise` gets is what the trend gives."""

from __future__ import annotations

import math
import random
import re
from collections.abc import Callable, Iterable

import pytest

from sonde.batch_size.stats.averages import NoiseScaleAverages
from sonde.batch_size.stats.noise_scale import WindowEstimate
from sonde.batch_size.stats.reading import NoiseScaleReading
from sonde.batch_size.stats.scale_witness import ScaleReading
from sonde.batch_size.stats.solved_window import SolvedWindow
from sonde.batch_size.stats.summary import summarise

SOUND = ScaleReading(1.0, 0.0, "scaled", sound=frozenset({0}))
N_UNITS = 32.0


def add(averages: NoiseScaleAverages, trace_cov: float, grad_sq: float, *, n_pieces: float = 4.0) -> None:
    """A window of one norm, whose tr Σ and |G|² are shared out equally to all groups."""
    n = len(averages.history.groups)
    total, each = WindowEstimate(trace_cov, grad_sq), WindowEstimate(trace_cov / n, grad_sq / n)
    averages.n_seen += 1
    averages.add(SolvedWindow(total, (each,) * n, None, 1.0, N_UNITS, n_pieces / N_UNITS, 1.0, 1.0), SOUND)


def reading_of(
    windows: Iterable[tuple[float, float]], *, horizon: float = 50.0, n_pieces: float = 4.0
) -> NoiseScaleReading:
    averages = NoiseScaleAverages(["a"], horizon)
    for trace_cov, grad_sq in windows:
        add(averages, trace_cov, grad_sq, n_pieces=n_pieces)
    return summarise(averages, unit="rows", level=0.95)


def drifting(
    seed: int, *, drift: float, noise: float, n: int = 250, of_noise: float = 0.1
) -> Iterable[tuple[float, float]]:
    """Windows whose B_simple is 50 now, with noise of |G|² and of tr Σ relative to their means."""
    source = random.Random(seed)
    for age in reversed(range(n)):
        yield (
            50 * math.exp(-drift * age) * source.gauss(1, of_noise),
            source.gauss(1, noise),
        )


def readings(status: str, make: Callable[[int], NoiseScaleReading], n: int = 30) -> list[NoiseScaleReading]:
    found = [reading for reading in map(make, range(n)) if reading.status == status]
    assert len(found) >= 3
    return found


def test_a_steady_lower_bound_is_told_to_look_further_back() -> None:
    bounds = readings("lower_bound", lambda seed: reading_of(drifting(seed, drift=0.0, noise=4.0)))
    longer = [int(match[1]) for r in bounds if (match := re.match(r"use a horizon of about (\d+) windows", r.advice))]
    assert len(longer) >= len(bounds) // 2
    assert 75 <= min(longer) <= max(longer) <= 600
    assert all(r.drift is None for r in bounds)  # a reading gives no drift beside a bound


@pytest.mark.parametrize(("n_pieces", "expected"), [(2.0, "or more pieces"), (16.0, "times as many units")])
def test_what_drifts_is_told_to_measure_more_in_each_window(n_pieces: float, expected: str) -> None:
    """Its drift does not fit into a longer horizon. Pieces suffice where 2 are split, and no longer with 16."""
    found = [reading_of(drifting(seed, drift=0.05, noise=2.5), n_pieces=n_pieces) for seed in range(40)]
    assert any(expected in r.advice and r.status == "lower_bound" for r in found)


def test_no_advice_asks_for_more_than_first_order_can_tell() -> None:
    """|G|² is a hundredth of its noise: any root is chance."""
    bounds = readings("lower_bound", lambda seed: reading_of(drifting(seed, drift=0.0, noise=100.0)), n=60)
    assert any("cannot be computed" in r.advice for r in bounds)
    numbers = [int(found) for r in bounds for found in re.findall(r"\d+", r.advice)]
    assert max(numbers, default=0) <= 600


@pytest.mark.parametrize(("since", "noise"), [(15, 0.6), (20, 0.05)])
def test_after_a_jump_no_advice_asks_for_a_longer_horizon(since: int, noise: float) -> None:
    jumped = []
    for seed in range(8):
        source = random.Random(seed)
        windows = [
            ((300 if i >= 250 - since else 20) * source.gauss(1, 0.05), source.gauss(1, noise)) for i in range(250)
        ]
        jumped.append(reading_of(windows))
    assert any(r.advice.startswith("measure") for r in jumped)
    for reading in jumped:
        assert "longer horizon" not in reading.advice
        assert "use a horizon" not in reading.advice
        if "measure more windows" in reading.reason:
            assert reading.advice.startswith("measure")
        if "use a shorter horizon" in reading.reason:
            assert reading.advice == "use a shorter horizon"


def test_windows_needed_after_a_freeze_do_not_depend_on_the_windows_before_it() -> None:
    needed = []
    for n_before in (0, 1500):
        averages, source = NoiseScaleAverages(["a", "b"], 50.0), random.Random(0)
        for _ in range(n_before):
            add(averages, 50 * source.gauss(1, 0.5), source.gauss(1, 0.3))
        averages.history.parameters_changed(["a"], gone=[], number=averages.n_seen + 1)
        source = random.Random(1)
        for _ in range(20):
            add(averages, 50 * source.gauss(1, 0.5), source.gauss(1, 0.3))
        needed.append(summarise(averages, unit="rows", level=0.95).windows_needed)
    assert needed[0] is not None
    assert 1 <= needed[0] <= 90  # 100 effective windows are the most of this horizon
    assert needed[1] == needed[0]


def test_an_upper_bound_is_told_how_many_pieces_show_its_noise() -> None:
    bounds = readings("upper_bound", lambda seed: reading_of(drifting(seed, drift=0.0, noise=0.05, of_noise=6.0)), n=60)
    pieces = [int(match[1]) for r in bounds if (match := re.match(r"split each batch into (\d+) or more", r.advice))]
    assert pieces
    assert 6 <= min(pieces) <= max(pieces) <= N_UNITS  # 1.5 times the 3 degrees of freedom of 4 pieces, at least
