"""`--json` of report, watch and compare: one schema, from which a program picks the right next run."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest

from sonde.cli import main
from sonde.runs.reader import read_run
from sonde.version import __version__
from tests.runs.compare.plausible_runs import write_plausible
from tests.runs.report.plausible_policy import write_policy_run
from tests.runs.report.plausible_run import header_record, reading_record, with_metrics, write_run, written

ADAMW = {"name": "AdamW", "lr": 1e-3, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1}
OF_A_RUN = {
    "name", "log", "began", "ended", "remarks", "unit", "batch", "steps", "units", "seconds", "b_simple",
    "b_simple_average", "loss", "metrics", "alerts", "panels", "decision", "why_none",
}  # fmt: skip


def printed(capsys: pytest.CaptureFixture[str], *command: object) -> dict[str, Any]:
    assert main([str(word) for word in command]) == 0
    out = capsys.readouterr().out
    assert out.count("\n") == 1
    found: dict[str, Any] = json.loads(out, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    return found


@pytest.fixture
def runs(tmp_path: Path) -> list[Path]:
    return [write_plausible(tmp_path / f"batch-{b:g}", batch=b, n=round(1280 / b)) for b in (4.0, 16.0, 64.0)]


def test_a_run_is_the_same_object_in_each_command_and_advise_says_the_same(
    capsys: pytest.CaptureFixture[str], runs: list[Path]
) -> None:
    from_report, from_watch, from_compare = (
        printed(capsys, *command, "--json")["runs"][0]
        for command in (("report", runs[0]), ("watch", *runs), ("compare", *runs))
    )
    assert from_report.keys() == OF_A_RUN
    assert from_watch.pop("seconds_since_written") >= 0
    assert from_compare.pop("letter") == "A"
    assert from_report == from_watch == from_compare
    last = read_run(runs[0]).readings[-1]
    assert [from_report[name] for name in ("name", "unit", "batch", "steps", "units", "seconds", "ended")] == [
        "batch-4", "sequences", 4.0, 3200, 12_800.0, pytest.approx((5.3 - 0.0021) * 3200), "closed"
    ]  # fmt: skip
    now = last.now
    assert from_report["b_simple"] == {
        "status": "resolved", "value": now.ratio, "low": now.low, "high": now.high, "reason": ""
    }  # fmt: skip
    assert from_report["loss"]["value"] == last.metrics["loss"]
    assert from_report["panels"][0]["tiles"][2]["value"] == "4"
    for logs, decision in (
        (runs[:1], from_report["decision"]),
        (runs, printed(capsys, "compare", *runs, "--json")["decision"]),
    ):
        advised = printed(capsys, "advise", *logs, "--json")
        assert (advised.pop("sonde"), advised.pop("remarks")) == (__version__, "")
        command = decision["command"] if decision["kind"] == "time" else ""  # in place of one that is `sonde advise`
        assert advised == decision | {"command": command}


def test_what_compare_prints_is_in_it(capsys: pytest.CaptureFixture[str], runs: list[Path], tmp_path: Path) -> None:
    found = printed(capsys, "compare", *runs, "--json", "--out", tmp_path / "page.html")
    assert not (tmp_path / "page.html").exists()
    assert found["lowest"] == {"units": "C", "steps": "C", "time": "C"}
    assert [(d["run"], d["minus"], d["name"]) for d in found["differences"]] == [("B", "A", "loss"), ("C", "A", "loss")]
    at_steps = found["differences"][1]["steps"]
    assert at_steps["value"] == pytest.approx(-0.30, abs=0.02)
    assert at_steps["low"] < at_steps["value"] < at_steps["high"] < 0
    common = found["common_loss"]
    assert common["reached"].keys() == {"A", "B", "C"}
    assert common["reached"]["C"]["seconds"] < common["reached"]["B"]["seconds"] < common["reached"]["A"]["seconds"]


def test_bounds_runs_without_a_reading_and_policies_are_json_too(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    bound = [reading_record(0, 1, status="lower_bound"), reading_record(1, 2, status="lower_bound")]
    logs = [written(tmp_path / "bound", [header_record(), *bound]), written(tmp_path / "empty", [header_record()])]
    lower, empty, policy = printed(capsys, "watch", *logs, write_policy_run(tmp_path / "policy", 12), "--json")["runs"]
    assert [lower["b_simple"][name] for name in ("status", "value", "high")] == ["lower_bound", None, None]
    assert lower["b_simple"]["low"] > 0
    assert (empty["batch"], empty["b_simple"], empty["loss"], empty["decision"]) == (None, None, None, None)
    assert "has no reading of the noise scale" in empty["why_none"]
    assert policy["panels"][0]["badge"] == "Entropy is falling"
    assert policy["unit"] == "prompts"
    assert main(["report", str(tmp_path / "empty"), "--json"]) == 2
    assert "holds no reading yet" in capsys.readouterr().err
    (tmp_path / "branches.json").write_text("{}")
    assert main(["report", str(tmp_path), "--json"]) == 2
    assert f"are JSON already: read {tmp_path / 'branches.json'}" in capsys.readouterr().err
    assert main(["watch", str(tmp_path / "bound"), "--json", "--serve"]) == 2
    assert "--json prints the runs once and ends" in capsys.readouterr().err


def test_report_has_the_numbers_of_its_figures_without_bokeh_and_without_a_page(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "bokeh", None)
    found = printed(capsys, "report", write_run(tmp_path, 60), "--json")
    assert [path.name for path in tmp_path.iterdir()] == ["records.jsonl"]
    run = read_run(tmp_path)
    assert [r["metrics"] for r in found["readings"]] == [dict(r.metrics) for r in run.readings]
    assert [r["units"] for r in found["readings"]] == [640.0 * (i + 1) for i in range(60)]
    assert found["groups"]["embed"]["b_simple"] == run.readings[-1].groups["embed"].b_simple


# A program that sees nothing else.

CRITICAL, PROGRESS, LOGGED = 100.0, 3.0, 66.7 * 1.5  # the last: the logs' average, times the factor of AdamW
"""Of the trainings below: the critical batch size, and the exponent of the loss."""


def loss_after(steps: float, batch: float) -> float:
    """By the law: a step of this batch brings as much as B/(B + B_crit) steps of all there is."""
    return 2.0 + PROGRESS * (1 + steps / (1 + CRITICAL / batch)) ** -0.4


def seconds(batch: float) -> float:
    """Of a step: the device is full from 128 sequences on."""
    return 0.1 * max(batch / 128, 1.0) + 0.001 * batch


def train(folder: Path, batch: float, *, n: int = 40, until: float = 400.0) -> Path:
    """The log of a training that ends at so many seconds."""
    setup = header_record()["setup"] | {"ranks": 1, "optimizer_settings": [ADAMW]}
    gap, records = max(round(until / seconds(batch) / n), 1), [header_record(run=folder.name, setup=setup)]
    for i in range(n):
        reading = reading_record(i, n, batch=batch, log_every=gap, status="resolved", groups=())
        window = reading["window"]
        middle = loss_after(window - gap / 2, batch)
        noise = {"gns/b_simple": 100.0, "gns/b_simple_low": 90.0, "gns/b_simple_high": 110.0}
        average = {"gns/b_simple_average": 66.7, "gns/b_simple_average_low": 60.0, "gns/b_simple_average_high": 74.0}
        speed = {"run/units_per_second": batch / seconds(batch), "loss": middle}
        time = header_record()["time"] + window * seconds(batch)
        records.append(with_metrics(reading, noise | average | speed) | {"time": time, "pieces": {"per_window": 1}})
    return written(folder, records)


def pick(found: dict[str, Any]) -> tuple[float, float | None]:
    """The batch and the learning rate of the next run, from the object that `sonde compare --json` prints."""
    decision = found["decision"]
    if not decision["changes"]:
        fastest = min(found["runs"], key=lambda run: found["common_loss"]["reached"][run["letter"]]["seconds"])
        return fastest["batch"], None
    change = decision["changes"][0]
    [rate] = [s["then"] for s in change["rates"][0]["settings"] if s["name"] == "learning rate"]
    return change["plan"]["batch"], rate


@pytest.mark.parametrize(
    ("sizes", "fastest", "picked", "rate"),
    [
        ((8, 32, 128, 512), 128, 128, None),  # there is no better one
        (
            (16, 32, 256, 512),
            32,
            64,
            1e-3 * math.sqrt((1 + LOGGED / 32) / (1 + LOGGED / 64)),
        ),  # it lies between those that were tried
        ((8, 16, 512), 16, 32, 1e-3 * math.sqrt((1 + LOGGED / 16) / (1 + LOGGED / 32))),
    ],
)
def test_a_program_picks_the_right_next_run(
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    sizes: tuple[int, ...],
    fastest: int,
    picked: int,
    rate: float | None,
) -> None:
    """Of all sizes, 64 and 128 take the least time to a loss, by the law and the clock above: 0.42 and 0.41."""
    logs = [train(tmp_path / f"batch-{size}", size) for size in sizes]
    target = max(loss_after(400 / seconds(size), size) for size in sizes)

    def time_to(batch: float) -> float:
        progress = (PROGRESS / (target - 2.0)) ** 2.5 - 1
        return progress * (1 + CRITICAL / batch) * seconds(batch)

    found = printed(capsys, "compare", *logs, "--json", "--by", "time")
    reached = {run["batch"]: found["common_loss"]["reached"][run["letter"]]["seconds"] for run in found["runs"]}
    assert reached == {size: pytest.approx(time_to(size), rel=0.1) for size in sizes}
    assert min(reached, key=lambda batch: reached[batch]) == fastest == min(sizes, key=time_to)
    assert pick(found) == (picked, pytest.approx(rate))
    assert time_to(picked) <= min(map(time_to, sizes))
