"""`sonde advise`: the same log gives the same advice, with numbers that a test computes anew."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from sonde.batch_size.stats.critical_batch import Estimate
from sonde.batch_size.stats.proxy import FACTORS, IN_RL, OF_BRANCHES
from torch import nn

import sonde
from sonde.cli import main
from sonde.log.sinks import JsonlSink
from sonde.runs.report.verdicts import verdict_panels
from tests.batch_size.loops import attached, batch, mean_loss
from tests.runs.report.plausible_policy import policy_header, policy_record
from tests.runs.report.plausible_run import Record, header_record, reading_record, with_metrics, write_run, written

ADAMW = "Adam or AdamW (β = 0.9)"
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
    """The run's average is 28.3, 4 · √50, so B_crit is 1.5 times that; each number is computed again here."""
    folder = run(tmp_path / "run")
    found = asked(capsys, folder, "--ranks-at-most", "16", "--cost-per-hour", "12")
    average = sonde.read_run(folder).readings[-1].average.ratio
    assert average is not None
    for_run = found["advice"]["for a run like this one"]
    critical = average * FACTORS[ADAMW, "euclidean"].median
    assert for_run["critical"]["middle"] == pytest.approx(critical)
    steps_at_infinity, seconds_of_a_piece = 600 / (1 + critical / 64), 64 / 120 / 4  # 8 pieces on 2 ranks
    for plan in for_run["plans"]:
        size = plan["batch"]
        pieces = size / 8
        steps = steps_at_infinity * (1 + critical / size)
        ranks = min(pieces, 16)
        assert plan["steps"]["middle"] == pytest.approx(steps)
        assert plan["units"]["middle"] == pytest.approx(steps * size)
        assert plan["seconds"]["middle"] == pytest.approx(steps * pieces / ranks * seconds_of_a_piece)
        assert plan["money"]["middle"] == pytest.approx(steps * pieces * seconds_of_a_piece * 6 / 3600)
    assert {plan["batch"] for plan in for_run["plans"]} >= {32.0, 64.0, 128.0}
    from_here_on = found["advice"]["from here on"]
    assert found["logged"]["scopes"]["from here on"]["factor"]["median"] == OF_BRANCHES[ADAMW].median
    assert from_here_on["present"]["steps"]["middle"] == 1000
    [panel] = verdict_panels(sonde.read_run(folder))  # the report says the same
    assert panel.action == asked(capsys, folder)["words"]["for a run like this one"]
    assert panel.badge == "About right or too large"


