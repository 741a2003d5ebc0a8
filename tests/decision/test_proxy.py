"""B_crit from B_simple: factors of the study, and ranges that hold as often as they say."""

from __future__ import annotations

import math
import random
import re
import statistics
from pathlib import Path

import pytest

from sonde.decision.law import Range
from sonde.decision.proxy import (
    FACTORS,
    IN_RL,
    LAW_FITS_BETTER,
    OF_BRANCHES,
    PUBLISHED,
    Factor,
    critical_range,
    factor_for,
    factor_in_words,
    law_in_words,
)
from sonde.stats.intervals import RatioInterval
from sonde.wording import number

TABLES = (Path(__file__).parents[2] / "evidence" / "tables.md").read_text()
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


def drawn(rng: random.Random, factor: Factor) -> float:
    """A factor whose logarithm is normal on each side of the median: 5 % are below `low`, and 5 % above `high`."""
    z = rng.gauss(0, 1) / 1.645
    assert factor.median is not None
    return factor.median * (factor.high / factor.median if z > 0 else factor.median / factor.low) ** z


@pytest.mark.parametrize("log_error", [0.02, 0.3, 0.8])
@pytest.mark.parametrize("factor", [*FACTORS.values(), *OF_BRANCHES.values()], ids=str)
def test_ranges_hold_as_often_as_they_say(factor: Factor, log_error: float) -> None:
    """Ends that were multiplied would hold 96 times in 100."""
    rng, n, n_held = random.Random(5), 4_000, 0
    for _ in range(n):
        truth = 100.0 * drawn(rng, factor)
        seen = 100.0 * math.exp(rng.gauss(0, log_error))
        width = math.exp(1.96 * log_error)
        found = critical_range(RatioInterval("resolved", seen / width, seen * width, ratio=seen), factor)
        n_held += found.low <= truth <= found.high
    assert n_held / n == pytest.approx(0.9, abs=0.03)  # the error of 4,000 draws is 0.005; a factor may be skewed


def test_bounds_stay_bounds() -> None:
    factor = FACTORS[ADAMW, "euclidean"]
    assert critical_range(RatioInterval("lower_bound", 50.0, math.inf), factor) == Range(None, 42.0, math.inf)
    assert critical_range(RatioInterval("upper_bound", 0.0, 10.0), factor) == Range(None, 0.0, 28.0)
    assert critical_range(RatioInterval("resolved", 80.0, 100.0, ratio=90.0), PUBLISHED) == Range(None, 8.0, 2000.0)


@pytest.mark.parametrize(
    ("kind", "metric"), [("", "euclidean"), ("Lion (β = 0.9)", "euclidean"), ("SGD (β = 0)", "adam")]
)
def test_others_have_the_published_runs_alone(kind: str, metric: str) -> None:
    for from_here_on in (False, True):
        factor = factor_for("images", kind, metric, from_here_on=from_here_on)
        assert factor == PUBLISHED
        said = factor_in_words(factor, kind, "images", from_here_on=from_here_on)
        assert "0.1 to 20 times B_simple, as in published runs (McCandlish et al. 2018" in said
        assert said.startswith("This optimizer or metric was not in" if kind else "The log does not say the optimizer")


def test_prompts_have_the_factor_of_policies() -> None:
    for unit in ("prompts", "effective prompts"):
        assert factor_for(unit, ADAMW, "euclidean", from_here_on=True) == IN_RL["Adam"]
        assert factor_for(unit, "Muon (β = 0.95)", "euclidean", from_here_on=False) == PUBLISHED
    assert "in 8 cases of GRPO of" in factor_in_words(IN_RL["Adam"], ADAMW, "prompts", from_here_on=True)


@pytest.mark.parametrize(("kind", "metric"), FACTORS)
def test_the_study_is_quoted_for_its_own_optimizers_and_metrics(kind: str, metric: str) -> None:
    found = factor_for("images", kind, metric, from_here_on=False)
    assert found.median is not None
    assert found.low < found.median < found.high <= 20 * found.low
    low, median, high = (number(end, 2) for end in (found.low, found.median, found.high))
    said = factor_in_words(found, kind, "images", from_here_on=False)
    assert f"With {kind}, B_crit was {low} to {high} times the run's average B_simple (median {median})" in said
    assert f"in 90 % of {found.n_trainings} trainings" in said


def test_the_law_is_that_of_most_cases() -> None:
    n, of = LAW_FITS_BETTER
    assert of / 2 < n <= of
    assert f"in {n} of {of} cases" in law_in_words()
