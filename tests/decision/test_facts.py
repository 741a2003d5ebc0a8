"""What is known of a training: the same by its log and by its probe; times of steps as the log has them."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest

from sonde.decision.decide import decide
from sonde.decision.facts import FROM_HERE_ON, RUN_LIKE_THIS
from sonde.decision.proxy import FACTORS, OF_BRANCHES
from sonde.decision.time_curve import TimeCurve
from sonde.runs.facts import facts_of_run
from sonde.runs.reader import read_run
from sonde.stats.intervals import RatioInterval
from tests.decision.known import ADAMW, facts
from tests.runs.report.plausible_run import Record, header_record, reading_record, with_metrics, written


def log_of(
    folder: Path,
    windows: list[tuple[float, float, float]],
    *,
    header: Record | None = None,
    measuring: float = 0.0,
    **changes: Any,
) -> Any:
    """A log in which each reading, ten windows after the last, has these units, micro-batches and units a second."""
    seen, records = 0.0, [header or header_record()]
    for i, (batch, pieces, rate) in enumerate(windows):
        seen += 10 * batch
        record = reading_record(
            i, len(windows), status="resolved", batch=batch, pieces={"per_window": pieces}, **changes
        )
        costs = {"cost/seconds_per_window": measuring}
        records.append(with_metrics(record, {"run/units_seen": seen, "run/units_per_second": rate} | costs))
    return facts_of_run(read_run(written(folder, records)))


def test_scopes_rest_on_the_average_and_on_the_level_now(tmp_path: Path) -> None:
    known = log_of(tmp_path, [(64.0, 8, 120.0)] * 60)
    of_run, here = known.scopes[RUN_LIKE_THIS], known.scopes[FROM_HERE_ON]
    assert (of_run.factor, here.factor) == (FACTORS[ADAMW, "euclidean"], OF_BRANCHES[ADAMW])
    last = read_run(tmp_path).readings[-1]
    assert (of_run.known.ratio, here.known.ratio) == (last.average.ratio, last.now.ratio)
    assert of_run.critical.middle == pytest.approx(1.5 * (last.average.ratio or 0))
    assert (of_run.steps, here.steps) == (600, 1000)
    assert (known.batch, known.ranks, known.accumulation, known.micro_batch) == (64, 2, 4, 8)


def test_a_batch_of_weighed_units_is_compared_with_a_noise_scale_counted_alike(tmp_path: Path) -> None:
    whole = log_of(tmp_path / "whole", [(64.0, 8, 120.0)] * 12).scopes[RUN_LIKE_THIS]
    records = [header_record(), *(reading_record(i, 12, status="resolved") for i in range(12))]
    records[1:] = [with_metrics(r, {"gns/effective_units": 32.0}) for r in records[1:]]
    half = facts_of_run(read_run(written(tmp_path / "half", records)))
    assert half.batch == 64
    assert half.scopes[RUN_LIKE_THIS].critical.middle == pytest.approx(2 * (whole.critical.middle or 0))


@pytest.mark.parametrize(("covered", "is_known"), [(None, True), (0.81, True), (0.79, False), (0.0, False)])
def test_a_part_of_the_gradient_says_nothing_of_the_batch(
    tmp_path: Path, covered: float | None, is_known: bool
) -> None:
    header, records = header_record(), [reading_record(i, 60, status="resolved") for i in range(60)]
    records = [with_metrics(record, {"gns/covered": covered}) for record in records]
    found = decide(facts_of_run(read_run(written(tmp_path, [header, *records]))))
    assert (found.kind != "wait") == is_known
    assert ("of |F|²: accumulate over 2 micro-batches" in found.reason) == (not is_known)


def test_a_step_takes_what_the_log_says(tmp_path: Path) -> None:
    """64 units in 8 micro-batches on 2 ranks, at 120 units a second; a pause at one reading changes nothing."""
    known = log_of(tmp_path, [(64.0, 8, 3.0 if i == 20 else 120.0) for i in range(60)])
    assert known.curve is not None
    [timing] = known.curve.timings
    assert (timing.micro_batch, timing.accumulation, timing.ranks) == (8, 4, 2)
    assert timing.seconds == pytest.approx(64 / 120)
    measured = log_of(tmp_path / "measured", [(64.0, 8, 120.0)] * 60, measuring=0.2)
    assert measured.curve.timings[0].seconds == pytest.approx(64 / 120 - 0.2)  # without sonde's own part


@pytest.mark.parametrize("pieces", [3, 5, 7])
def test_the_step_of_a_log_whose_pieces_ranks_do_not_share_evenly_is_known(tmp_path: Path, pieces: int) -> None:
    known = log_of(tmp_path, [(8.0 * pieces, pieces, 100.0)] * 20)
    assert known.micro_batch == pytest.approx(8)
    assert known.curve is not None
    found = known.curve.of_step(known.micro_batch, known.accumulation, 2)[0]
    assert (found.low, found.high) == (pytest.approx(8 * pieces / 100), pytest.approx(8 * pieces / 100))


def test_sizes_that_differ_within_a_log_are_a_curve(tmp_path: Path) -> None:
    """16 in 10 ms, then 64 in 11 ms: the batch grew, so that nothing is said of the whole run."""
    header = header_record(setup=header_record()["setup"] | {"ranks": 1})
    known = log_of(tmp_path, [(16.0, 1, 1600.0)] * 30 + [(64.0, 1, 64 / 0.011)] * 30, header=header)
    assert known.batch_changed
    assert list(known.scopes) == [FROM_HERE_ON]
    assert isinstance(known.curve, TimeCurve)
    assert [(t.micro_batch, round(t.seconds, 6)) for t in known.curve.timings] == [(16, 0.010), (64, 0.011)]
    assert known.curve.of_step(40, 1, 1)[0].middle == pytest.approx(0.0105)
    # Short windows at the end of each epoch change nothing.
    short = log_of(tmp_path / "short", [(64.0 - 4.8 * (i % 20 == 0), 1, 100.0) for i in range(60)], header=header)
    assert not short.batch_changed


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"batch": math.nan}, "batch must be positive and finite, got nan"),
        ({"batch": 0.0}, "batch must be positive"),
        ({"batch": math.inf}, "batch must be positive"),
        ({"ranks": 0}, "ranks must be positive"),
        ({"ranks": 2.5}, "ranks must be a whole number, got 2.5"),
        ({"effective": 0.0}, "effective must be positive"),
        ({"now": RatioInterval("resolved", 1.0, math.nan, ratio=2.0)}, "a noise scale must be 0 or more"),
        ({"average": RatioInterval("resolved", 30.0, 10.0, ratio=20.0)}, "a noise scale must be .* between its ends"),
    ],
)
def test_facts_that_cannot_be_are_refused(wrong: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        dataclasses.replace(facts(64, 320.0), **wrong)


def test_a_checkpoint_has_no_time_and_no_run(tmp_path: Path) -> None:
    header = header_record(setup=header_record()["setup"] | {"fixed_weights": True})
    known = log_of(tmp_path, [(64.0, 8, 120.0)] * 20, header=header)
    assert (known.curve, known.n_steps, known.pieces) == (None, None, 1.0)
    assert list(known.scopes) == [FROM_HERE_ON]


def test_batch_norms_forbid_smaller_micro_batches(tmp_path: Path) -> None:
    header = header_record(setup=header_record()["setup"] | {"batch_norms": 3})
    assert "batch normalisation" in log_of(tmp_path, [(64.0, 8, 120.0)] * 20, header=header).needs_batch
