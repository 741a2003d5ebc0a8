"""Windows with a bias, windows without, and windows of other parameters: none of them is averaged with another kind."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

import sonde
from sonde.batch_size.pacing import allows_verdict
from tests.batch_size.loops import Recording, attached, mean_loss, small_model
from tests.batch_size.single_examples import pieces_of


def run(
    probe: sonde.NoiseScaleProbe, model: torch.nn.Module, windows: range, sizes: Sequence[int], factor: float = 1.0
) -> None:
    for window in windows:
        for x, y in pieces_of(*sizes, seed=window):
            with probe.piece(units=len(x)):
                (factor ** (window % 2) * mean_loss(model, x, y)).backward()
        probe.step()
        model.zero_grad()


def test_after_pairs_only_later_windows_count(capsys: pytest.CaptureFixture[str]) -> None:
    model = small_model()
    with attached(model, allow_biased=True, log_every=1, horizon=50.0, verbose=True) as probe:
        run(probe, model, range(60), (8,))
        assert probe.reading().is_biased
        run(probe, model, range(60, 100), (8, 8))
        reading = probe.reading()
    n_dropped = sum(reading.dropped.values())
    first = 60 + n_dropped + 1
    assert (
        f"the noise scale is measured without bias from window {first} on, and begins anew" in capsys.readouterr().err
    )
    assert (reading.is_biased, reading.every, reading.windows) == (False, 1.0, 40 - n_dropped)
    assert reading.average is not None
    assert reading.average.windows == 40 - n_dropped
    model = small_model()
    with attached(model, log_every=1, horizon=50.0) as alone:
        run(alone, model, range(60 + n_dropped, 100), (8, 8))
        expected = alone.reading()
    assert (reading.trace_cov, reading.grad_sq) == pytest.approx((expected.trace_cov, expected.grad_sq), rel=1e-6)
    assert expected.average is not None
    assert reading.average.b_simple == pytest.approx(expected.average.b_simple, rel=1e-6)
    assert reading.average.windows == expected.average.windows


@pytest.mark.parametrize("before", [0, 1, 2, 5])
def test_pairs_begin_and_go_on_after_windows_of_several_pieces(before: int, capsys: pytest.CaptureFixture[str]) -> None:
    model = small_model()
    with attached(model, allow_biased=True, log_every=1, verbose=True) as probe:
        run(probe, model, range(before), (8,))
        run(probe, model, range(before, before + 20), (4, 4))
        run(probe, model, range(before + 20, before + 80), (8,))
        reading = probe.reading()
    assert reading.is_biased
    assert reading.windows >= 26  # pairs, but for the windows in which that was noticed
    assert reading.every == 2.0
    n_unpaired = sum(n for reason, n in reading.dropped.items() if "a single piece" in reason)
    assert 60 - n_unpaired - 2 * reading.windows in (0, 1)  # the first pair counts, and the last window may be alone
    said = capsys.readouterr().err
    assert said.count("windows have several pieces again") <= 1
    assert said.count("the noise scale is measured with a bias from window") == 1


def test_windows_with_pieces_here_and_there_do_not_end_the_pairs(capsys: pytest.CaptureFixture[str]) -> None:
    model = small_model()
    with attached(model, allow_biased=True, log_every=1, verbose=True) as probe:
        run(probe, model, range(8), (8,))
        for first in range(8, 28, 5):
            run(probe, model, range(first, first + 1), (4, 4))
            run(probe, model, range(first + 1, first + 5), (8,))
        reading = probe.reading()
    assert (reading.windows, reading.is_biased) == (4 + 4 * 2, True)
    assert "windows have several pieces again" not in capsys.readouterr().err


def test_a_first_window_without_pieces_decides_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    model = small_model()
    with attached(model, allow_biased=True, every=4, verbose=True) as probe:
        probe.step()
        run(probe, model, range(32), (8,))
        reading = probe.reading()
    assert reading.is_biased
    said = capsys.readouterr().err
    assert "has no effect" not in said
    assert "one pair of windows in 4 is measured from now on" in said


def test_a_restart_that_can_read_examples_does_not_go_on_in_pairs(capsys: pytest.CaptureFixture[str]) -> None:
    model = small_model()
    with attached(model, allow_biased=True) as probe:
        run(probe, model, range(6), (8,))
        state = probe.state_dict()
    with attached(model, allow_biased=True, per_example="auto", verbose=True) as probe:
        probe.load_state_dict(state)
        assert not probe._mechanism.measures_pairs
        run(probe, model, range(6, 12), (8,))
        reading = probe.reading()
    assert (reading.windows, reading.u, reading.is_biased) == (6, 1.0, False)
    assert "windows have several pieces again" not in capsys.readouterr().err


def test_a_biased_reading_ends_the_first_windows_only_by_its_upper_end() -> None:
    """The lower end is too large, so that it leaves nothing to conclude."""
    model = small_model()
    with attached(model) as probe:
        run(probe, model, range(20), (4, 4))
        known = replace(probe.reading(), status="resolved", b_simple=400.0, low=300.0, high=500.0)
    for units, sound, biased in ((8.0, True, False), (4096.0, True, True)):
        reading = replace(known, units_per_window=units)
        assert allows_verdict(reading) == sound
        assert allows_verdict(replace(reading, is_biased=True)) == biased


def test_a_window_that_is_dropped_says_nothing_of_the_others() -> None:
    model = small_model()
    with attached(model, allow_biased=True, log_every=1) as probe:
        run(probe, model, range(60), (8,))
        state = probe.state_dict()
    with attached(model, log_every=1) as resumed:
        resumed.load_state_dict(state)
        before = resumed.reading()
        run(resumed, model, range(60, 61), (8,))  # a single piece, which shows nothing here
        after = resumed.reading()
    assert (after.windows, after.is_biased) == (before.windows, True) == (30, True)
    assert after.b_simple == pytest.approx(before.b_simple, rel=0.05)  # it is one window older


def test_the_log_has_the_norms_of_both_windows_of_a_pair() -> None:
    model, sink = small_model(), Recording()
    with attached(model, allow_biased=True, log_every=10, sinks=[sink]) as probe:
        run(probe, model, range(20), (8,), factor=10.0)
    model = small_model()
    norms = []
    for window in range(10, 20):
        ((x, y),) = pieces_of(8, seed=window)
        grads = torch.autograd.grad(10.0 ** (window % 2) * mean_loss(model, x, y), list(model.parameters()))
        norms.append(float(torch.nn.utils.get_total_norm(grads)))
    last = sink.of_kind("reading")[-1]
    assert last["metrics"]["grad/norm"] == pytest.approx(sum(norms) / 10, rel=1e-5)


def test_pairs_give_no_lower_bound() -> None:
    """SGD that hovers about a minimum: ⟨G₁, G₂⟩ is −|G|² on average, so that a bound from it is none."""
    model = torch.nn.Linear(16, 1, bias=False, dtype=torch.float64)
    generator = torch.Generator().manual_seed(0)
    rate, exact = 0.05, []
    with attached(model, allow_biased=True, log_every=10**6, groups="parameters") as probe:
        for _ in range(1200):
            noise = torch.randn(4, 16, generator=generator, dtype=torch.float64)
            exact.append(float(model.weight.detach().square().sum()))
            with probe.piece(units=4):
                (model.weight.square().sum() / 2 + (model.weight * noise.mean(0)).sum()).backward()
            probe.step()
            with torch.no_grad():
                model.weight -= rate * model.weight.grad  # type: ignore[operator]
            model.zero_grad()
        reading = probe.reading()
    true = 16 / (sum(exact[400:]) / 800)  # tr Σ of one unit is 16
    assert true > 16
    assert reading.status in ("unresolved", "upper_bound")
    assert reading.low is None or reading.low <= 0
    assert "hides |G|²" in reading.reason
    assert reading.metrics()["gns/b_simple_low"] in (None, 0.0)
    assert reading.average is None or reading.average.status != "lower_bound"
    assert all(group.status != "lower_bound" for group in reading.groups.values())
    assert reading.grad_sq is not None
    assert not math.isnan(reading.grad_sq)
