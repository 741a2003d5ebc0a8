"""What a noise scale means for a batch: the trade-off, the verdict in words, and what would make it known better."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest
from sonde.batch_size.stats.critical_batch import (
    Estimate,
    Verdict,
    advise,
    batch_kind,
    critical,
    judge_batch,
    steps_and_examples,
    windows_needed,
)
from sonde.batch_size.stats.proxy import FACTORS, OF_BRANCHES, Range, proxy_in_words

ADAMW = "Adam or AdamW (β = 0.9)"


@pytest.mark.parametrize("batch", [1, 32, 500, 10_000])
def test_trade_off_equation(batch: float) -> None:
    cost = steps_and_examples(batch, 500)
    assert (cost.steps - 1) * (cost.examples - 1) == pytest.approx(1)
    assert steps_and_examples(500, 500).steps == steps_and_examples(500, 500).examples == 2


@pytest.mark.parametrize(("batch", "critical"), [(0, 1), (-1, 1), (1, 0), (math.inf, 1), (1, math.nan)])
def test_trade_off_refuses(batch: float, critical: float) -> None:
    with pytest.raises(ValueError, match="positive and finite"):
        steps_and_examples(batch, critical)


@pytest.mark.parametrize("batch", [0, -1, math.inf, math.nan])
def test_no_verdict_on_a_batch_that_cannot_be(batch: float) -> None:
    with pytest.raises(ValueError, match=r"batch must be positive and finite, got .*: pass the units of one"):
        judge_batch(batch, unit="images", now=Estimate(30, 20, 40))


WIDE = math.inf


def known(low: float, high: float) -> Estimate:
    """Two-sided, with its value in the middle of the logs; or a bound."""
    return Estimate(math.sqrt(low * high) if low and high < math.inf else None, low, high)


def verdict(batch: float, now: Estimate, **facts: Any) -> Verdict:
    return judge_batch(batch, unit="images", now=now, **facts)


@pytest.mark.parametrize(
    ("batch", "low", "high", "kind"),
    [
        (128, 330.0, 520.0, "too_small"),
        (400, 330.0, 520.0, "about_right"),
        (650, 330.0, 520.0, "about_right"),
        (2000, 330.0, 520.0, "too_large"),
        (200, 330.0, 520.0, "about_right_or_too_small"),
        (900, 330.0, 520.0, "about_right_or_too_large"),
        (400, 20.0, 6000.0, "unknown"),
        (32, 100.0, WIDE, "too_small"),
        (64, 100.0, WIDE, "about_right_or_too_small"),
        (400, 100.0, WIDE, "unknown"),
        (400, 0.0, 100.0, "too_large"),
        (64, 0.0, 100.0, "about_right_or_too_large"),
        (32, 0.0, 100.0, "unknown"),
        (1, 0.2, 0.4, "about_right"),  # no batch has less than one unit
        (1, 0.2, 4.0, "about_right_or_too_small"),
    ],
)
def test_a_verdict_names_all_that_the_range_allows(batch: float, low: float, high: float, kind: str) -> None:
    """A batch is about right within a factor of 2 of the critical batch size."""
    assert batch_kind(batch, Range(None, low, high)) == kind


@pytest.mark.parametrize(
    ("batch", "low", "high", "optimizer", "kind", "headline"),
    [
        # 0.053 to 1.8 times the noise scale, 0.1 to 20 times, 1.8 to 3 times
        (8, 330.0, 520.0, ADAMW, "too_small", "8 images is small: B_crit is 240 images [21.8 – 758], from a noise"),
        (2000, 330.0, 520.0, ADAMW, "too_large", "from a noise scale of 414 images [330 – 520]."),
        (64, 330.0, 520.0, ADAMW, "unknown", "64 images may be too small, about right or too large"),
        (16, 330.0, 520.0, "Lion (β = 0.9)", "too_small", "B_crit is 33 to 10,400 images"),
        (64, 330.0, 520.0, "", "about_right_or_too_small", "B_crit is 33 to 10,400 images"),
        (4, 200.0, WIDE, ADAMW, "too_small", "B_crit is more than 10.6 images, from a noise scale of more than 200"),
        (400, 0.0, 100.0, ADAMW, "too_large", "B_crit is less than 180 images, from a noise scale of less than 100"),
    ],
)
def test_a_verdict_rests_on_the_critical_batch_size(
    batch: float, low: float, high: float, optimizer: str, kind: str, headline: str
) -> None:
    got = verdict(batch, known(low, high), optimizer=optimizer, reason="a reason", advice="measure more")
    assert (got.kind, got.kind_now) == (kind, kind)
    assert headline in got.headline
    assert "run like this one" not in got.headline + got.detail
    decided = kind in ("too_small", "too_large")
    assert ("To know the noise scale better, measure more." in got.detail) == (not decided)
    assert got.advice == ("" if decided else "measure more")
    assert got.detail.endswith(proxy_in_words("images", optimizer, "euclidean", of_run=False))


def test_prompts_have_the_factor_of_policies() -> None:
    now = known(60.0, 70.0)
    for unit in ("prompts", "effective prompts"):
        assert "8 cases of GRPO" not in judge_batch(16, unit=unit, now=now, optimizer="Muon (β = 0.95)").detail
        said = judge_batch(16, unit=unit, now=now, optimizer=ADAMW)
        assert said.kind == "too_small"
        assert f"B_crit is 149 {unit} [1" in said.headline
    assert judge_batch(16, unit="images", now=now, optimizer=ADAMW).kind == "unknown"


@pytest.mark.parametrize(
    ("batch", "low", "high", "name"),
    [
        (4, 330.0, 520.0, "twice the batch"),
        (2000, 330.0, 520.0, "half the batch"),
        (12, 330.0, 520.0, "twice the batch"),
        (1000, 330.0, 520.0, "half the batch"),
    ],
)
def test_a_trade_off_reaches_as_far_as_the_range(batch: float, low: float, high: float, name: str) -> None:
    got = verdict(batch, known(low, high), optimizer=ADAMW).detail
    reach = critical(known(low, high), OF_BRANCHES[ADAMW])
    other = {"twice the batch": 2 * batch, "half the batch": batch / 2}[name]
    ends = (reach.low, reach.high)
    steps = [steps_and_examples(other, b).steps / steps_and_examples(batch, b).steps for b in ends]
    units = [steps_and_examples(other, b).examples / steps_and_examples(batch, b).examples for b in ends]
    percents = " to ".join(f"{100 * part:.0f}" for part in sorted(steps if other > batch else units))
    times = " to ".join(dict.fromkeys(f"{part:.2g}" for part in sorted(units if other > batch else steps)))
    what, costs = ("steps", "images") if other > batch else ("images", "steps")
    assert f"{percents} % of the {what}" in got, got
    assert f"{times} times the {costs}" in got, got
    assert name in got[:40].lower()


def test_the_run_and_the_steps_that_follow_have_a_sentence_each() -> None:
    """The average is 34.5 over the run, the noise scale is 1,510 now; the study's factors are 1.5 and 0.58."""
    of_run = known(28.0, 42.5)
    got = verdict(32, known(1100.0, 2070.0), of_run=of_run, n_steps=300, optimizer=ADAMW)
    assert (got.kind, got.kind_now) == ("about_right_or_too_small", "too_small")
    assert got.headline == (
        "For a run like this one, the batch of 32 images is about right or too small: B_crit is 51.7 images "
        "[28.2 – 98.9], from an average noise scale of 34.5 images [28 – 42.5]. From here on, it is small: B_crit is "
        "875 images [78.8 – 2,801], from a noise scale of 1,509 images [1,100 – 2,070] now."
    )
    in_run, from_here_on, *_ = got.detail.split(". ")
    # Advice about the whole run rests on the average alone.
    reach = critical(of_run, FACTORS[ADAMW, "euclidean"])
    steps = [steps_and_examples(64, b).steps / steps_and_examples(32, b).steps for b in (reach.high, reach.low)]
    assert in_run.startswith("In a run like this one, twice the batch would need ")
    assert f"{100 * steps[0]:.0f} to {100 * steps[1]:.0f} % of the steps" in in_run
    assert from_here_on.startswith("From here on, twice the batch would need ")
    assert got.in_short == "for a run like this one, the batch is about right or too small; from here on, it is small"
    undecided = verdict(32, known(110.0, 207.0), of_run=of_run, n_steps=300, optimizer=ADAMW)
    assert undecided.in_short == "for a run like this one, the batch is about right or too small"