def test_what_is_advised_comes_with_its_flags_and_rates(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = run(tmp_path / "run", batch=8.0)
    kept = asked(capsys, folder)
    assert kept["batch"] is None  # on the same ranks, a larger one takes more time
    assert kept["advice"]["for a run like this one"]["elsewhere"]["batch"] == 32.0
    assert "keep the batch of 8 sequences on 2 ranks: 32 would need 37 % [" in kept["words"]["for a run like this one"]
    assert kept["notes"][-1].startswith("--ranks-at-most N says what more ranks would do")
    found = asked(capsys, folder, "--ranks-at-most", "32")
    best = found["advice"]["for a run like this one"]["best"]
    assert best["batch"] == 32.0
    assert found["batch"] == 32.0
    assert found["how"][0] == "Trainer(devices=32, accumulate_grad_batches=1), DataLoader(batch_size=1)"
    [row] = found["rates"]
    assert {s["name"]: s["then"] for s in row["settings"]}["learning rate"] == pytest.approx(2e-3)
    assert main(["advise", folder, "--trainer", "deepspeed", "--ranks-at-most", "32"]) == 0
    shown = capsys.readouterr().out
    assert "try a batch of 32 sequences: it needs 37 % [" in shown
    assert "To set a batch of 32 sequences (DeepSpeed):" in shown
    assert '"train_batch_size": 32' in shown
    assert asked(capsys, folder, "--batch", "24")["batch"] == 24.0


def test_the_batch_that_is_said_is_the_one_that_is_set(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of 8 micro-batches of 8, on 2 ranks: flags, rate and words are for 16, the nearest batch to 17 that divides."""
    folder = run(tmp_path / "run")
    found, of_16 = asked(capsys, folder, "--batch", "17"), asked(capsys, folder, "--batch", "16")
    said = "17 does not split well into ranks and micro-batches: this sets 16"
    assert (found["batch"], found["rates"], found["how"]) == (16, of_16["rates"], [said, *of_16["how"]])
    huge = asked(capsys, folder, "--batch", "1e12", "--ranks-at-most", str(10**12))
    assert huge["how"][0] == "Trainer(devices=125000000000, accumulate_grad_batches=1), DataLoader(batch_size=8)"
    assert huge["rates"][0]["batch"] == 512  # the rule of Adam ends below 640
    assert main(["advise", folder, "--batch", "100", "--trainer", "nanochat"]) == 0
    shown = capsys.readouterr().out
    assert "nanochat scales rates and weight decay with it by itself" in shown
    assert ("learning rate" in shown, "not known" in shown) == (False, False)


def test_the_same_log_gives_the_same_advice(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = run(tmp_path / "run")
    first = asked(capsys, folder)
    assert asked(capsys, folder + "/records.jsonl") == first


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--budget", "0.01", "--cost-per-hour", "12"], "no batch keeps the budget of 0.01: the cheapest costs up to"),
        (["--budget", "5"], "a budget needs prices: pass --cost-per-hour"),
        (["--budget", "5", "--aim", "cheapest"], "leave out one of the two"),
        (["--ranks-at-most", "0"], "--ranks-at-most must be positive and finite, got 0"),
        (["--trainer", "megatorn"], "--trainer must be one of plain loop, transformers, "),
    ],
)
def test_what_contradicts_itself_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], argv: list[str], said: str
) -> None:
    assert main(["advise", run(tmp_path / "run"), *argv]) == 2
    out, err = capsys.readouterr()
    assert (out, said in err) == ("", True)


def test_a_budget_is_for_a_whole_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, fixed = run(tmp_path / "run"), run(tmp_path / "checkpoint", header=header(fixed_weights=True))
    priced = ["--budget", "9", "--cost-per-hour", "12"]
    found = asked(capsys, folder, *priced, "--ranks-at-most", "16")
    assert list(found["advice"]) == ["for a run like this one"]
    assert found["advice"]["for a run like this one"]["best"]["money"]["high"] <= 9
    assert main(["advise", fixed, *priced, "--units-per-second", "100"]) == 2
    assert "--budget is for a whole run" in capsys.readouterr().err
    at_checkpoint = asked(capsys, fixed)["advice"]
    assert list(at_checkpoint) == ["from here on"]
    assert at_checkpoint["from here on"]["present"]["seconds"] is None  # its windows are not those of training


def test_logs_without_readings_or_of_another_version_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    empty, other = run(tmp_path / "empty", n_readings=0), run(tmp_path / "other", header=header() | {"schema": 3})
    for folder, said in ((empty, "has no reading of the noise scale"), (other, "was written with record schema 3")):
        assert main(["advise", folder]) == 2
        assert said in capsys.readouterr().err


def test_a_log_that_a_crash_damaged_is_said_to_be(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = run(tmp_path / "run", end=False)
    with (tmp_path / "run" / "records.jsonl").open("a") as log:
        log.write('{"kind":"reading","time":17')
    assert asked(capsys, folder)["notes"][0].startswith("The log: a crash damaged the log: ")


def test_where_there_is_no_verdict_nothing_is_advised(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = run(tmp_path / "run", n_readings=3)
    assert main(["advise", folder]) == 0
    assert capsys.readouterr().out.startswith("No verdict yet on the batch of 64 sequences.")
    assert asked(capsys, folder)["advice"] == {}


def test_without_an_optimizer_the_published_range_is_taken(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    unknown = header(optimizer_kind="", optimizer_settings=[], trainer=None)
    found = asked(capsys, run(tmp_path / "run", header=unknown, batch=8.0), "--batch", "32")
    assert found["notes"][0].startswith("The log does not say the optimizer")
    assert asked(capsys, run(tmp_path / "y", batch=8.0, header=unknown))["batch"] is None
    other = asked(capsys, run(tmp_path / "x", header=header(optimizer_kind="X"), batch=8.0))
    assert other["notes"][0].startswith("This optimizer, or this metric, was not in sonde's study")
    assert found["rates"] == []
    assert found["trainer"] == "plain loop"


def test_effective_units_are_counted_as_the_batch_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A batch of 64 that counts as 32 is half as large against the noise scale, and is set as 64."""
    sink = JsonlSink(tmp_path)
    sink.write(header())
    record = reading_record(59, 60)
    sink.write(record | {"metrics": record["metrics"] | {"gns/effective_units": 32.0}})
    sink.close()
    advice = asked(capsys, str(tmp_path))["advice"]["for a run like this one"]
    average = sonde.read_run(tmp_path).readings[-1].average.ratio or 0.0
    assert advice["present"]["batch"] == 64.0
    assert advice["critical"]["middle"] == pytest.approx(1.5 * 2 * average)


def test_in_rl_prompts_and_completions_are_weighed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    more = {"trainer": "TRL", "completions_per_prompt": 4, "optimizer_kind": ADAMW, "optimizer_settings": [GROUP]}
    sink = JsonlSink(tmp_path)
    sink.write(policy_header(setup=policy_header()["setup"] | more))
    for i in range(12):
        sink.write(policy_record(i))
    sink.close()
    found = asked(capsys, str(tmp_path), "--batch", "16")
    advice = found["advice"]["from here on"]
    known = sonde.read_run(tmp_path).policy[-1].metrics["gns_prompts/b_simple"] or 0.0
    assert advice["critical"]["middle"] == pytest.approx(IN_RL["Adam"].median * known)
    assert found["logged"]["unit"] == "prompts"
    assert "= 64, in completions" in found["how"][1]
    told = "\n".join(found["notes"])
    beside = run(tmp_path / "beside", header=header() | {"unit": "prompts"})  # by sonde.attach in a loop of one's own
    assert (
        asked(capsys, beside)["logged"]["scopes"]["for a run like this one"]["factor"]["median"] == IN_RL["Adam"].median
    )
    assert "twice the completions to each prompt would cut the noise of a step by 35" in told
    assert "Reuse" in told


def test_a_real_run_says_its_settings_and_its_advice(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    generator = torch.Generator().manual_seed(0)
    torch.manual_seed(7)
    model = nn.Sequential(nn.Linear(12, 8), nn.Tanh(), nn.Linear(8, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95))
    with attached(model, optimizer, log=sonde.RunLog(JsonlSink(tmp_path)), trainer="Megatron") as probe:
        assert probe.reading().next_batch() == ""
        for _ in range(120):
            for _ in range(2):
                mean_loss(model, *batch(2, generator)).backward()
            optimizer.step()
            optimizer.zero_grad()
        reading = probe.reading()
    setup = sonde.read_run(tmp_path).header.setup
    assert setup["trainer"] == "Megatron"
    assert setup["optimizer_settings"][0].items() >= (GROUP | {"weight_decay": 0.01}).items()
    found = asked(capsys, str(tmp_path))
    said = reading.next_batch(tmp_path)
    assert said.startswith("advice  for a run like this one, ")
    assert said.endswith(f". More: sonde advise {tmp_path}")
    now = Estimate(reading.b_simple, reading.low, reading.high).times(0.5)
    assert reading.average is not None
    counted_half = dataclasses.replace(
        reading, **vars(now), effective_units=(reading.units_per_window or 0.0) / 2, average=reading.average.times(0.5)
    )
    assert counted_half.next_batch(tmp_path) == said
    for scope, sentence in found["words"].items():  # the line at the end says nothing of ranks
        needs = sentence.split("would need ")[-1].split(", which")[0].split(": ")[-1].rstrip(".")
        assert re.search(rf"{scope}, [^;]*{re.escape(needs)}", said)


def test_a_new_run_grows_where_the_study_found_that_it_may(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sgd = run(tmp_path / "sgd", batch=8.0, header=header(optimizer_kind="SGD (β = 0)"))
    adamw, other = run(tmp_path / "adamw", batch=8.0), run(tmp_path / "x", batch=8.0, header=header(optimizer_kind="X"))
    notes = [" ".join(asked(capsys, folder, "--batch", "64")["notes"]) for folder in (sgd, adamw, other)]
    assert "A new run may grow: batches of 8, 16, 32, 64, each for the same number of sequences." in notes[0]
    assert "A constant batch will do: in sonde's study with Adam or AdamW (β = 0.9), one that" in notes[1]
    assert [("9 times in 10" in n, "will do" in n) for n in notes] == [(True, False), (True, True), (False, False)]
    assert "may grow" not in notes[1] + notes[2]
    assert "may grow" not in " ".join(asked(capsys, sgd, "--batch", "8")["notes"])


def test_of_a_run_whose_batch_grew_nothing_is_said_but_what_follows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    records = [reading_record(i, 60) for i in range(60)]
    seen = 0.0
    grown = []
    for i, record in enumerate(records):
        seen += 10 * (16.0 if i < 30 else 64.0)
        grown.append(with_metrics(record, {"run/units_seen": seen}))
    found = asked(capsys, str(written(tmp_path / "grown", [header(), *grown])))
    assert list(found["advice"]) == ["from here on"]
    assert found["notes"][0] == "The batch changed during this run: advice is about what follows."
    [panel] = verdict_panels(sonde.read_run(tmp_path / "grown"))
    assert "like this one" not in panel.headline + panel.detail + panel.action
    assert main(["advise", str(tmp_path / "grown"), "--budget", "9", "--cost-per-hour", "12"]) == 2
    assert "its batch changed" in capsys.readouterr().err
    # A short window at the end of each epoch changes nothing.
    short = [with_metrics(r, {"run/units_seen": 640.0 * (i + 1) - 48 * (i // 20)}) for i, r in enumerate(records)]
    assert "for a run like this one" in asked(capsys, str(written(tmp_path / "short", [header(), *short])))["advice"]
