"""What other batch sizes cost, and which is best: a naive computation, a simulated truth, hand-made cases."""

from __future__ import annotations

import math
import random
import re
import statistics
from collections.abc import Iterator
from pathlib import Path

import pytest
from sonde.batch_size.stats.critical_batch import Estimate, Kind, critical, judge_batch
from sonde.batch_size.stats.next_batch import (
    FROM_HERE_ON,
    RUN_LIKE_THIS,
    Advice,
    Aim,
    Present,
    advise_batch,
    in_short,
    in_words,
    leading,
    part_in_words,
    plan_of,
)
from sonde.batch_size.stats.proxy import (
    FACTORS,
    IN_RL,
    OF_BRANCHES,
    PUBLISHED,
    Factor,
    Range,
    critical_range,
    factor_for,
)

TABLES = (Path(__file__).parents[3] / "evidence" / "tables.md").read_text()
ADAMW = "Adam or AdamW (β = 0.9)"
OF_TABLES = {"sgd": "SGD (β = 0)", "sgd-0.9": "SGD (β = 0.9)", "adamw": ADAMW, "muon": "Muon (β = 0.95, nesterov)"}


def test_factors_are_those_of_the_study() -> None:
    rows = re.findall(
        r"^\| ([\w.-]+) \| B_simple \| branched, usual rates \| (\d+) of \d+ \| (\S+) \| (\S+) – (\S+) \|", TABLES, re.M
    )
    found = {OF_TABLES[name]: tuple(map(float, (median, low, high, n))) for name, n, median, low, high in rows}
    assert found == {name: (f.median, f.low, f.high, f.n_trainings) for name, f in OF_BRANCHES.items()}


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_factors_of_policies_are_those_of_the_study(optimizer: str) -> None:
    ratios = []
    for measured_batch, noise in re.findall(
        rf"^\| \w+ \| {optimizer} \| group \| ([^|]*) \| [^|]* \| ([^|]*) \|", TABLES, re.M
    ):
        measured = dict(re.findall(r"(\d+): (\d+) \[", measured_batch))
        ratios += [float(measured[group]) / float(scale) for group, scale in re.findall(r"(\d+): (\d+)", noise)]
    factor = IN_RL[{"sgd": "SGD", "adam": "Adam"}[optimizer]]
    assert len(ratios) == factor.n_trainings == 8
    expected = (statistics.median(ratios), min(ratios), max(ratios))
    assert (factor.median, factor.low, factor.high) == pytest.approx(expected, rel=0.05)  # two digits


# Against a simulated truth.


def drawn(rng: random.Random, factor: Factor) -> float:
    """A factor whose logarithm is normal on each side of the median: 5 % are below `low`, and 5 % above `high`."""
    z = rng.gauss(0, 1) / 1.645
    return factor.median * (factor.high / factor.median if z > 0 else factor.median / factor.low) ** z


@pytest.mark.parametrize("log_error", [0.02, 0.3, 0.8])
@pytest.mark.parametrize("factor", [*FACTORS.values(), *OF_BRANCHES.values()], ids=str)
def test_ranges_hold_as_often_as_they_say(factor: Factor, log_error: float) -> None:
    """The critical batch size, and the steps at another batch. Ends that were multiplied would hold 96 times in 100."""
    rng, n, n_held, n_steps_held = random.Random(5), 4_000, 0, 0
    for _ in range(n):
        truth = 100.0 * drawn(rng, factor)
        seen = 100.0 * math.exp(rng.gauss(0, log_error))
        width = math.exp(1.96 * log_error)
        found = critical_range(seen, seen / width, seen * width, factor)
        n_held += found.low <= truth <= found.high
        steps = plan_of(Present(64, 1000), 256, found).steps
        n_steps_held += steps.low <= 1000 * (1 + truth / 256) / (1 + truth / 64) <= steps.high
    assert n_held / n == pytest.approx(0.9, abs=0.03)  # the error of 4,000 draws is 0.005; a factor may be skewed
    assert n_steps_held == n_held


def test_bounds_stay_bounds() -> None:
    factor = FACTORS[ADAMW, "euclidean"]
    assert critical_range(None, 50.0, math.inf, factor) == Range(None, 42.0, math.inf)
    assert critical_range(None, 0.0, 10.0, factor) == Range(None, 0.0, 28.0)
    assert critical_range(90.0, 80.0, 100.0, PUBLISHED) == Range(None, 8.0, 2000.0)
    advice = advise_batch(Present(8, 1000, ranks_at_most=8), Range(None, 42.0, math.inf))
    assert [(p.steps.low, p.steps.high) for p in advice.plans if p.batch == 16] == [(500.0, pytest.approx(580.0))]
    assert advice.best is not None
    assert (advice.best.batch, advice.best.steps.middle) == (32.0, None)  # as good as it is for certain
    assert in_words(advice, "rows").startswith("try a batch of 32 rows: it needs 25 to 37 % of the steps")