def test_trainings_of_the_study_are_quoted_beside_an_average_alone() -> None:
    """Branches are quoted beside the noise scale now."""
    facts: dict[str, Any] = {"n_steps": 300, "optimizer": "SGD (β = 0.9)"}
    now, of_run = known(110.0, 207.0), known(28.0, 42.5)
    said = [verdict(32, now, of_run=average, **facts).detail for average in (of_run, None)]
    assert ["times the run's average" in text for text in said] == [True, False]
    assert all("0.29 to 4.9 times B_simple now" in text for text in said)
    assert "B_simple (metric 'sign') is a proxy" in verdict(32, now, of_run=of_run, metric="sign", **facts).detail


@pytest.mark.parametrize(
    ("early", "reason"),
    [
        ({"n_steps": 12}, "no batch is judged before step 100"),
        ({"n_steps": 99}, "no batch is judged before step 100"),
        ({"n_steps": 99, "first_step": 501}, "no batch is judged before step 600"),
        ({"n_steps": 5000, "warms_up": True}, "the learning rate is still rising"),
    ],
)
def test_there_is_no_verdict_in_the_first_steps_and_in_warm_up(early: dict[str, Any], reason: str) -> None:
    facts = {"of_run": known(80.0, 120.0)}
    got = verdict(32, known(110.0, 207.0), **facts, **early, advice="train about 8 more steps")
    assert (got.kind, got.kind_now, got.in_short) == ("unknown", "unknown", "")
    assert got.headline == "No verdict yet on the batch of 32 images."
    assert reason in got.detail[:1].lower() + got.detail[1:]
    assert "Train about" not in got.detail  # more steps than that are needed
    assert got.advice == ""
    assert not any(word in got.detail for word in ("small", "large", "twice"))
    assert verdict(8, known(110.0, 207.0), **facts, n_steps=100, optimizer=ADAMW).kind == "too_small"


