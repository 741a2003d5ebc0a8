"""A batch schedule in a plain loop, where B_simple is known."""

from __future__ import annotations

import re
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import sonde
from sonde.batch_size.stats.averages import FixedWeights
from sonde.schedule.batch_schedule import BatchSchedule
from sonde.schedule.stats.batch_rule import Decision
from tests.schedule.noisy_gradients import B_SIMPLE, DIMS, ROWS, Linear, attached, micro_batches, train
from tests.schedule.replays import now_from, replayed

OPTIONS: dict[str, Any] = {"smallest": 2, "largest": 8, "ratio": 2.0, "verbose": False}
"""Batches of 8, 16 and 32 rows. The last takes B_simple > 1.1 · 32 / 2 = 17.6 rows."""


def made(**options: Any) -> tuple[Linear, Any, sonde.NoiseScaleProbe]:
    model = Linear()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    return model, optimizer, attached(model, optimizer, **options)


def by_hand(pieces: list[Tensor]) -> tuple[float, float]:
    """tr Σ and |G|² of one window of equal pieces, whose gradients are the means of their rows: in float64."""
    gradients = torch.stack([x.double().mean(0) for x in pieces])
    n, small, big = len(pieces), gradients.square().sum(1).mean(), gradients.mean(0).square().sum()
    return float((small - big) / (1 / ROWS - 1 / (n * ROWS))), float((n * big - small) / (n - 1))


@pytest.mark.parametrize("every", [1, 3])
def test_the_batch_grows_and_the_noise_scale_stays_right(every: int) -> None:
    """Each measured window gives its own tr Σ and |G|² by hand, whatever its batch; B_simple is in its interval."""
    model, optimizer, probe = made(every=every)
    schedule, n_checked = BatchSchedule(probe, **OPTIONS), 0

    def check(window: int, pieces: list[Tensor]) -> None:
        nonlocal n_checked
        was_measured, solved = probe.reading().windows > n_checked, probe.window()
        if was_measured:
            n_checked += 1
            assert solved is not None
            found = solved.total.trace_cov, solved.total.grad_sq
            # fp32 gradients; |G|² is a difference of squares of about its size times B_simple.
            assert found == pytest.approx(by_hand(pieces), rel=1e-4, abs=1e-4)

    counts = train(model, optimizer, schedule, range(200), check)
    assert sorted(set(counts)) == [2, 4, 8]
    assert counts == sorted(counts)
    assert n_checked == pytest.approx(200 / every, abs=2)
    reading = probe.reading()
    assert reading.low is not None
    assert reading.low < B_SIMPLE < (reading.high or 0.0)
    assert schedule.last is not None
    assert schedule.last.now.units_per_micro_batch == ROWS


