"""The decision: what is better at both ends of what is known is advised, and nothing else is."""

from __future__ import annotations

import dataclasses
import math
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sonde.decision.decide import Advice, Aim, Wanted, decide
from sonde.decision.facts import FROM_HERE_ON, RUN_LIKE_THIS, Facts
from sonde.decision.plans import Plan, Present
from sonde.decision.time_curve import TimeCurve, Timing
from sonde.decision.words import part_in_words
from sonde.stats.intervals import RatioInterval, unresolved
from tests.decision.known import (
    ADAMW,
    FLAT,
    SETTINGS,
    advised,
    curves,
    ends_of,
    every_split,
    facts,
    powers,
    resolved,
    tried,
)

# Against every plan that there is.


@st.composite
def trainings(draw: st.DrawFn) -> tuple[Facts, Wanted]:
    """All sizes are powers of two. The time of a step is known at its own size, or at several."""
    ranks, accumulation, micro, at_most = (draw(powers) for _ in range(4))
    batch, noise = micro * accumulation * ranks, math.exp(draw(st.floats(-1, 10)))
    known = resolved(noise, math.exp(draw(st.floats(0.01, 1))))
    known = draw(st.sampled_from([known, RatioInterval("lower_bound", noise, math.inf)]))
    curve = draw(st.none() | curves(micro, accumulation, ranks))
    more = {"optimizer": draw(st.sampled_from([ADAMW, "SGD (β = 0.9)", "Lion (β = 0.9)"])), "n_steps": 1000}
    more |= {"settings": draw(st.sampled_from([(), (SETTINGS | {"betas": [0.9, 0.95]},)])), "curve": curve}
    found = Facts("rows", float(batch), known, known, ranks=ranks, pieces=ranks * accumulation, **more)
    aims: list[Aim] = ["balanced", "cheapest", *(["fastest"] if curve else [])]  # type: ignore[list-item]
    return found, Wanted(aim=draw(st.sampled_from(aims)), ranks_at_most=at_most)


def sure_plans(known: Facts, wanted: Wanted, advice: Advice) -> dict[float, float]:
    """The middle, or worse, cost of each batch that is better at all ends, shared out in the best of all ways."""
    curve = known.curve or TimeCurve((Timing(known.micro_batch, known.accumulation, known.ranks, 1.0),))
    most = wanted.ranks_at_most or known.ranks
    now = Present(known.batch or 0, 1, known.micro_batch, known.accumulation, known.ranks, most, curve)
    critical, sure = advice.scope.critical, {}
    for size in {plan.batch for plan in advice.plans if plan.steps.likely >= 30}:
        far = wanted.aim == "balanced" and size > 1.5 * critical.likely
        costs = []
        for split in every_split(now, round(size), min(most, known.ranks) if far else most):
            price = split[0] / known.ranks if wanted.aim == "cheapest" else 1.0
            ends = [price * time for time in ends_of(now, critical, split, size)[1]]
            step, likely = now.curve.of_step(split[2], split[1], split[0])[0], max(ends)
            if critical.middle is not None:
                part = (1 + critical.middle / size) / (1 + critical.middle / now.batch)
                likely = price * part * step.high / now.step_time.low
            costs.append((max(ends), likely))
        if costs and min(costs)[0] < 1 and min(costs)[1] <= 0.9:
            sure[size] = min(costs)[1]
    return sure


@given(trainings())
@settings(max_examples=300, deadline=None, derandomize=True)
def test_what_is_better_at_both_ends_is_advised_and_nothing_else(of: tuple[Facts, Wanted]) -> None:
    known, wanted = of
    found = decide(known, wanted)
    for advice in found.advice.values():
        sure, best = sure_plans(known, wanted, advice), advice.best
        assert (best is None) == (not sure)
        if best is not None:
            as_fast = (1.25 if wanted.aim == "balanced" else 1.0) * min(sure.values())
            assert sure[best.batch] <= as_fast * (1 + 1e-9)
            assert not [n for n, cost in sure.items() if n < best.batch and cost < as_fast * (1 - 1e-9)]
            assert advice.maybe is None
        elif (maybe := advice.maybe) is not None:
            assert maybe.basis == "bounds"
            cost = maybe.better
            assert cost.high < 1  # whatever B_crit is: the time of a step alone is in doubt


