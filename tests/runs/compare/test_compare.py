"""Several logs read together: what is said of them, against logs whose differences are known."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from sonde.decision.decide import decide
from sonde.decision.pool import pool
from sonde.runs.compare.page import comparison_page
from sonde.runs.compare.side_by_side import AXES, Comparison, read_runs
from sonde.runs.compare.words import beside_rows, reached_rows, run_rows, setting_rows, summary
from sonde.runs.facts import facts_of_run, facts_of_runs
from sonde.runs.reader import read_run
from tests.runs.compare.plausible_runs import write_plausible
from tests.runs.report.plausible_policy import policy_header, policy_record, write_policy_run
from tests.runs.report.plausible_run import (
    STARTED,
    Record,
    end_record,
    header_record,
    reading_record,
    with_metrics,
    written,
)


def compared(tmp_path: Path, *options: dict[str, Any], **how: Any) -> Comparison:
    """Runs with these options, in folders named run0, run1, …"""
    return read_runs([write_plausible(tmp_path / f"run{i}", **each) for i, each in enumerate(options)], **how)


def known(units: float) -> float:
    return 1.5 + 4 * units**-0.3


def test_three_batches_at_equal_units_steps_and_time(tmp_path: Path) -> None:
    """One loss at equal units. 4 times as many steps for each smaller batch, and each step takes 5.3 s."""
    found = compared(tmp_path, {"batch": 4.0, "n": 320}, {"batch": 16.0}, {"batch": 64.0, "n": 20})
    a, b, c = found.runs
    truth = {(b, "units"): 0.0, (c, "units"): 0.0}
    for run, units, beside in ((b, 12_800, 3200), (c, 12_800, 800)):  # of the run, and of A, at the run's last step
        truth |= {(run, by): known(units) - known(beside) for by in ("steps", "time")}
    for (run, by), difference in truth.items():
        of = found.beside(run, a, "loss", by)
        assert of is not None
        assert of.value == pytest.approx(difference, abs=0.015)  # each value has an error of 0.01
        assert of.low is not None
        assert 0 < of.value - of.low < 0.04
    shown = summary(found)
    assert shown.headline.startswith("At equal sequences, C's loss is the lowest: A's is 0.00")
    assert shown.headline.endswith("higher, which cannot be distinguished from 0.")
    assert "At equal steps, C's loss is the lowest: B's is 0.123 (" in shown.detail
    assert "At equal time, C's loss is the lowest: B's is 0.123 (" in shown.detail
    rows = list(beside_rows(found))
    assert rows[0] == ("", "minus A's", "at equal sequences", "at equal steps", "at equal time")
    assert [row[:2] for row in rows[1:]] == [("B", "loss"), ("C", "loss")]


def test_what_each_run_took_to_the_loss_that_all_reached(tmp_path: Path) -> None:
    """B needs twice the units for each loss, so A has B's last loss after half of them."""
    slow = {"loss": lambda units: known(units / 2), "batch": 32.0, "n": 80}
    found = compared(tmp_path, {"batch": 16.0, "n": 160}, slow)
    a, b = map(found.to_common_loss, found.runs)
    assert a is not None
    assert b is not None
    assert b.units == pytest.approx(25_600 - 160)  # the middle of the last reading's stretch
    assert a.units == pytest.approx(12_800, rel=0.1)
    assert a.steps == pytest.approx(a.units / 16, rel=0.02)
    assert a.seconds == pytest.approx(5.3 * a.steps, rel=0.02)
    head, *rows = reached_rows(found)
    assert head == ("to loss 1.73", "sequences", "steps", "time")
    assert [row[0] for row in rows] == ["A", "B"]