def test_a_run_whose_parameters_have_changed_is_judged_from_there_on() -> None:
    got = verdict(32, known(110.0, 207.0), of_run=known(28.0, 42.5), n_steps=300, first_step=1501, optimizer=ADAMW)
    assert got.headline.startswith("For a run like this one from step 1,501 on, the batch of 32 images is about right")
    assert got.detail.startswith("In a run like this one from step 1,501 on, twice the batch")
    assert got.in_short.startswith("for a run like this one from step 1,501 on, the batch")


def test_no_noise_is_no_verdict() -> None:
    got = verdict(32, Estimate(0.0, 0.0, 0.0), n_steps=500)
    assert got.kind == "unknown"
    assert "no gradient noise was seen" in got.headline


@pytest.mark.parametrize("batch", [1.9, 1.5])
def test_no_batch_below_one_unit_is_advised(batch: float) -> None:
    said = judge_batch(batch, unit="images", now=Estimate(0.018, 0.016, 0.02), optimizer=ADAMW)
    assert said.kind == "too_large"
    assert "A batch of 1 of the images would need" in said.detail


BARELY = 0.45
"""Standard error of log B at which |G|² is just distinguished from 0."""


@pytest.mark.parametrize(
    ("log_error", "n_windows", "expected"),
    [
        (0.05, 100, 0),
        (0.2 / 1.96, 100, 0),
        (0.2 / 1.96 * 2, 100, 300),  # four times the windows in all
        (0.2 / 1.96 * math.sqrt(2), 40, 40),  # twice
        (None, 40, None),
        (2.0, 40, None),  # |G|² may be anything
        (0.3, 0, None),
    ],
)
def test_windows_needed(log_error: float | None, n_windows: int, expected: int | None) -> None:
    assert windows_needed(log_error, n_windows) == expected


