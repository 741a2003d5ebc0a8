"""Several logs read together: what is said of them, against logs whose differences are known."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from sonde.runs.compare.beside import noise_at_equal_loss, noise_beside, quantities
from sonde.runs.compare.page import comparison_page
from sonde.runs.compare.side_by_side import By, Comparison, read_runs
from sonde.runs.compare.words import beside_rows, run_rows, sentences, setting_rows, summary
from tests.runs.compare.plausible_runs import write_plausible
from tests.runs.report.plausible_policy import policy_header, policy_record, write_policy_run
from tests.runs.report.plausible_run import (
    STARTED,
    end_record,
    header_record,
    reading_record,
    with_metrics,
    written,
)


def compared(tmp_path: Path, *options: dict[str, Any], **how: Any) -> Comparison:
    """Runs with these options, in folders named run0, run1, …"""
    return read_runs([write_plausible(tmp_path / f"run{i}", **each) for i, each in enumerate(options)], **how)


def grown(units: float) -> float:
    return 20 * math.sqrt(1 + units / 500)


def test_a_difference_that_begins_in_the_middle_is_dated(tmp_path: Path) -> None:
    """80 readings of 160 sequences: the noise scale is 1.8 times as large from 6,400 on, and exactly alike before."""
    found = compared(tmp_path, {}, {"noise": lambda units: grown(units) * (1.8 if units >= 6400 else 1.0)})
    said = sentences(found)
    # ± 20 % in logs is log 1.2 = 0.182 either way, so √2 · 0.182 = 0.258 for the ratio.
    assert said[0] == (
        "B's noise scale is 1.80 (1.39 to 2.33) times A's at 12,800 sequences, and larger at each reading since 6,400 "
        "sequences."
    )
    beside = noise_beside(found.runs[1], found.runs[0], "units")
    assert beside is not None
    assert (beside.since, beside.at) == (6400.0, 12800.0)


def test_runs_alike_are_not_told_apart(tmp_path: Path) -> None:
    found = compared(tmp_path, {}, {})
    assert sentences(found)[0] == (
        "B's noise scale is 1 (0.773 to 1.29) times A's at 12,800 sequences, which cannot be distinguished from 1."
    )

    assert sentences(found)[1].startswith("B's loss minus A's is ")


def test_three_batches_are_judged_together(tmp_path: Path) -> None:
    """One noise scale at equal units, 4 times as many steps for each smaller batch."""
    found = compared(tmp_path, {"batch": 4.0, "n": 320}, {"batch": 16.0}, {"batch": 64.0, "n": 20})
    shown = summary(found)
    assert shown.headline == (
        "At equal loss, the noise scale at batch 64 is 0.989 (0.764 to 1.28) times that at 4. If it depends on the "
        "batch, then by less than 2 times."
    )
    assert (
        "At equal sequences, C's loss is the lowest: A's is 0.00361 (−0.00866 to 0.0159) higher, which" in shown.detail
    )
    assert "At equal steps, C's loss is the lowest: B's is 0.128 (" in shown.detail
    assert shown.action == f"For the next batch: sonde advise {tmp_path / 'run2'}"  # compare has no law of its own


def test_a_larger_batch_whose_loss_is_worse_is_not_advised(tmp_path: Path) -> None:
    """Four times the batch, 8 times the noise scale, a loss that is higher at equal sequences and at equal steps."""
    options: list[dict[str, Any]] = [{"batch": 4.0, "n": 320}]
    options.append({"batch": 16.0, "noise": lambda u: 8 * grown(u), "loss": lambda u: 1.6 + 4 * (u / 4) ** -0.3})
    shown = summary(compared(tmp_path, *options))
    assert shown.headline.endswith(" It depends on the batch here.")
    best = "At equal sequences, A's loss is the lowest: B's is 0.2"
    assert best in shown.detail
    assert "At equal steps, A's loss is the lowest: B's is 0.1" in shown.detail
    assert shown.action == f"For the next batch: sonde advise {tmp_path / 'run0'}"
    alike = summary(compared(tmp_path / "alike", {}, {"loss": lambda u: 1.5001 + 4 * u**-0.3}))
    assert "higher, which cannot be distinguished from 0." in alike.detail


def test_equal_loss_finds_noise_scales_at_other_places(tmp_path: Path) -> None:
    """B needs twice the sequences for each loss and has the noise scale of half its sequences: they are alike."""
    slow = {"noise": lambda u: grown(u / 2), "loss": lambda u: 1.5 + 4 * (u / 2) ** -0.3}
    found = compared(tmp_path, {"noise": grown}, slow)
    a, b = found.runs
    at_units, at_loss = noise_beside(b, a, "units"), noise_at_equal_loss(quantities(found)[0], b, a)
    assert at_units is not None
    assert at_loss is not None
    assert at_units.ratio.ratio == pytest.approx(0.72, abs=0.02)
    assert at_loss.ratio == pytest.approx(1.0, abs=0.03)  # a reading lies within 1.3 % of the last


def test_one_unit_of_two_is_common(tmp_path: Path) -> None:
    """The second log counts tokens of sequences of 32: the same noise scale, and 32 times the batch."""
    per = 32.0
    further: dict[str, float | None] = {"gns/units_per_window_tokens": 16 * per, "gns/b_simple_tokens": 1.0}
    setup = header_record()["setup"]
    a = write_plausible(tmp_path / "a", setup=setup | {"further_units": ["tokens"]}, metrics=further)
    b = write_plausible(
        tmp_path / "b", batch=16 * per, unit="tokens", noise=lambda u: per * grown(u / per), loss=lambda u: 2.0
    )
    found = read_runs([a, b])
    assert found.unit == "tokens"
    assert [run.batch for run in found.runs] == [512.0, 512.0]
    beside = noise_beside(found.runs[1], found.runs[0], "units")
    assert beside is not None
    assert beside.ratio.ratio == pytest.approx(1.0)
    assert beside.at == 12800 * per
    speed = next(each for each in quantities(found) if each.name == "tokens per second")
    assert [speed.of(run, run.readings[-1]) for run in found.runs] == [120 * per, 120.0]
    with pytest.raises(ValueError, match="count different units, sequences and tokens: log both in each"):
        read_runs([write_plausible(tmp_path / "c"), b])


def test_units_are_converted_as_they_were_seen(tmp_path: Path) -> None:
    """Sequences of 32 tokens, and of 128 from the 41st reading on; a log that never says how many is not aligned."""
    setup = header_record()["setup"] | {"further_units": ["tokens"]}
    records = [reading_record(i, 80, batch=16.0, status="resolved") for i in range(80)]
    grow = [
        with_metrics(r, {"gns/units_per_window_tokens": 16.0 * (32 if i < 40 else 128)}) for i, r in enumerate(records)
    ]
    a = written(tmp_path / "a", [header_record(setup=setup), *grow, end_record(800)])
    b = write_plausible(tmp_path / "b", unit="tokens")
    run = read_runs([a, b]).runs[0]
    assert [run.position(run.readings[k], "units") for k in (0, 39, 79)] == [160 * 32, 6400 * 32, 6400 * (32 + 128)]
    untold = read_runs([b, written(tmp_path / "c", [header_record(setup=setup), *records])])
    assert untold.by == "steps"
    assert "A run did not log the tokens that it has seen: runs are compared by steps" in untold.notices


def test_each_axis(tmp_path: Path) -> None:
    a, b = (write_plausible(tmp_path / name, batch=batch) for name, batch in (("a", 16.0), ("b", 32.0)))
    axes: tuple[By, ...] = ("units", "steps", "time")
    said = {by: sentences(read_runs([a, b], by=by))[0] for by in axes}
    assert "times A's at 12,800 sequences" in said["units"]
    assert "times A's at step 800, and larger at each reading since step " in said["steps"]
    assert "and larger at each reading since " in said["time"]
    assert " min" in said["time"]
    rows = list(beside_rows(read_runs([a, b])))
    assert rows[0] == ("", "", "at equal sequences", "at equal steps", "at equal time")
    assert rows[1][:3] == ("B", "noise scale", "1 (0.773 to 1.29)\N{NO-BREAK SPACE}×")
    assert rows[-1] == ("B", "sequences per second", *["1 (1 to 1)\N{NO-BREAK SPACE}×"] * 3)


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
    said = sentences(found)
    assert "B's entropy minus A's is −0.300 (−0.300 to −0.300)." in said
    assert summary(found).action == "Act now: the policy has all but stopped exploring."
    assert "B has the least entropy, 0.12" in summary(found).detail
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
        f"Left out: {empty} holds no reading yet",
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
    written(tmp_path / "policy", [policy_header(), policy_record(0), end_record(1)])
    silent = write_plausible(tmp_path / "silent", n=3, loss=None)
    with pytest.raises(ValueError, match="have measured nothing in common"):
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
    assert [row[5] for row in run_rows(found)][1:] == ["1 h 10 min"] * 2
    assert "A (small language model): restarted 1 time" in found.notices
    assert "A (small language model): 1 earlier run in the same folder left out" in found.notices


def test_noise_scales_that_are_not_the_same_quantity_are_not_compared(tmp_path: Path) -> None:
    setup = header_record()["setup"]
    found = compared(tmp_path, {}, {"setup": setup | {"metric": "sign"}})
    assert "Noise scales in different metrics (A: euclidean, B: sign) are not compared" in found.notices
    batches = compared(tmp_path / "batches", {}, {"batch": 64.0, "setup": setup | {"metric": "sign"}})
    assert "noise scale" not in f"{summary(batches).headline} {summary(batches).detail}"
    assert "<h2>Noise scale</h2>" not in comparison_page(batches)
    assert not any("noise scale" in said for said in sentences(found))
    assert all(row[1] != "noise scale" for row in beside_rows(found))
    normed = compared(tmp_path / "bn", {}, {"batch": 64.0, "setup": setup | {"batch_norms": 3}})
    assert any("B_simple depends on the size of the pieces" in notice for notice in normed.notices)


def test_runs_without_their_units_are_compared_by_steps(tmp_path: Path) -> None:
    found = compared(tmp_path, {}, {"metrics": {"run/units_seen": None}})
    assert found.by == "steps"
    assert "times A's at step 800, which" in sentences(found)[0]


def test_a_run_that_has_only_begun_is_compared_as_far_as_it_goes(tmp_path: Path) -> None:
    found = compared(tmp_path, {}, {"n": 1, "end": False})
    assert sentences(found)[0].startswith("B's noise scale is 1 (0.773 to 1.29) times A's at 160 sequences")
    apart = compared(tmp_path / "apart", {"n": 2}, {"batch": 1000.0, "n": 1})  # no common part
    assert not sentences(apart)
    assert summary(apart).headline == "The runs cannot be compared yet: they have too little in common."


def test_no_batch_is_advised_before_a_run_has_a_verdict(tmp_path: Path) -> None:
    """The noise scale grows fast in the first 100 steps: the report's own words."""
    early = summary(compared(tmp_path, {"n": 5}, {"n": 5, "batch": 64.0}))
    assert early.action == "Train on: nothing can be advised yet."


def test_whole_runs_speak_where_the_noise_scales_at_the_end_are_not_known(tmp_path: Path) -> None:
    """Averages of runs that are as long as each other; of runs that are not, they say nothing."""
    unknown: dict[str, float | None] = {f"gns/b_simple{end}": None for end in ("", "_low", "_high")}
    options: list[dict[str, Any]] = [{"metrics": unknown}, {"metrics": unknown, "batch": 64.0, "n": 20}]
    as_long = summary(compared(tmp_path, *options))
    assert as_long.headline.startswith("Over whole runs, the noise scale at batch 64 is 1 (0.")
    longer = summary(compared(tmp_path / "longer", options[0], options[1] | {"n": 40}))
    assert "Over whole runs" not in longer.headline + longer.detail


def test_a_clock_that_was_set_back_moves_no_reading_back(tmp_path: Path) -> None:
    records = [reading_record(i, 9, status="resolved") for i in range(9)]
    records[5]["time"] -= 1000
    found = read_runs(
        [written(tmp_path / "a", [header_record(), *records]), write_plausible(tmp_path / "b")], by="time"
    )
    places = [at for at, _ in found.runs[0].series(lambda *_: 1.0, "time")]
    assert len(places) == 8
    assert places == sorted(places)