@pytest.mark.parametrize("n", [5, 20])
def test_runs_with_few_evaluations_have_numbers_on_each_axis(tmp_path: Path, n: int) -> None:
    """Held-out losses at 5 or 20 places of each run; one takes 4 times as many steps as the other."""
    runs = []
    for name, batch, steps in (("small", 16.0, 800), ("large", 64.0, 200)):
        records: list[Record] = [header_record(run=name)]
        gap = steps // 100
        for i in range(100):
            record = reading_record(i, 100, batch=batch, log_every=gap)
            middle = batch * gap * (i + 0.5)
            loss = {"eval_loss": known(middle)} if (i + 1) % (100 // n) == 0 else {}
            records.append(with_metrics(record, {"loss": None, **loss}))
        runs.append(written(tmp_path / name, records))
    found = read_runs(runs)
    assert found.loss == "eval_loss"
    for by, truth in (("units", 0.0), ("steps", known(12_800) - known(3200)), ("time", known(12_800) - known(3200))):
        of = found.beside(found.runs[1], found.runs[0], "eval_loss", by)  # type: ignore[arg-type]
        assert of is not None
        assert of.value == pytest.approx(truth, abs=0.02)
    assert all("–" not in cell for row in beside_rows(found) for cell in row)


@pytest.mark.parametrize(("trainer", "logged_every"), [("plain loop", 1), ("transformers", 10)])
def test_a_training_loss_is_the_mean_of_the_steps_before_it(tmp_path: Path, trainer: str, logged_every: int) -> None:
    """One run has 100 steps between two values, the other 10. Of equal curves, the difference is 0.

    The loss falls by 1 where the steps grow by e. A value at the end of its stretch lies 50 of 2,000 steps too late,
    and is 0.025 too high.
    """
    runs = []
    for name, between in (("long", 100), ("short", 10)):
        records: list[Record] = [header_record(setup=header_record()["setup"] | {"trainer": trainer})]
        gap, n = between // logged_every, 2000 * logged_every // between
        for i in range(n):
            record = with_metrics(reading_record(i, n, batch=16.0, log_every=gap), {"loss": None})
            if (i + 1) % logged_every == 0:
                end = gap * (i + 1)
                mean = sum(-math.log(step + 0.5) for step in range(end - between, end)) / between
                record = with_metrics(record, {"loss": mean})
            records.append(record)
        runs.append(written(tmp_path / name, records))
    found = read_runs(runs)
    for by in AXES:
        of = found.beside(found.runs[1], found.runs[0], "loss", by)
        assert of is not None
        assert of.value == pytest.approx(0.0, abs=0.003)


def test_the_decision_is_that_of_all_logs_and_goes_on_from_the_fastest(tmp_path: Path) -> None:
    found = compared(tmp_path, {"batch": 4.0, "n": 320}, {"batch": 16.0, "loss": lambda units: known(units) + 0.1})
    facts = facts_of_runs([read_run(tmp_path / name) for name in ("run0", "run1")])
    assert facts[0].reached is not None
    assert facts[0].reached.seconds == pytest.approx((found.to_common_loss(found.runs[0]) or facts[0].reached).seconds)
    shown = summary(found)
    assert shown.action == decide(pool(facts)).sentence
    logs = [tmp_path / "run0", tmp_path / "run1"]
    assert shown.commands == (decide(pool(facts), logs=logs).command,)
    assert f"{logs[0]} {logs[1]}" in shown.commands[0]


def test_runs_that_give_no_decision_together_have_that_of_the_best(tmp_path: Path) -> None:
    setup = header_record()["setup"] | {"optimizer_kind": "Muon"}
    shown = summary(compared(tmp_path, {}, {"setup": setup, "loss": lambda units: known(units) + 0.1}))
    assert shown.action == f"By A's log: {decide(facts_of_run(read_run(tmp_path / 'run0'))).sentence}"
    assert shown.commands == ()


def test_settings_that_differ_and_no_others(tmp_path: Path) -> None:
    setup = header_record()["setup"]
    groups = [{"name": "AdamW", "lr": lr, "betas": [0.9, 0.95]} for lr in (1e-3, 2e-3)]
    a = write_plausible(
        tmp_path / "a",
        metadata={"learning rate": 0.003, "model": {"layers": 6, "width": 128}, "text": f"{'x' * 900}1"},
        setup=setup | {"optimizer_settings": groups[:1]},
    )
    b = write_plausible(
        tmp_path / "b",
        batch=64.0,
        metadata={"learning rate": 0.006, "model": {"layers": 6, "width": 256}, "text": f"{'x' * 900}2"},
        setup=setup | {"ranks": 4, "optimizer_kind": "Muon", "optimizer_settings": groups[1:], "causes": True},
        versions={"sonde": "0.1.0", "torch": "2.14.0", "python": "3.11.7"},
    )
    c = write_plausible(
        tmp_path / "c",
        metadata={"learning rate": 0.003, "model": {"layers": 6, "width": 128}},
        setup=setup | {"optimizer_settings": groups},
    )
    found = read_runs([a, b, c])
    whole, shown = ({name: values for name, values in setting_rows(found, longest)} for longest in (4000, 60))
    assert whole["text"] == f"{'x' * 900}1 (A); {'x' * 900}2 (B); – (C)"
    assert whole["log"] == f"{a} (A); {b} (B); {c} (C)"  # so that runs of one name are told apart
    assert len(shown.pop("text")) < 150
    assert len(shown.pop("log")) <= len(whole["log"])
    assert shown == {
        "setting": "values",
        "batch size": "16 (A, C); 64 (B)",
        "ranks": "2 (A, C); 4 (B)",
        "learning rate": "0.003 (A, C); 0.006 (B)",
        "model width": "128 (A, C); 256 (B)",
        "version of torch": "2.13.0 (A, C); 2.14.0 (B)",
        "optimizer kind": "Adam or AdamW (β = 0.9) (A, C); Muon (B)",
        "causes": "– (A, C); yes (B)",
        "optimizer settings name": "AdamW (A, B); – (C)",
        "optimizer settings lr": "0.001 (A); 0.002 (B); – (C)",
        "optimizer settings betas": "[0.9, 0.95] (A, B); – (C)",
        **{f"optimizer settings {k} name": "– (A, B); AdamW (C)" for k in (1, 2)},
        **{f"optimizer settings {k} lr": f"– (A, B); {lr} (C)" for k, lr in ((1, 0.001), (2, 0.002))},
        **{f"optimizer settings {k} betas": "– (A, B); [0.9, 0.95] (C)" for k in (1, 2)},
    }


def test_runs_of_the_entropy_alone(tmp_path: Path) -> None:
    a, b = tmp_path / "a", tmp_path / "b"
    write_policy_run(a, 24)
    lower = [policy_record(i) for i in range(24)]
    for record in lower:
        record["metrics"]["entropy/evaluation_per_token"] -= 0.3
    written(b, [policy_header(), *lower, end_record(120)])
    found = read_runs([a, b])
    [entropy] = [row for row in beside_rows(found) if row[1] == "entropy"]
    assert entropy[3] == "−0.300 (−0.300 to −0.300)"
    assert summary(found).action == "By B's log: Act now: the policy has all but stopped exploring."
    assert "B has the least entropy, 0.12" in summary(found).headline
    assert [row[1] for row in run_rows(found)][1:] == ["Entropy is falling", "Entropy collapses"]


# Logs that compare badly.


def test_what_is_wrong_with_a_log_is_said(tmp_path: Path) -> None:
    good, other = write_plausible(tmp_path / "good"), write_plausible(tmp_path / "other", end=False)
    with (other / "records.jsonl").open("a") as file:
        file.write('{"kind":"reading","win')
    empty = written(tmp_path / "empty", [header_record()])
    old = written(tmp_path / "old", [header_record(schema=3)])
    paths = [good, other, good, empty, old, tmp_path / "none", tmp_path]
    found = read_runs(paths)
    assert [run.letter for run in found.runs] == ["A", "B"]
    for said in (
        f"Left out: {good} was given twice",
        f"Left out: {empty} holds no reading yet: train on, until it holds two",
        "was written with record schema 3, expected 4: read it with the version of sonde that wrote it",
        f"Left out: no run at {tmp_path / 'none'}: give the folder a run was logged to, or its records.jsonl",
        "which holds 4 runs: give the folder of one",
        "B (other): a crash damaged the log: line 82, the last one, is cut off in the middle: the 81 before it were",
    ):
        assert sum(said in notice for notice in found.notices) == 1, (said, found.notices)


def test_fewer_than_two_runs_and_more_than_twenty_are_refused(tmp_path: Path) -> None:
    good = write_plausible(tmp_path / "good", n=3)
    with pytest.raises(ValueError, match=r"needs two runs with readings or more, got 1; left out: .* was given twice"):
        read_runs([good, good])
    with pytest.raises(ValueError, match="up to 20 runs are compared, got 21: choose those that matter"):
        read_runs([good] * 21)
    written(tmp_path / "policy", [policy_header(), policy_record(0), policy_record(1), end_record(2)])
    silent = write_plausible(tmp_path / "silent", n=3, loss=None)
    with pytest.raises(ValueError, match=r"different units \(A: sequences, B: prompts\)"):
        read_runs([silent, tmp_path / "policy"])


def test_steps_taken_again_count_once_and_the_night_between_two_starts_not_at_all(tmp_path: Path) -> None:
    """A run that stops after step 600, and is resumed from step 400 half a day later; one earlier run in its folder."""
    night = 40_000.0
    before = [reading_record(i, 80, batch=16.0, status="resolved") for i in range(60)]
    after = [reading_record(i, 80, batch=16.0, status="resolved", seed=1) for i in range(40, 80)]
    later = [r | {"time": r["time"] + night} for r in after]
    resumed_at = header_record(time=before[39]["time"] + night)
    new = [header_record(), {"kind": "fresh", "time": STARTED}]
    resumed = written(tmp_path / "resumed", [*new, before[0], *new, *before, resumed_at, *later, end_record(800)])
    found = read_runs([resumed, write_plausible(tmp_path / "plain")])
    assert [reading.window for reading in found.runs[0].readings] == [10 * (i + 1) for i in range(80)]
    at = [[run.position(run.readings[k], "time") for k in (0, 39, 79)] for run in found.runs]
    assert at[0] == pytest.approx(at[1])  # as if nothing had stopped it
    last = found.runs[1].readings[-1]
    assert at[1][2] == pytest.approx(last.time - STARTED - 800 * last.metrics["cost/seconds_per_window"])
    assert [row[5] for row in run_rows(found)][1:] == ["1 h 10 min"] * 2
    assert "A (small language model): restarted 1 time" in found.notices
    assert "A (small language model): 1 earlier run in the same folder left out" in found.notices


def test_noise_scales_in_two_metrics_have_no_common_figure(tmp_path: Path) -> None:
    setup = header_record()["setup"]
    assert "<h2>Noise scale (sequences)</h2>" in comparison_page(compared(tmp_path / "one", {}, {}))
    found = compared(tmp_path, {}, {"setup": setup | {"metric": "sign"}})
    assert "<h2>Noise scale (sequences)</h2>" not in comparison_page(found)
    assert ("metric", "euclidean (A); sign (B)") in [*setting_rows(found)]


def test_runs_without_their_units_are_compared_by_steps(tmp_path: Path) -> None:
    found = compared(tmp_path, {}, {"metrics": {"run/units_seen": None}})
    assert found.by == "steps"
    assert [*beside_rows(found)][1][2] == "–"
    assert found.beside(found.runs[1], found.runs[0], "loss", "steps") is not None


def test_runs_that_have_no_place_in_common_are_not_extrapolated(tmp_path: Path) -> None:
    apart = compared(tmp_path, {"n": 2}, {"batch": 1000.0, "n": 2})
    assert apart.beside(apart.runs[1], apart.runs[0], "loss", "units") is None
    assert "At equal sequences" not in summary(apart).headline + summary(apart).detail


def test_one_evaluation_one_reading_other_units_and_other_models_are_refused(tmp_path: Path) -> None:
    good = write_plausible(tmp_path / "good", n=20)
    one = write_plausible(tmp_path / "one", n=1)
    with pytest.raises(ValueError, match=r"got 1; left out: .*one holds one reading yet: train on, until it holds two"):
        read_runs([good, one])
    records = [reading_record(i, 20, batch=16.0) for i in range(20)]
    records[1:] = [with_metrics(record, {"loss": None}) for record in records[1:]]
    once = written(tmp_path / "once", [header_record(), *records])
    with pytest.raises(ValueError, match="loss is compared between two evaluations or more of each run, and these"):
        read_runs([good, once])
    tokens = write_plausible(tmp_path / "tokens", n=20, unit="tokens")
    with pytest.raises(ValueError, match=r"different units \(A: sequences, B: tokens\): log all in one, by unit="):
        read_runs([good, tokens])
    wide = write_plausible(tmp_path / "wide", n=20, setup=header_record()["setup"] | {"parameters": 5_000_000})
    with pytest.raises(ValueError, match=r"\(A: 1,234,567, B: 5,000,000 parameters\).* or pass --any-model"):
        read_runs([good, wide])
    assert read_runs([good, wide], any_model=True).loss == "loss"


def test_runs_of_one_name_are_told_apart(tmp_path: Path) -> None:
    found = read_runs([write_plausible(tmp_path / rate / "seed-0", n=5) for rate in ("lr-1", "lr-2")])
    assert [run.name for run in found.runs] == ["A (lr-1: seed-0)", "B (lr-2: seed-0)"]
    assert [row[0] for row in run_rows(found)][1:] == ["A (lr-1: seed-0)", "B (lr-2: seed-0)"]


def test_long_runs_are_joined_and_their_values_averaged(tmp_path: Path) -> None:
    """2,500 readings become 834 of three each: the mean of what they hold, so noise falls and no value is lost."""
    long, plain = (write_plausible(tmp_path / name, n=n, batch=4.0) for name, n in (("long", 2500), ("plain", 900)))
    a, b = read_runs([long, plain]).runs
    assert [len(run.readings) for run in (a, b)] == [834, 900]
    assert a.readings[-1].window == 25_000
    logged = read_run(long).readings
    assert a.readings[-1].metrics["loss"] == pytest.approx(sum(r.metrics["loss"] or 0 for r in logged[-3:]) / 3)


def test_a_clock_that_was_set_back_moves_no_reading_back(tmp_path: Path) -> None:
    records = [reading_record(i, 9, status="resolved") for i in range(9)]
    records[5]["time"] -= 1000
    found = read_runs(
        [written(tmp_path / "a", [header_record(), *records]), write_plausible(tmp_path / "b")], by="time"
    )
    places = [at for at, _ in found.runs[0].placed("time")]
    assert len(places) == 8
    assert places == sorted(places)