@given(trainings())
@settings(max_examples=150, deadline=None, derandomize=True)
def test_a_decision_says_what_its_own_table_says(of: tuple[Facts, Wanted]) -> None:
    found = decide(*of)
    lead = found.leading
    assert lead is not None
    is_better = [p for p in lead.plans if p.time.high <= 0.9 and p is not lead.present and p.steps.likely >= 30]
    assert (found.kind == "time") == (lead.best is None and lead.maybe is not None)
    assert [change.plan for change in found.changes][:1] == [a.best for a in found.advice.values() if a.best][:1]
    assert all(change.how for change in found.changes)
    if lead.best is not None:
        assert found.kind == {-1: "smaller", 0: "reshape", 1: "larger"}[side(lead.best, lead.present)]
        assert f"{lead.best.whole_batch:,} rows" in found.sentence or "1 row" in found.sentence
    if found.kind == "keep" and of[1].aim == "fastest":
        assert is_better == []
    assert ("no other" in found.sentence) == (found.kind == "keep")


def side(plan: Plan, now: Plan) -> int:
    return (plan.whole_batch > now.whole_batch) - (plan.whole_batch < now.whole_batch)


@given(trainings(), st.sampled_from([1.0, 0.0]))
@settings(max_examples=200, deadline=None, derandomize=True)
def test_where_a_trial_is_asked_for_it_decides(of: tuple[Facts, Wanted], fullness: float) -> None:
    """With times of larger micro-batches on an empty device, or a full one, nothing is left in doubt by them."""
    known, wanted = of
    found = decide(dataclasses.replace(known, curve=None), dataclasses.replace(wanted, aim="balanced"))
    if found.kind != "time":
        return
    micro, accumulation, ranks = known.micro_batch, known.accumulation, known.ranks
    sizes = [micro * 2.0**k for k in range(-6, 14) if micro * 2.0**k >= 1]
    timings = [
        Timing(m, accumulation, n, accumulation * (1 - fullness + fullness * m / micro), 0.0)
        for m in sizes
        for n in {2**k for k in range(5)} | {ranks}
    ]
    tried_all = dataclasses.replace(known, curve=TimeCurve(tuple(timings)))
    then = decide(tried_all, dataclasses.replace(wanted, aim="balanced"))
    assert then.kind != "time"
    assert then.leading is not None
    assert found.leading is not None
    maybe, now = found.leading.maybe, found.leading.present
    if maybe is not None and maybe.micro_batch != now.micro_batch:
        assert then.kind != "keep" or (fullness == 0) == (maybe.micro_batch < now.micro_batch)


# By hand.


def test_one_device_is_told_what_a_larger_batch_costs_on_it() -> None:
    """A step of 64 was measured to take 1.11 times that of 16; it was taken for 4 times, and the batch was kept."""
    known = facts(16, 500.0)
    found = decide(known)
    assert found.kind == "time"
    assert found.leading is not None
    [of_64] = [plan for plan in found.leading.plans if plan.batch == 64]
    steps = of_64.steps.likely / 1000
    assert (of_64.better.likely, of_64.worse.likely) == (pytest.approx(steps), pytest.approx(4 * steps))
    assert "if this device is not full, and" in found.sentence
    assert (
        decide(known, logs=[Path("a")]).command == "sonde advise a --try -- python train.py --batch {batch} --out {out}"
    )
    measured = tried((16, 0.010), (64, 0.0111), (256, 0.020))
    after = decide(dataclasses.replace(known, curve=measured))
    assert after.kind == "larger"
    [of_64] = [plan for plan in after.leading.plans if plan.batch == 64] if after.leading else []
    assert (of_64.time.likely, of_64.basis) == (pytest.approx(1.11 * steps), "measured")


def test_a_batch_that_is_far_too_large_is_timed_first_too() -> None:
    found = decide(facts(4096, 50.0))
    assert found.kind == "time"
    assert found.leading is not None
    maybe = found.leading.maybe
    assert maybe is not None
    assert maybe.batch < 4096
    empty, full = re.findall(
        r"takes (.*?) times the time of 4,096 if this.*, and (.*?) of that time if it is", found.sentence
    )[0]
    assert float(empty.split()[0]) > 1
    assert "%" in full


def test_a_larger_micro_batch_on_the_same_rank_is_costed() -> None:
    """Batch 16 in micro-batches of 4 on one rank took 0.26 times as long as 4 of 1, where 1.01 was said."""
    known = facts(
        4, 40.0, pieces=4.0, curve=TimeCurve((Timing(1, 4, 1, 0.0041, 0.0001), Timing(4, 1, 1, 0.0012, 0.0001)))
    )
    found = decide(known)
    assert found.leading is not None
    [of_16] = [plan for plan in found.leading.plans if plan.batch == 16]
    assert (of_16.ranks, of_16.accumulation, of_16.micro_batch) == (1, 4, 4)
    step = 4 * 0.0011 + 0.0001
    assert of_16.time.likely == pytest.approx(of_16.steps.likely / 1000 * step / 0.0041)


