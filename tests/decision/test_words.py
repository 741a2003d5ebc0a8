"""The words of a decision."""

from __future__ import annotations

import dataclasses
import math
import re

from sonde.decision.decide import Wanted, decide
from sonde.decision.law import Range
from sonde.decision.time_curve import TimeCurve, Timing
from sonde.decision.words import part_in_words
from tests.decision.known import facts, tried


def test_costs_in_words() -> None:
    space = "\N{NO-BREAK SPACE}"
    assert part_in_words(Range(0.68, 0.62, 0.75)) == f"68{space}% [62 – 75] of"
    assert part_in_words(Range(1.4, 0.95, 2.0)) == "1.4 [0.95 – 2] times"
    assert part_in_words(Range(1.04, 1.01, 1.2)) == "1.04 [1.01 – 1.2] times"
    assert part_in_words(Range(0.5, 0.5, 0.5)) == f"50{space}% of"
    assert part_in_words(Range(None, 0.25, 0.37)) == f"25 to 37{space}% of"
    assert part_in_words(Range(0.0031, 0.0012, 1.0004)) == f"0.3{space}% [0.1 – 100] of"
    assert part_in_words(Range(None, 0.9, math.inf)).endswith("times")


def test_the_sentence_has_the_numbers_of_the_plan() -> None:
    found = decide(facts(16, 500.0, curve=tried((16, 0.010), (64, 0.0111), (256, 0.020))))
    assert found.leading is not None
    plan, now = found.leading.best, found.leading.present
    assert plan is not None
    parts = [part_in_words(each.over(of)) for each, of in ((plan.steps, now.steps), (plan.units, now.units))]
    assert found.sentence.startswith(
        f"Start the next run with a batch of {plan.batch:,.0f} rows: it needs {parts[0]} the steps and {parts[1]} the "
        f"rows. It takes {part_in_words(plan.time)} the time."
    )


def test_what_only_the_optimizers_update_leaves_in_doubt_is_not_laid_to_the_device() -> None:
    """Two logs timed two sizes, each step as a whole."""
    curve = TimeCurve((Timing(16, 1, 1, 0.010), Timing(32, 1, 1, 0.0183)))
    found = decide(facts(16, 20_000.0, curve=curve))
    assert found.kind == "time"
    assert re.search(
        r"takes \d.* of the time of 16 if the optimizer's update takes much of a step, and ", found.sentence
    )


def test_ranks_are_said_where_there_are_others() -> None:
    full = dataclasses.replace(tried((16, 0.01)), too_large=17.0)
    found = decide(facts(16, 3000.0, curve=full), Wanted(ranks_at_most=16))
    assert found.leading is not None
    assert found.leading.best is not None
    assert "On 16 ranks, it takes " in found.sentence
    assert "Times on other numbers of ranks are modelled: ranks wait for nothing." in found.notes


def test_what_is_doubtful_is_said_with_both_ends() -> None:
    space = "\N{NO-BREAK SPACE}"
    found = decide(facts(16, 1e9, pieces=4.0, optimizer="SGD (β = 0.9)", settings=()))
    assert found.kind == "time"
    assert found.sentence.startswith("Time it first: a batch of ")
    assert (
        f"{space}% of the time of 16 if this device is not full, and 100{space}% of that time if it is."
        in found.sentence
    )
    assert any("A trial tells which." in note for note in found.notes)


def test_reason_and_notes_say_what_the_numbers_rest_on() -> None:
    found = decide(facts(64, 28.0, 205.0))
    assert found.reason.startswith(
        "For a run like this one, B_crit is 42 rows [23.5 – 78.5]: the noise scale, 28 rows ["
    )
    assert "times 1.5 [0.84 – 2.8]. From here on, B_crit is " in found.reason
    assert any(
        "Ranges of B_crit hold about 9 times in 10" in n and "95 % interval is first made one of 90" in n
        for n in found.notes
    )


def test_in_rl_prompts_and_completions_are_weighed() -> None:
    known = dataclasses.replace(facts(16, 60.0), unit="prompts", completions_share=0.7)
    notes = "\n".join(decide(known).notes)
    assert "twice the completions to each prompt would cut the noise of a step by 35" in notes
    assert "Reuse: with four updates on each batch" in notes
    assert "advantages are normalised in each minibatch" in "\n".join(decide(facts(64, 1.0), Wanted(batch=8.0)).notes)
