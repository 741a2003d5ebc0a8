"""`sonde advise`: the same log gives the same decision, at the end of a run, in its report, and in the terminal."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import nn

import sonde
from sonde.batch_size.last_words import decision_of, said_at_end
from sonde.cli import main
from sonde.decision.kept_trial import TRIAL_NAME, trial_text
from sonde.decision.proxy import FACTORS, IN_RL, OF_BRANCHES
from sonde.log.sinks import JsonlSink
from sonde.runs.report.verdicts import verdict_panels
from sonde.runs.report.write import write_report
from sonde.runs.watch.follow import FollowedRun
from sonde.runs.watch.terminal import terminal_view
from tests.batch_size.loops import attached, batch, mean_loss
from tests.decision.known import ADAMW, tried
from tests.runs.report.plausible_policy import policy_header, policy_record
from tests.runs.report.plausible_run import Record, header_record, reading_record, with_metrics, write_run, written
from tests.runs.report.visible_text import visible_text

GROUP = {"name": "AdamW", "lr": 1e-3, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1}


def header(**more: Any) -> Record:
    setup = header_record()["setup"] | {"optimizer_kind": ADAMW, "optimizer_settings": [GROUP], "trainer": "Lightning"}
    return header_record(setup=setup | more)


def run(folder: Path, **options: Any) -> str:
    return str(write_run(folder, header=options.pop("header", None) or header(), **options))


def asked(capsys: pytest.CaptureFixture[str], *argv: str) -> Any:
    assert main(["advise", *argv, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_the_table_is_that_of_the_log(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The run's average is 28.3, 4 · √50, so B_crit is 1.5 times that; steps and units are computed again here."""
    folder = run(tmp_path / "run")
    found = asked(capsys, folder, "--cost-per-hour", "12")
    average = sonde.read_run(folder).readings[-1].average.ratio
    assert average is not None
    for_run, critical = found["advice"]["for a run like this one"], average * (FACTORS[ADAMW, "euclidean"].median or 0)
    assert for_run["scope"]["critical"]["middle"] == pytest.approx(critical)
    for plan in for_run["plans"]:
        steps = 600 * (1 + critical / plan["batch"]) / (1 + critical / 64)
        assert plan["steps"]["middle"] == pytest.approx(steps)
        assert plan["units"]["middle"] == pytest.approx(steps * plan["batch"])
        assert plan["batch"] == plan["ranks"] * plan["accumulation"] * plan["micro_batch"]
    now = for_run["present"]
    step = 64 / 120 - 0.0021  # at 120 units a second, of which sonde took 2.1 ms a step
    assert now["seconds"]["middle"] == pytest.approx(600 * step)
    assert now["money"]["middle"] == pytest.approx(600 * step / 3600 * 12)
    from_here_on = found["advice"]["from here on"]
    assert from_here_on["scope"]["factor"]["median"] == OF_BRANCHES[ADAMW].median
    assert from_here_on["present"]["steps"]["middle"] == 1000