def test_what_takes_half_the_time_at_its_worse_end_is_taken() -> None:
    """B_simple 40 with SGD (β = 0.9), batch 16, 16 ranks: 64 on 4 ranks was better in 3 of 3, and 16 was kept."""
    known = facts(16, 40.0, optimizer="SGD (β = 0.9)", settings=(), curve=tried((16, 0.01)))
    found = decide(known, Wanted(ranks_at_most=16))
    assert found.kind == "larger"
    assert found.leading is not None
    assert found.leading.best is not None
    assert found.leading.best.time.high < 0.75
    assert "no other is sure" not in found.sentence


def test_the_same_batch_is_cut_anew_where_that_alone_saves_time() -> None:
    """64 in 16 micro-batches of 4, on a device that is not full. It is beyond 1.5 B_crit, so no ranks are added."""
    curve = TimeCurve((Timing(4, 16, 1, 0.160, 0.0), Timing(64, 1, 1, 0.0101, 0.0)))
    known = facts(64, 20.0, pieces=16.0, curve=curve)
    for at_most in (1, 8):
        found = decide(known, Wanted(ranks_at_most=at_most))
        assert found.kind == "reshape"
        assert found.sentence.startswith(
            "Start the next run with the batch of 64 rows cut into micro-batches of 64 in place of 4: it takes 6"
        )
        assert found.leading is not None
        assert found.leading.best is not None
        assert (found.leading.best.whole_batch, found.leading.best.ranks) == (64, 1)


def test_a_batch_whose_statistics_enter_the_loss_is_not_cut_smaller() -> None:
    known = facts(64, 1.0, curve=tried((16, 0.010), (64, 0.040)))
    assert advised(known)[0] == "smaller"
    found = decide(dataclasses.replace(known, needs_batch="batch normalisation shares its statistics"))
    assert found.kind == "keep"
    assert found.leading is not None
    assert all(plan.micro_batch >= 64 for plan in found.leading.plans)
    assert "Micro-batches are not made smaller: batch normalisation shares its statistics." in found.notes


def test_the_steps_to_train_are_those_of_the_ranges_upper_end() -> None:
    found, *_ = decide(facts(64, 3000.0, curve=tried((64, 0.010), (256, 0.012), (1024, 0.020)))).changes
    steps = found.plan.steps
    assert steps.middle is not None
    assert steps.middle < steps.high
    assert found.how[-1].startswith(f"{math.ceil(steps.high)} steps learn what 1,000 steps do now, ")
    bound, *_ = decide(
        dataclasses.replace(facts(64, 3000.0, curve=FLAT), average=RatioInterval("lower_bound", 2000.0, math.inf))
    ).changes
    assert "steps learn what" in bound.how[-1]


def test_a_training_keeps_thirty_steps_and_goes_no_further_than_64_times_its_batch() -> None:
    far = tried(*((64 * 4.0**k, 0.01) for k in range(7)))
    for n_steps, most in ((150, 256.0), (100_000, 4096.0)):
        known = dataclasses.replace(facts(64, 1e7, curve=far), n_steps=n_steps)
        assert advised(known, aim="fastest")[1] == most
        assert all(each.plan.steps.likely >= 30 for each in decide(known, Wanted(aim="fastest")).changes)


def test_no_batch_is_advised_below_what_the_loss_needs() -> None:
    known = facts(64, 1.0, curve=tried((16, 0.010), (64, 0.040)))
    found = decide(known)
    assert found.kind == "smaller"
    assert any("--least" in note for note in found.notes)
    assert decide(known, Wanted(least=64)).kind == "keep"
    with pytest.raises(ValueError, match="--least 100 is more than the batch of this run, 64"):
        decide(known, Wanted(least=100))
    [least] = decide(known, Wanted(least=32)).changes
    assert least.plan.batch >= 32


