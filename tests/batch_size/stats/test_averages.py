"""The averages and their saved state."""

from __future__ import annotations

import json

import pytest

from sonde.batch_size.stats.averages import NoiseScaleAverages
from sonde.batch_size.stats.noise_scale import WindowEstimate
from sonde.batch_size.stats.scale_witness import ScaleReading
from sonde.batch_size.stats.solved_window import SolvedWindow
from sonde.batch_size.stats.window_row import Drop

SOUND = ScaleReading(0.5, 1e-8, "scaled", sound=frozenset({0}))
CHANGED = ScaleReading(0.5, 0.3, "changed", changed=frozenset({7}), sound=frozenset({0}))


def solved(trace_cov: float, grad_sq: float) -> SolvedWindow:
    """A window of two groups that share its estimates one to three."""
    return SolvedWindow(
        total=WindowEstimate(trace_cov, grad_sq),
        per_group=(WindowEstimate(trace_cov / 4, grad_sq / 4), WindowEstimate(3 * trace_cov / 4, 3 * grad_sq / 4)),
        within_between=WindowEstimate(2.0, 1.0),
        norm=1.0,
        effective_units=8.0,
        u=0.25,
        witness_squares=10.0,
        witness_differences=1.0,
    )


def averages_of_some_windows() -> NoiseScaleAverages:
    averages = NoiseScaleAverages(["a", "b"], memory=10.0)
    for number, (trace_cov, grad_sq) in enumerate(((30.0, 14.0), (34.0, 18.0), (31.0, 17.0)), 1):
        averages.n_seen = number
        averages.see_units(8)
        averages.add(solved(trace_cov, grad_sq), SOUND)
    averages.see_units(8)
    averages.drop(Drop("changed", "noise was added"), CHANGED)
    return averages


def test_averages_by_hand() -> None:
    averages = NoiseScaleAverages(["a", "b"], memory=10.0)
    assert (averages.units_per_window, averages.consistency) == (None, None)
    averages.see_units(8)
    averages.see_units(16)
    assert averages.units_per_window == pytest.approx((0.9 * 8 + 16) / 1.9)  # the decay is 1 − 1/memory
    for trace_cov, grad_sq in ((30.0, 14.0), (34.0, 18.0)):
        averages.n_seen += 1
        averages.see_units(8)
        averages.add(solved(trace_cov, grad_sq), SOUND)
    recent = averages.run.recent()
    assert recent is not None
    assert (recent.n_windows, recent.n_steps) == (2, 2)
    assert recent.trace_cov == pytest.approx([32.0, 8.0, 24.0])
    assert recent.grad_sq == pytest.approx([16.0, 4.0, 12.0])
    assert averages.consistency == pytest.approx(2.0)
    assert not averages.doubts()
    assert averages.effective(16.0) == 16.0  # units weigh alike
    last_window = (averages.effective(8.0), averages.u, averages.scale, averages.scale_residual)
    assert last_window == (8.0, 0.25, 0.5, 1e-8)


def test_dropped_windows_are_counted_by_reason() -> None:
    averages = averages_of_some_windows()
    for _ in range(2):
        averages.drop(Drop("zero", "the gradient was 0"), SOUND)
    assert averages.dropped == {"noise was added": 1, "the gradient was 0": 2}
    assert averages.windows == 3


def test_the_state_round_trips_through_json() -> None:
    averages, restored = averages_of_some_windows(), NoiseScaleAverages(["a", "b"], memory=10.0)
    restored.load_state_dict(json.loads(json.dumps(averages.state_dict())))
    assert restored.state_dict() == averages.state_dict()
    assert restored.changed.doubt() == averages.changed.doubt() is not None
    for each in (averages, restored):  # and both go on alike
        each.n_seen = 5
        each.see_units(16)
        each.add(solved(40.0, 10.0), SOUND)
    assert restored.state_dict() == averages.state_dict()


def test_a_batch_that_was_changed_is_not_averaged_with_the_one_before() -> None:
    averages = NoiseScaleAverages(())
    for n_units in [512.0] * 60 + [16.0] * 4:
        averages.see_units(n_units)
    assert averages.units_per_window > 400  # type: ignore[operator]
    averages.see_units(16.0)
    assert averages.units_per_window == 16.0


def test_batches_of_many_sizes_are_averaged() -> None:
    averages = NoiseScaleAverages((), memory=1e9)
    sizes = [2.0, 8.0, 8.0, 2.0, 32.0, 32.0, 32.0, 32.0, 2.0, 8.0]
    for n_units in sizes:
        averages.see_units(n_units)
    assert averages.units_per_window == pytest.approx(sum(sizes) / len(sizes))