def test_every_page_says_the_same_decision(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """advise, the report, its panel, and watch, of one log."""
    for k, batch_size in enumerate((8.0, 64.0, 1024.0)):
        folder = run(tmp_path / str(k), batch=batch_size)
        found = asked(capsys, folder)
        said = found["sentence"].replace("\N{NO-BREAK SPACE}", " ")
        [panel] = verdict_panels(sonde.read_run(folder))
        assert (panel.kind, panel.badge, panel.action) == (found["kind"], found["badge"], found["sentence"])
        assert said in visible_text(write_report(Path(folder))).replace("\N{NO-BREAK SPACE}", " ")
        console = Console(file=io.StringIO(), width=1000)
        console.print(terminal_view([FollowedRun(Path(folder))], console))
        watched = console.file.getvalue().replace("\N{NO-BREAK SPACE}", " ")  # type: ignore[attr-defined]
        assert said.partition(": ")[2] in watched  # after the badge, its words are not said again
        assert main(["advise", folder]) == 0
        out = " ".join(capsys.readouterr().out.replace("\N{NO-BREAK SPACE}", " ").split())
        assert out.startswith(said)
        again = asked(capsys, folder + "/records.jsonl")
        assert again | {"command": ""} == found | {"command": ""}


def test_the_last_line_of_a_run_is_what_advise_says_of_its_log(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also where the last window of each epoch is short: one micro-batch of two."""
    generator = torch.Generator().manual_seed(0)
    torch.manual_seed(7)
    model = nn.Sequential(nn.Linear(12, 8), nn.Tanh(), nn.Linear(8, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95))
    with attached(model, optimizer, log=sonde.RunLog(JsonlSink(tmp_path)), trainer="Megatron", every=1) as probe:
        assert decision_of(probe, probe.reading()).kind == "wait"
        for step in range(1, 201):
            for _ in range(1 if step % 20 == 0 else 2):
                mean_loss(model, *batch(2, generator)).backward()
            optimizer.step()
            optimizer.zero_grad()
        reading = probe.reading()
        lines, decision = said_at_end(probe, reading), decision_of(probe, reading)
        (tmp_path / TRIAL_NAME).write_text(trial_text(tried((2, 0.010), (8, 0.010)), decision.facts))
        with_a_trial = decision_of(probe, reading)
    assert with_a_trial.sentence == asked(capsys, str(tmp_path))["sentence"] != decision.sentence
    (tmp_path / TRIAL_NAME).unlink()
    setup = sonde.read_run(tmp_path).header.setup
    assert (setup["trainer"], setup["optimizer_settings"][0]["betas"]) == ("Megatron", [0.9, 0.95])
    found = asked(capsys, str(tmp_path))
    assert lines[0] == str(reading)
    assert lines[-1] == f"advice  {found['sentence']} More: sonde advise {tmp_path}"
    assert (decision.kind, decision.trainer) == (found["kind"], "Megatron")
    assert decision.leading is not None
    assert (decision.leading.present.accumulation, decision.leading.present.micro_batch) == (2, 2)
    assert not re.findall(r"(?:batch of|now|best)\s+\d+\.\d", main_out(capsys, str(tmp_path)))


def main_out(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    assert main(["advise", *argv]) == 0
    return capsys.readouterr().out


def test_one_wait_is_said_in_one_sentence(tmp_path: Path) -> None:
    """The page said two, of steps and of windows, beside each other."""
    early = write_report(Path(run(tmp_path / "early", n_readings=6)))
    late = write_report(Path(run(tmp_path / "late", status="lower_bound")))
    for page in (early, late):
        waits = re.findall(r"train about [\d,]+ more|after [\d,]+ more windows", visible_text(page), re.I)
        assert len(waits) <= 1, waits


def test_what_is_advised_comes_with_its_flags_and_rates(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = run(tmp_path / "run", batch=8.0, pieces={"per_window": 2})
    found = asked(capsys, folder, "--ranks-at-most", "8")
    best = found["advice"]["for a run like this one"]["best"]
    assert found["kind"] == "larger"
    n, ranks = best["accumulation"], best["ranks"]
    loader = f"DataLoader(batch_size={best['micro_batch']})"
    change = found["changes"][0]
    assert change["how"][0] == f"Trainer(devices={ranks}, accumulate_grad_batches={n}), {loader}"
    [row] = change["rates"]
    rate = {s["name"]: s["then"] for s in row["settings"]}["learning rate"]
    critical = found["advice"]["for a run like this one"]["scope"]["critical"]["middle"]
    assert rate == pytest.approx(1e-3 * ((1 + critical / 8) / (1 + critical / best["batch"])) ** 0.5)
    shown = main_out(capsys, folder, "--trainer", "deepspeed", "--ranks-at-most", "8")
    assert f'"train_batch_size": {best["batch"]:.0f}' in shown
    assert f"To set a batch of {best['batch']:.0f} sequences (DeepSpeed):" in shown
    assert asked(capsys, folder, "--batch", "24")["changes"][0]["plan"]["batch"] == 24.0


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--budget", "0.01", "--cost-per-hour", "12"], "no batch keeps the budget of 0.01: the cheapest costs up to"),
        (["--budget", "5"], "a budget needs prices: pass --cost-per-hour"),
        (["--budget", "5", "--aim", "cheapest"], "leave out one of two"),
        (["--ranks-at-most", "0"], "--ranks-at-most must be positive and finite, got 0"),
        (["--least", "1000"], "--least 1000 is more than the batch of this run, 64"),
        (["--trainer", "megatorn"], "--trainer must be one of plain loop, transformers, "),
    ],
)
def test_what_contradicts_itself_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], argv: list[str], said: str
) -> None:
    assert main(["advise", run(tmp_path / "run"), *argv]) == 2
    out, err = capsys.readouterr()
    assert (out, said in err) == ("", True), err


def test_logs_without_readings_of_another_version_and_of_other_models_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one, empty = run(tmp_path / "one"), run(tmp_path / "empty", n_readings=0)
    other = run(tmp_path / "other", header=header() | {"schema": 3})
    for folders, said in (
        ([empty], "has no reading of the noise scale"),
        ([other], "was written with record schema 3"),
        ([one, empty], "has no reading of the noise scale"),
        ([one, f"{one}/records.jsonl"], "a log is given twice"),
        ([one, run(tmp_path / "model", header=header(parameters=5))], "got different models: 1,234,567 parameters and"),
        ([one, run(tmp_path / "unit", header=header() | {"unit": "rows"})], "got different units: sequences and rows"),
        ([one, run(tmp_path / "kind", header=header(optimizer_kind="SGD (β = 0)"))], "got different optimizers: "),
    ):
        assert main(["advise", *folders]) == 2
        out, err = capsys.readouterr()
        assert (out, said in err) == ("", True), err


def test_several_logs_of_one_model_give_one_decision(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folders = [run(tmp_path / f"batch-{n}", batch=float(n), pieces={"per_window": 2}) for n in (8, 16, 32, 64)]
    found = asked(capsys, *folders)
    assert list(found["advice"]) == ["for a run like this one", "from here on"]
    assert [t["micro_batch"] for t in found["facts"]["curve"]["timings"]] == [4, 8, 16, 32]
    average = sonde.read_run(folders[0]).readings[-1].average
    pooled = found["facts"]["average"]
    assert pooled["ratio"] == pytest.approx(average.ratio)  # all four are alike, and known twice as well together
    assert pooled["high"] / pooled["low"] == pytest.approx(((average.high or 0) / (average.low or 1)) ** 0.5)


def test_a_log_that_a_crash_damaged_is_said_to_be(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = run(tmp_path / "run", end=False)
    with (tmp_path / "run" / "records.jsonl").open("a") as log:
        log.write('{"kind":"reading","time":17')
    assert ": a crash damaged the log: " in asked(capsys, folder)["remarks"]


def test_where_there_is_no_verdict_nothing_is_advised(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = run(tmp_path / "run", n_readings=3)
    assert main_out(capsys, folder).startswith("No verdict yet on the batch of 64 sequences.")
    assert asked(capsys, folder)["advice"] == {}


def test_in_rl_the_log_of_a_policy_is_enough(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    more = {"trainer": "TRL", "completions_per_prompt": 4, "optimizer_kind": ADAMW, "optimizer_settings": [GROUP]}
    records = [policy_header(setup=policy_header()["setup"] | more), *map(policy_record, range(12))]
    found = asked(capsys, str(written(tmp_path, records)), "--batch", "16")
    known = sonde.read_run(tmp_path).policy[-1].metrics["gns_prompts/b_simple"] or 0.0
    critical = found["advice"]["from here on"]["scope"]["critical"]["middle"]
    assert critical == pytest.approx((IN_RL["Adam"].median or 0) * known)
    assert "= 64, in completions" in "\n".join(found["changes"][0]["how"])
    assert "twice the completions to each prompt would cut the noise of a step by 35" in "\n".join(found["notes"])


def test_of_a_run_whose_batch_grew_nothing_is_said_but_what_follows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    seen, grown = 0.0, []
    for i in range(60):
        seen += 10 * (16.0 if i < 30 else 64.0)
        grown.append(with_metrics(reading_record(i, 60), {"run/units_seen": seen}))
    folder = str(written(tmp_path / "grown", [header(), *grown]))
    found = asked(capsys, folder)
    assert list(found["advice"]) == ["from here on"]
    assert found["notes"][0] == "The batch changed during this run: advice is about what follows."
    [panel] = verdict_panels(sonde.read_run(folder))
    assert "like this one" not in panel.headline + panel.action
    assert main(["advise", folder, "--budget", "9", "--cost-per-hour", "12"]) == 2
    assert "its batch changed" in capsys.readouterr().err