# Against a naive computation.


def cases() -> Iterator[tuple[Present, float]]:
    rng = random.Random(1)
    for _ in range(100):
        ranks = rng.choice((1, 2, 8))
        pieces = ranks * rng.choice((1, 2, 3))
        present = Present(
            pieces * rng.choice((4.0, 16.0)), 1000, pieces, ranks, 500.0, 12.0, rng.choice((1, 4, 16, 64))
        )
        yield present, present.batch * 2.0 ** rng.randrange(-2, 5)


@pytest.mark.parametrize(("present", "batch"), list(cases()))
def test_costs_are_those_of_a_naive_computation(present: Present, batch: float) -> None:
    """By the law for S_min and E_min, and micro-batches that are dealt out one after the other."""
    critical = 90.0
    fewest_steps = present.steps / (1 + critical / present.batch)
    fewest_units = present.steps * present.batch / (1 + present.batch / critical)
    steps = fewest_steps * (1 + critical / batch)
    plan = plan_of(present, batch, Range(critical, critical, critical))
    assert plan.steps.middle == pytest.approx(steps)
    assert plan.units.middle == pytest.approx(fewest_units * (1 + batch / critical))
    step_then, pieces_of_a_rank_then = present.batch / (present.units_per_second or 0), present.pieces / present.ranks
    of_a_piece, n_left, seconds = step_then / pieces_of_a_rank_then, batch / present.batch * present.pieces, 0.0
    assert plan.ranks <= present.ranks_at_most
    while n_left > 1e-9:
        n_left, seconds = n_left - plan.ranks, seconds + of_a_piece
    assert plan.seconds is not None
    assert plan.money is not None
    assert plan.seconds.middle == pytest.approx(steps * seconds)
    of_a_rank = (present.cost_per_hour or 0) / present.ranks / 3600
    assert plan.money.middle == pytest.approx(steps * seconds * plan.ranks * of_a_rank)


# The best of them.


def advised(known: float, aim: Aim = "balanced", budget: float | None = None, **changes: float) -> Advice:
    """On a training of 64 in 4 micro-batches with AdamW, whose noise scale is known to 5 %."""
    present = Present(**{"batch": 64.0, "steps": 1000.0, "pieces": 4.0, "units_per_second": 100.0, **changes})  # type: ignore[arg-type]
    found = critical(Estimate(known, known / 1.05, known * 1.05), FACTORS[ADAMW, "euclidean"])
    return advise_batch(present, found, aim=aim, budget=budget)


def best(known: float, aim: Aim = "balanced", budget: float | None = None, **changes: float) -> float | None:
    """The best batch of such a training."""
    found = advised(known, aim, budget, **changes).best
    return None if found is None else found.batch


@pytest.mark.parametrize(
    ("known", "ranks", "expected", "elsewhere"),  # B_crit is near 1.5 times what is known
    [
        (64.0, 64, None, None),
        (140.0, 64, None, None),
        (320.0, 64, 512.0, None),
        (3000.0, 1024, 4096.0, None),
        (3000.0, 16, 256.0, None),  # one micro-batch on each rank: a larger one takes more time and money
        (3000.0, 1, None, 4096.0),  # accumulated on one rank, any larger one takes longer
        (6.0, 1, 16.0, None),  # a single micro-batch: a smaller one takes as long
    ],
)
def test_a_balanced_batch_is_near_the_critical_one_and_saves_time_or_money(
    known: float, ranks: int, expected: float | None, elsewhere: float | None
) -> None:
    found = advised(known, ranks_at_most=ranks)
    assert [plan and plan.batch for plan in (found.best, found.elsewhere)] == [expected, elsewhere]
    if found.best is not None:
        now, plan = found.present, found.best
        assert plan.seconds is not None
        assert now.seconds is not None
        assert plan.seconds.likely <= 0.9 * now.seconds.likely or plan.rank_steps.likely <= 0.9 * now.rank_steps.likely


def test_what_pays_elsewhere_alone_is_said_so() -> None:
    said = in_words(advised(3000.0), "rows")
    assert said.startswith("keep the batch of 64 rows on 1 rank: 4,096 would need 3 % [")
    assert said.endswith(
        "times the rows; it saves time only on more ranks, or where larger micro-batches take hardly more time"
    )
    small = advise_batch(Present(64, 1000), Range(4.0, 3.0, 5.0))  # a single micro-batch
    said = in_words(small, "rows")
    assert said.startswith("try a batch of 4 rows, or keep 64: it needs ")
    assert said.endswith("the rows; it saves time only where smaller micro-batches take less time, as on a busy device")