def advice(status: str, log_error: float | None, **known: Any) -> str:
    facts: dict[str, Any] = {"n_steps": 2000, "every": 1.0} | known
    return advise(status, log_error, **facts)


def number_in(text: str) -> float:
    [found] = re.findall(r"[\d.]+", text)
    return float(found)


def test_nothing_is_advised_before_the_first_step_or_where_the_number_is_known_well() -> None:
    assert advice("unresolved", None, n_steps=0) == ""
    for log_error in (None, 0.0, 0.1, 0.25):
        assert advice("resolved", log_error) == ""
    assert advice("resolved", 0.3) != ""


@pytest.mark.parametrize("every", [2, 10, 500])
@pytest.mark.parametrize("log_error", [0.5, 0.8, 1.4])
def test_denser_windows_come_first_and_are_enough(every: int, log_error: float) -> None:
    """The variance of the averages is in proportion to N, one window in N being measured."""
    got = advice("lower_bound", log_error, every=float(every))
    match = re.fullmatch(r"measure one window in (\d+) \(every=(\d+), or a larger budget=\)", got)
    if match is None:
        assert got == "measure every window (every=1)"
        assert log_error * math.sqrt(2 / every) > BARELY or every == 2  # one in 2 would not be enough, or is now
        return
    denser = int(match[1])
    assert match[1] == match[2]
    assert 1 <= denser < every
    assert log_error * math.sqrt(denser / every) <= BARELY
    # It is the sparsest pace that is; but a remedy of less than a half more would change little.
    assert log_error * math.sqrt((denser + 1) / every) > BARELY or every / (denser + 1) < 1.5


def test_nothing_is_computed_from_the_first_steps() -> None:
    """Runs of 30 steps would be told 43, 70 or 88 more."""
    for status in ("resolved", "lower_bound"):
        assert advice(status, 0.5, n_steps=99) == advice("lower_bound", None)
        assert advice(status, 0.5, n_steps=100).startswith("train about ")
    assert advice("lower_bound", 0.5, n_steps=30, every=4.0) == "measure every window (every=1)"


@pytest.mark.parametrize("log_error", [0.5, 0.6, 0.89])
def test_more_training_is_enough(log_error: float) -> None:
    """The variance is in proportion to one over the steps, as what counts as now grows with the run."""
    got = advice("lower_bound", log_error)
    assert re.fullmatch(r"train about \d+ more steps", got)
    more = number_in(got)
    assert log_error * math.sqrt(2000 / (2000 + more)) <= BARELY
    assert more == pytest.approx(2000 * max((log_error / BARELY) ** 2 - 1, 0.5), rel=0.1)
    assert more % 100 == 0  # two digits


def test_more_units_where_training_would_take_too_long() -> None:
    """The relative variance of |G|² is in proportion to one over the square of the units, where noise is large."""
    got = advice("lower_bound", 1.2)
    assert re.fullmatch(r"use about [\d.]+ times as many units in each window", got)
    assert number_in(got) == pytest.approx(1.2 / BARELY, abs=0.06)


def test_of_an_upper_bound_the_noise_needs_more_pieces() -> None:
    """The relative variance of tr Σ from m pieces is in proportion to 1/(m − 1)."""
    got = advice("upper_bound", 1.2)
    assert re.fullmatch(r"split each batch into [\d.]+ times as many pieces, or use as many times the units .*", got)
    for pieces in (2, 4, 32):
        assert 1.2 * math.sqrt((pieces - 1) / (number_in(got) * pieces - 1)) <= BARELY * 1.01


@pytest.mark.parametrize("log_error", [None, 2.0, 30.0])
@pytest.mark.parametrize("status", ["lower_bound", "upper_bound", "unresolved"])
def test_nothing_is_computed_from_a_signal_that_may_be_anything(status: str, log_error: float | None) -> None:
    got = advice(status, log_error)
    assert got.startswith("train on, or ")
    unknown = "tr Σ" if status == "upper_bound" else "|G|²"
    assert got.endswith(f"; how much cannot be computed before {unknown} is known better")
    assert not any(letter.isdecimal() for letter in got)
