"""Several runs of one model as one: an average by hand, contradictions said, runs of different models refused."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest

from sonde.decision.decide import decide
from sonde.decision.facts import FROM_HERE_ON, RUN_LIKE_THIS, Reached
from sonde.decision.pool import average_of, pool
from sonde.decision.time_curve import TimeCurve, Timing
from sonde.stats.intervals import RatioInterval, unresolved
from tests.decision.known import facts, resolved, tried


def test_three_runs_are_averaged_as_dersimonian_and_laird_do() -> None:
    """By hand, in logarithms y with errors s: 4 ± 0.1, 4.2 ± 0.2, 5 ± 0.1.

    Weights 1/s² are 100, 25, 100, and their mean is (400 + 105 + 500)/225 = 4.466667. Q = 100·0.466667² +
    25·0.266667² + 100·0.533333² = 52, so τ² = (52 − 2)/(225 − 20,625/225) = 50/133.3333 = 0.375. Weights 1/(s² + τ²)
    are 2.597403, 2.409639, 2.597403, 7.604444 together: their mean is (10.389610 + 10.120482 + 12.987013)/7.604444 =
    4.404938, with an error of 1/√7.604444 = 0.362631.
    """
    known = [
        RatioInterval("resolved", math.exp(y - 1.96 * s), math.exp(y + 1.96 * s), ratio=math.exp(y))
        for y, s in ((4.0, 0.1), (4.2, 0.2), (5.0, 0.1))
    ]
    found = average_of(known)
    assert found.ratio == pytest.approx(math.exp(4.404938), rel=1e-5)
    assert found.low == pytest.approx(math.exp(4.404938 - 1.96 * 0.362631), rel=1e-5)
    assert found.high == pytest.approx(math.exp(4.404938 + 1.96 * 0.362631), rel=1e-5)


def test_runs_that_agree_are_known_better_together() -> None:
    """Four runs of one error: half the error."""
    one = resolved(100.0, math.exp(1.96 * 0.2))
    found = average_of([one] * 4)
    assert (found.ratio, found.low) == (pytest.approx(100.0), pytest.approx(100.0 * math.exp(-1.96 * 0.1)))


def test_bounds_hold_together_where_no_run_has_both_ends() -> None:
    low, high = (lambda x: RatioInterval("lower_bound", x, math.inf)), (lambda x: RatioInterval("upper_bound", 0.0, x))
    assert average_of([low(10.0), low(30.0)]) == low(30.0)
    assert average_of([high(10.0), high(30.0)]) == high(10.0)
    both = average_of([low(10.0), high(30.0)])
    assert (both.low, both.high, both.ratio) == (10.0, 30.0, None)
    assert average_of([low(10.0), resolved(100.0)]).ratio == pytest.approx(100.0)
    contradicting = [low(100.0), high(20.0)]
    for nothing in ([], [unresolved("")], contradicting):
        assert average_of(nothing).status == "unresolved"


@pytest.mark.parametrize(
    ("other", "what"),
    [
        ({"unit": "tokens"}, "different units: rows and tokens"),
        ({"model": "5 parameters"}, "different models: 1,000 parameters and 5 parameters"),
        ({"optimizer": ""}, "different optimizers: Adam or AdamW (β = 0.9) and none"),
        ({"metric": "sign"}, "different metrics: euclidean and sign"),
    ],
)
def test_runs_that_do_not_belong_together_are_refused(other: dict[str, Any], what: str) -> None:
    one = facts(16, 100.0, model="1,000 parameters")
    with pytest.raises(ValueError, match="one decision needs runs of one model, got different") as error:
        pool([one, one, dataclasses.replace(one, **other)])
    assert what in str(error.value)
    assert "sonde compare" in str(error.value)


def test_one_run_is_itself() -> None:
    one = facts(16, 100.0)
    assert pool([one]) is one


def test_a_contradiction_is_said_and_the_range_covers_it() -> None:
    runs = [facts(16, 100.0, name="a"), facts(64, 300.0, name="b")]
    pooled = pool(runs)
    assert pooled.average.low is not None
    assert pooled.average.high is not None
    assert pooled.average.low < 105
    assert pooled.average.high > 285
    [said] = [note for note in decide(pooled).notes if "contradict" in note]
    assert "one says a noise scale of 95.2 to 105 rows, another 286 to 315" in said
    agree = pool([facts(16, 100.0), facts(64, 102.0)])
    assert not any("contradict" in note for note in agree.notes)


def test_the_run_that_is_gone_on_from_is_named() -> None:
    curve = tried((16, 0.010), (64, 0.012), (256, 0.020))
    runs = [facts(16, noise, 900.0, name=name, curve=curve) for name, noise in (("a", 100.0), ("b", 300.0))]
    assert decide(pool(runs)).sentence.endswith(" of the time. Change the run b too, from here on.")
    assert decide(runs[0]).sentence.endswith(" of the time. Change this run too, from here on.")


def test_four_logs_of_one_model_give_one_next_run() -> None:
    """The run that came down to the common loss first is gone on from, and every log's time is a size of the curve."""
    times = {4: 0.0100, 8: 0.0104, 16: 0.0110, 64: 0.0150}
    reached = {4: 6000.0, 8: 4000.0, 16: 2800.0, 64: 1800.0}
    runs = [
        facts(
            batch,
            90.0,
            name=f"batch-{batch}",
            curve=TimeCurve((Timing(batch, 1, 1, times[batch]),)),
            reached=Reached(2.5, n, n * batch, n * times[batch]),
        )
        for batch, n in reached.items()
    ]
    found = decide(pool(runs))
    assert found.facts.name == "batch-64"
    assert found.facts.batch == 64
    lead = found.advice[RUN_LIKE_THIS]
    assert {plan.batch: plan.basis for plan in lead.plans}.items() >= {64.0: "measured"}.items()
    seconds = {plan.batch: plan.time.likely / plan.steps.likely for plan in lead.plans if plan.batch in times}
    assert {n: s / seconds[64] for n, s in seconds.items()} == {
        n: pytest.approx(times[round(n)] / 0.015) for n in seconds
    }
    note = "To the loss 2.500, which all runs reached: batch-4 at 4 rows: 6,000 steps, 1 min; batch-8 at 8 rows: "
    assert found.notes[0].startswith(note)
    assert found.notes[0].endswith("The next run goes on from batch-64.")