def test_with_more_ranks_a_larger_batch_is_faster_and_a_smaller_one_cheaper() -> None:
    assert best(320.0, "fastest", ranks_at_most=64) == 1024.0  # one micro-batch on each
    assert best(320.0, "fastest", ranks_at_most=16) == 256.0
    assert best(320.0, "fastest") is None  # accumulated on one rank, a larger one takes longer
    assert best(64.0, "fastest") == 16.0  # and a smaller one less: it is one micro-batch
    assert best(64.0, "cheapest", ranks_at_most=64) == 16.0
    assert best(3000.0, "cheapest", ranks_at_most=64) is None  # hardly any are saved


def test_a_change_that_may_lose_is_no_advice() -> None:
    """4 times as many of 3 micro-batches take 3 times as long on at most 4 ranks: that pays far below B_crit alone."""
    present = Present(48.0, 1000.0, pieces=3.0, units_per_second=100.0, ranks_at_most=4)
    for factor, batch in ((FACTORS[ADAMW, "euclidean"], 192.0), (OF_BRANCHES[ADAMW], None)):  # whose range is wide
        found = advise_batch(present, critical(Estimate(5000.0, 4900.0, 5100.0), factor), aim="fastest")
        assert (None if found.best is None else found.best.batch) == batch


def test_a_budget_is_kept_at_the_worse_end() -> None:
    """The run as it is takes 640 s, which cost 64 at 360 an hour."""
    options = {"ranks_at_most": 64, "cost_per_hour": 360.0}
    batches = [best(320.0, "balanced", budget, **options) for budget in (1e9, 100.0, 70.0, 62.0)]
    assert batches == [1024.0, 128.0, None, 32.0]
    with pytest.raises(ValueError, match=r"no batch keeps the budget of 1: the cheapest costs up to 60.8"):
        best(320.0, "balanced", 1.0, **options)
    with pytest.raises(ValueError, match="pass --cost-per-hour"):
        best(320.0, "balanced", 1.0)


def test_nothing_is_fastest_without_a_throughput() -> None:
    with pytest.raises(ValueError, match="pass --units-per-second"):
        advise_batch(Present(64, 1000), Range(320, 300, 340), aim="fastest")


@pytest.mark.parametrize("optimizer", [*OF_TABLES.values(), "Lion (β = 0.9)"])
@pytest.mark.parametrize("from_here_on", [False, True])
def test_advice_and_verdict_agree(optimizer: str, from_here_on: bool) -> None:
    """A batch that is about right is kept, and no other is advised against the verdict."""
    rng, kinds = random.Random(3), set[Kind]()
    factor = factor_for("rows", optimizer, "euclidean", from_here_on=from_here_on)
    for _ in range(300):
        middle, width = math.exp(rng.uniform(-1, 12)), math.exp(rng.uniform(0.01, 1))
        known = Estimate(middle, middle / width, middle * width)
        verdict = judge_batch(64, unit="rows", now=known, of_run=None if from_here_on else known, optimizer=optimizer)
        advice = advise_batch(Present(64, 1, ranks_at_most=10**6), critical(known, factor))
        kinds.add(verdict.kind)
        assert advice.kind == verdict.kind
        other = advice.best or advice.elsewhere
        assert (other is not None) == (verdict.kind in ("too_small", "too_large"))
        if other is not None:
            assert verdict.kind == ("too_small" if other.batch > 64 else "too_large")
            assert "a batch of" not in verdict.detail.lower()  # advice alone names another batch
        else:
            assert in_words(advice, "rows").startswith("keep the batch of 64 rows: ")
    assert kinds >= {"too_small", "too_large"}


def test_what_decides_leads() -> None:
    """The run comes before what follows it, but a batch that is too small or too large comes first."""
    sure, half, none = (advise_batch(Present(64, 1), Range(None, *ends)) for ends in ((200, 900), (60, 900), (9, 900)))
    for of_run, now, expected in (
        (sure, sure, RUN_LIKE_THIS),
        (half, sure, FROM_HERE_ON),
        (half, half, RUN_LIKE_THIS),
        (none, half, FROM_HERE_ON),
        (none, none, RUN_LIKE_THIS),
    ):
        assert leading({RUN_LIKE_THIS: of_run, FROM_HERE_ON: now}) == expected
    assert leading({FROM_HERE_ON: none}) == FROM_HERE_ON


def test_in_short_there_is_a_clause_for_each() -> None:
    keep, change = advise_batch(Present(64, 1), Range(70, 60, 80)), advise_batch(Present(64, 1), Range(512, 400, 600))
    clauses = [f"for a run like this one, {in_words(keep, 'rows')}", f"from here on, {in_words(change, 'rows')}"]
    assert in_short("rows", {RUN_LIKE_THIS: keep, FROM_HERE_ON: change}) == "; ".join(clauses)


def test_costs_in_words() -> None:
    assert part_in_words(Range(68.0, 62.0, 75.0), 100.0) == "68 % [62 – 75] of"
    assert part_in_words(Range(140.0, 95.0, 200.0), 100.0) == "1.4 [0.95 – 2] times"
    assert part_in_words(Range(50.0, 50.0, 50.0), 100.0) == "50 % of"