@pytest.mark.parametrize(
    ("optimizer", "settings", "said"),
    [
        ("SGD (β = 0.9)", [{"name": "SGD", "lr": 0.1, "momentum": 0.9}], ""),
        ("", [], " Try rates for it: the log does not say the optimizer."),
        ("Adagrad", [{"name": "Adagrad", "lr": 0.1}], " Try rates for it: no rule covers Adagrad."),
    ],
)
def test_a_batch_without_a_rule_for_its_rate_is_said_to_be_so(
    optimizer: str, settings: list[dict[str, Any]], said: str
) -> None:
    known = facts(64, 30_000.0, curve=FLAT)
    found = decide(dataclasses.replace(known, optimizer=optimizer, settings=settings, branched=known.branched))
    assert found.kind == "larger"
    assert found.sentence.endswith(said or "from here on.")


NEARLY_FULL = tried((64, 0.010), (128, 0.012), (512, 0.060))
WIDE = RatioInterval("resolved", 4.0, 30_000.0, ratio=350.0)


@pytest.mark.parametrize(
    ("average", "now", "curve", "kind", "joined"),
    [
        (resolved(3000.0), resolved(5000.0), FLAT, "larger", ". Change this run too, from here on."),
        (resolved(3000.0), resolved(60.0), NEARLY_FULL, "larger", ". This run itself is best finished as it is."),
        (resolved(300.0), resolved(60_000.0), FLAT, "larger", ". From here on in this run, take a batch of "),
        (WIDE, resolved(60_000.0), NEARLY_FULL, "keep", ". From here on in this run, take a batch of "),
        (WIDE, WIDE, NEARLY_FULL, "keep", ""),
    ],
)
def test_next_run_and_this_run_are_joined_by_a_sentence(
    average: RatioInterval, now: RatioInterval, curve: TimeCurve, kind: str, joined: str
) -> None:
    found = decide(dataclasses.replace(facts(64, 1.0, curve=curve), average=average, now=now, n_steps=4000))
    assert found.kind == kind
    lead, here = found.advice[RUN_LIKE_THIS], found.advice[FROM_HERE_ON]
    if joined.startswith(". From") and here.best is not None:  # its costs are of other steps than those of the run
        assert f"{part_in_words(here.best.steps.over(here.present.steps))} the steps" in found.sentence
    assert (lead.best is None) == (kind == "keep")
    for other in (". Change this run", ". This run itself", ". From here on in"):
        assert (other in found.sentence) == joined.startswith(other)
    assert joined in found.sentence
    assert (here.best is not None) == (joined.startswith((". Change", ". From")))
    sizes = dict.fromkeys(plan.batch for plan in (lead.best, here.best) if plan)
    assert [(each.plan.batch, "steps learn what" in each.how[-1]) for each in found.changes] == [
        (n, True) for n in sizes
    ]


def test_from_here_on_alone_speaks_of_nothing_else() -> None:
    for changed in ({"batch_changed": True}, {"n_steps": None}):
        found = decide(facts(64, 3000.0, curve=tried((64, 0.010), (256, 0.012)), **changed))
        assert list(found.advice) == [FROM_HERE_ON]
        assert found.sentence.startswith("From here on, take a batch of 256 rows: it needs ")
        assert "next run" not in found.sentence


@pytest.mark.parametrize(
    ("early", "reason"),
    [
        ({"n_steps": 12}, "no batch is judged before step 100"),
        ({"n_steps": 99, "first_step": 501}, "no batch is judged before step 600"),
        ({"warms_up": True}, "the learning rate is still rising"),
        ({"now": unresolved(""), "average": unresolved(""), "reason": "too few windows"}, "too few windows"),
        ({"now": RatioInterval("upper_bound", 0.0, 0.0)}, "all pieces had the same gradient"),
        ({"batch": None}, "no batch size was given"),
    ],
)
def test_there_is_no_decision_before_something_is_known(early: dict[str, Any], reason: str) -> None:
    found = decide(dataclasses.replace(facts(32, 3000.0), **early))
    assert (found.kind, found.advice, found.changes, found.command) == ("wait", {}, (), "")
    assert found.sentence.startswith("No verdict yet")
    assert reason in found.reason[:1].lower() + found.reason[1:]


def test_a_wait_is_said_once_and_only_where_it_could_change_the_decision() -> None:
    known = dataclasses.replace(facts(64, 1.0, curve=NEARLY_FULL), wait="train about 120 more steps")
    found = decide(dataclasses.replace(known, now=WIDE, average=WIDE))
    assert (found.kind, found.wait) == ("keep", "train about 120 more steps")
    assert decide(dataclasses.replace(known, now=resolved(4e4), average=resolved(4e4))).wait == ""