def test_without_a_loss_in_common_the_last_run_is_gone_on_from() -> None:
    runs = [facts(4, 90.0, name="a", reached=Reached(2.5, 10, 40, 1.0)), facts(8, 90.0, name="b")]
    pooled = pool(runs)
    assert (pooled.name, pooled.batch) == ("b", 8)
    assert pooled.notes == ("The runs have no loss in common, so the next run goes on from the last one, b.",)


def test_a_young_log_does_not_silence_the_others() -> None:
    assert pool([facts(4, 90.0, name="a"), facts(8, 90.0, name="b", warms_up=True)]).name == "a"


def test_a_trial_is_not_mixed_with_times_of_logs_and_the_least_end_of_memory_counts() -> None:
    log, trial = (
        TimeCurve((Timing(16, 1, 1, 0.5),)),
        dataclasses.replace(tried((16, 0.01), (64, 0.02)), too_large=256.0),
    )
    pooled = pool([facts(16, 90.0, curve=log), facts(16, 90.0, curve=trial), facts(16, 90.0)])
    assert pooled.curve == trial
    both = pool([facts(16, 90.0, curve=trial), facts(16, 90.0, curve=TimeCurve(trial.timings, 64.0))])
    assert both.curve is not None
    assert (both.curve.too_large, both.curve.largest) == (64.0, 16)


def test_effective_units_are_counted_as_the_batch_is_in_both_scopes() -> None:
    """Half of each batch counts: noise scales in effective units are doubled, once."""
    half = facts(16, 50.0, 80.0, effective=8.0)
    alone, pooled = half.scopes, pool([half, half]).scopes
    for scope in (RUN_LIKE_THIS, FROM_HERE_ON):
        assert alone[scope].known.ratio == pytest.approx({RUN_LIKE_THIS: 100.0, FROM_HERE_ON: 160.0}[scope])
        assert pooled[scope].known.ratio == pytest.approx(alone[scope].known.ratio)