def test_the_log_replays_every_decision(tmp_path: Path) -> None:
    changes: list[Decision] = []
    model, optimizer, probe = made(log=str(tmp_path))
    schedule = BatchSchedule(probe, **OPTIONS, on_change=changes.append)
    counts = train(model, optimizer, schedule, range(120))
    probe.close()
    logged = [own for own in sonde.read_run(tmp_path).own if "schedule/batch" in own.metrics]
    found = replayed(schedule.batch_rule, [now_from(own.metrics) for own in logged])
    assert [d.state.micro_batches for d in found] == [own.metrics["schedule/micro_batches"] for own in logged]
    # The count of a window is that of the last decision before it.
    by_window = {own.window: d.state.micro_batches for own, d in zip(logged, found, strict=True)}
    assert counts[10:] == [by_window[10 * (window // 10)] for window in range(10, 120)]
    assert [d.state for d in found if d.changed] == [d.state for d in changes]
    assert [d.state.micro_batches for d in changes] == [4, 8]
    assert "<h2>Batch schedule" in sonde.write_report(tmp_path).read_text()


@pytest.mark.parametrize("interrupted", [40, 45])
def test_a_run_that_is_resumed_goes_on_as_one_that_was_not_interrupted(interrupted: int) -> None:
    """Also where a decision is due right after the checkpoint."""

    def run(parts: list[range]) -> tuple[list[int], Tensor, Any]:
        counts: list[int] = []
        weights: Any = None
        states: Any = None
        for windows in parts:
            model, optimizer, probe = made()
            schedule = BatchSchedule(probe, **OPTIONS, rule="linear")
            rate = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.999)
            schedule.scale_lr(optimizer, rate)
            if states is not None:
                model.load_state_dict(weights)
                probe.load_state_dict(states[0])
                schedule.load_state_dict(states[1])
                rate.load_state_dict(states[2])
                optimizer.load_state_dict(states[3])
            counts += train(model, optimizer, schedule, windows, lambda window, pieces: schedule.step_lr(rate))  # noqa: B023
            states = (probe.state_dict(), schedule.state_dict(), rate.state_dict(), optimizer.state_dict())
            weights = model.state_dict()
            probe.close()
            schedule.close()
        assert rate.last_epoch == sum(counts) // 2
        return counts, model.weight.detach(), schedule.last

    whole, in_parts = run([range(120)]), run([range(interrupted), range(interrupted, 120)])
    assert in_parts[0] == whole[0]
    assert len(set(whole[0])) == 3
    assert torch.equal(in_parts[1], whole[1])
    assert in_parts[2] == whole[2]


@pytest.mark.parametrize("every", [1, 2])
@pytest.mark.parametrize(
    ("given", "most"),
    [
        (lambda window, said: 2, 5),  # windows with the changed rate
        (lambda window, said: 4, 5),
        (lambda window, said: said if window < 60 else 2, 15),  # noticed at the next decision
        (lambda window, said: said if window % 3 else 1, None),  # epochs whose last window is short
    ],
)
def test_windows_of_another_size_than_said_are_refused(given: Any, most: int | None, every: int) -> None:
    """Their steps would have a rate that is scaled for another batch."""
    model, optimizer, probe = made(every=every)
    said: list[int] = []

    def noted(window: int, n: int) -> int:
        said.append(n)
        return int(given(window, n))

    refused = pytest.raises(ValueError, match=r"the last 5 measured ones had not; the last one had .* rows: read sch")
    with probe, refused if most else nullcontext():
        train(model, optimizer, BatchSchedule(probe, **OPTIONS), range(120), given=noted)
    n_wrong = sum(n != given(window, n) and n > 2 for window, n in enumerate(said))
    assert n_wrong <= every * most if most else said[-1] == 8


def test_a_larger_micro_batch_is_as_good_as_more_of_them() -> None:
    """One piece a window, measured by single examples: what is compared are rows."""
    model = torch.nn.Linear(DIMS, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with attached(model, optimizer, per_example="always") as probe:
        schedule = BatchSchedule(probe, **OPTIONS)
        for window in range(100):
            model(torch.cat(micro_batches(window, schedule.micro_batches))).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert schedule.micro_batches == 8


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"smallest": 8, "largest": 4}, "largest must be at least the present 8 micro-batches"),
        ({"largest": 4.5}, "micro-batches must be a whole number from 1 up, got 4.5"),
        ({"every": 0}, "every must be a whole number of windows from 1 up"),
        ({"rule": "square"}, "the rule of the rate must be sqrt"),
        ({"rule": {2: 1.0}}, "the rule of the rate must be sqrt"),
        ({"probe": None}, "as sonde.attach has returned it, got None: attach first"),
    ],
)
def test_bad_arguments(options: dict[str, Any], words: str) -> None:
    _, _, probe = made()
    with pytest.raises(ValueError, match=re.escape(words)):
        BatchSchedule(**({"probe": probe} | OPTIONS | options))
    probe.close()


def test_a_probe_at_fixed_weights_is_refused() -> None:
    options = sonde.NoiseScaleOptions(unit="rows", per_example="never")
    with (
        sonde.NoiseScaleProbe(Linear(), None, options, fixed_weights=FixedWeights(), verbose=False) as probe,
        pytest.raises(ValueError, match="and not at fixed weights, which have no windows"),
    ):
        BatchSchedule(probe, largest=4)


def test_a_resumed_run_whose_micro_batches_have_another_size_is_refused() -> None:
    model, optimizer, probe = made()
    schedule = BatchSchedule(probe, **OPTIONS)
    train(model, optimizer, schedule, range(41))
    model, optimizer, resumed = made()
    again = BatchSchedule(resumed, **OPTIONS)
    resumed.load_state_dict(probe.state_dict())
    again.load_state_dict(schedule.state_dict())
    with probe, resumed, pytest.raises(ValueError, match="another size than in the checkpoint, make a new schedule"):
        train(model, optimizer, again, range(41, 50), given=lambda window, said: 2 * said)
    assert resumed.n_windows == 46


def test_states_of_others_are_refused() -> None:
    model, optimizer, probe = made()
    schedule = BatchSchedule(probe, **OPTIONS)
    train(model, optimizer, schedule, range(20))
    state = schedule.state_dict()
    _, _, other = made()
    with pytest.raises(ValueError, match="saved after 20 windows, and the probe has seen 0: load the probe's state"):
        BatchSchedule(other, **OPTIONS).load_state_dict(state)
    with pytest.raises(ValueError, match=r"saved with ratio 2\.0, but this probe has ratio 3\.0"):
        BatchSchedule(other, **(OPTIONS | {"ratio": 3.0})).load_state_dict(state)
    with pytest.raises(ValueError, match="is damaged"):
        schedule.load_state_dict(state | {"json": state["json"].replace("4", "5")})
    probe.close()
    other.close()


def test_a_schedule_that_is_new_in_a_resumed_run_begins_there() -> None:
    """Windows before it are neither units that it has seen, nor steps that a schedule of the rate is owed."""
    model, optimizer, probe = made()
    train(model, optimizer, BatchSchedule(probe, **OPTIONS), range(20))
    _, optimizer, resumed = made()
    schedule, rate = BatchSchedule(resumed, **OPTIONS), torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99)
    resumed.load_state_dict(probe.state_dict())
    assert schedule.micro_batches == 2
    schedule.step_lr(rate)
    assert rate.last_epoch == 0
    assert schedule.last is None
    probe.close()
    resumed.close()
