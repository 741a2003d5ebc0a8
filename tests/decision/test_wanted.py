"""What the user wants of a decision: an aim, a budget, ranks, a batch."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest

from sonde.decision.decide import Decision, Wanted, decide
from sonde.decision.facts import RUN_LIKE_THIS
from sonde.decision.time_curve import TimeCurve, Timing
from tests.decision.known import FLAT, advised, facts, tried


def test_a_budget_is_kept_at_the_worse_end() -> None:
    """The run as it is takes 640 s, which cost 64 at 360 an hour."""
    known = facts(64, 320.0, pieces=4.0, curve=TimeCurve((Timing(16, 4, 1, 0.64, 0.0),), 17))

    def money(budget: float) -> Decision:
        return decide(known, Wanted(budget=budget, cost_per_hour=360.0, ranks_at_most=64))

    fastest = [found.leading and (found.leading.best or found.leading.present) for found in map(money, (1e9, 100, 62))]
    assert all(
        plan and plan.money and plan.money.high <= most for plan, most in zip(fastest, (1e9, 100, 62), strict=True)
    )
    times = [plan.time.likely for plan in fastest if plan]
    assert times == sorted(times)
    assert times[0] < 0.2
    assert list(money(100).advice) == [RUN_LIKE_THIS]
    with pytest.raises(ValueError, match=r"no batch keeps the budget of 1: the cheapest costs up to"):
        money(1.0)
    with pytest.raises(ValueError, match="pass --cost-per-hour"):
        decide(known, Wanted(budget=100.0))
    with pytest.raises(ValueError, match="--budget is for a whole run like this one, and its batch changed"):
        decide(dataclasses.replace(known, batch_changed=True), Wanted(budget=9.0, cost_per_hour=360.0))


def test_with_more_ranks_a_larger_batch_is_faster_and_a_smaller_one_cheaper() -> None:
    full = TimeCurve((Timing(16, 4, 1, 0.64, 0.0),), 17)
    known = facts(64, 320.0, pieces=4.0, curve=full)
    assert advised(known, aim="fastest", ranks_at_most=64)[1] == 1024.0  # one micro-batch on each
    assert advised(known, ranks_at_most=64)[1] == 512.0  # beyond 1.5 B_crit, more ranks are not worth it
    cheap = facts(64, 20.0, pieces=4.0, curve=full)
    assert advised(cheap, aim="cheapest", ranks_at_most=64) == ("smaller", 16.0)
    assert advised(facts(64, 3000.0, pieces=4.0, curve=full), aim="cheapest", ranks_at_most=64) == ("keep", None)


def test_nothing_is_fastest_and_nothing_is_priced_without_a_clock() -> None:
    for wanted in ({"aim": "fastest"}, {"cost_per_hour": 3.0}):
        with pytest.raises(ValueError, match="pass --units-per-second"):
            decide(facts(64, 320.0), Wanted(**wanted))
        assert decide(facts(64, 320.0), Wanted(**wanted, units_per_second=100.0)).leading is not None


def test_a_throughput_that_is_passed_keeps_what_was_tried() -> None:
    known = facts(64, 3000.0, curve=tried((64, 0.010), (256, 0.012)))
    as_tried, slower = (decide(known, Wanted(units_per_second=speed)).leading for speed in (None, 640.0))
    assert as_tried is not None
    assert slower is not None
    for before, after in zip(as_tried.plans, slower.plans, strict=True):
        assert (after.time.high, after.basis) == (pytest.approx(before.time.high), before.basis)
        assert before.seconds is not None
        assert after.seconds is not None
        assert after.seconds.high == pytest.approx(10 * before.seconds.high)


@pytest.mark.parametrize(
    ("wanted", "said"),
    [
        ({"budget": 0.0}, "--budget must be positive and finite, got 0"),
        ({"ranks_at_most": -1}, "--ranks-at-most must be positive and finite, got -1"),
        ({"units_per_second": math.nan}, "--units-per-second must be positive"),
        ({"batch": math.inf}, "--batch must be positive and finite"),
        ({"budget": 5.0, "aim": "cheapest"}, "leave out one of two"),
        ({"trainer": "megatorn"}, "--trainer must be one of plain loop, transformers, "),
    ],
)
def test_what_cannot_be_wanted_is_refused(wanted: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        Wanted(**wanted)


def test_the_next_command_is_as_a_shell_reads_it_and_on_as_many_ranks() -> None:
    known = facts(64, 60_000.0, pieces=8.0, ranks=4)
    command = "sonde advise 'runs/a b' --try -- torchrun --nproc-per-node 4 train.py --batch {batch} --out {out}"
    assert decide(known, logs=[Path("runs/a b")]).command == command
    cut = TimeCurve((Timing(2, 8, 4, 0.1, 0.0), Timing(2, 32, 4, 0.4, 0.0)))  # a trial in which the script cut batches
    after = decide(dataclasses.replace(known, curve=cut), logs=[Path("a")]).command
    assert after.endswith("train.py --micro-batch {micro_batch} --accumulation {accumulation} --out {out}")
    assert decide(known, logs=[Path("runs/a b"), Path("runs/c")]).command == command.replace("b' ", "b' runs/c ", 1)


def test_a_batch_that_is_asked_for_is_set_as_it_is_and_changes_no_decision() -> None:
    known = facts(64, 3000.0, curve=FLAT)
    without = decide(known)
    for size in (100.0, 992.0, 1000.0, 1025.0):
        found = decide(known, Wanted(batch=size))
        assert (found.kind, found.sentence) == (without.kind, without.sentence)
        [change] = found.changes
        assert change.plan.whole_batch == size
        assert "split" not in change.how[0]


def test_a_batch_that_is_asked_for_has_flags_and_a_rate() -> None:
    """Rates, flags and words are for the batch that can be set."""
    known = facts(64, 28.0, pieces=8.0, ranks=2, curve=TimeCurve((Timing(8, 4, 2, 0.5, 0.0),), 9), trainer="Lightning")
    [change], [of_16] = (decide(known, Wanted(batch=size)).changes for size in (17.0, 16.0))
    assert (change.plan.whole_batch, change.rates) == (16, of_16.rates)
    assert change.how == ("17 does not split well into ranks and micro-batches: this sets 16", *of_16.how)
    assert change.rates[0].batch == 16
    [change] = decide(known, Wanted(batch=100.0, trainer="nanochat")).changes
    assert change.rates == ()  # it scales them by itself


def test_an_average_batch_is_said_in_whole_numbers() -> None:
    """An epoch's last windows are short."""
    found = decide(facts(15.9, 500.0, curve=TimeCurve((Timing(15.9, 1, 1, 0.01, 0.0), Timing(64, 1, 1, 0.011, 0.0)))))
    assert found.kind == "larger"
    [change] = found.changes
    assert change.plan.batch == change.plan.whole_batch == 64
