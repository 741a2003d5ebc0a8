"""What the terminal says of runs that are being written."""

from __future__ import annotations

import io
import os
import re
import time
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from sonde.runs.watch.follow import FollowedRun
from sonde.runs.watch.terminal import terminal_view
from tests.runs.report.plausible_policy import write_policy_run
from tests.runs.report.plausible_run import (
    alert_record,
    end_record,
    header_record,
    reading_record,
    with_metrics,
    write_run,
    written,
)


def _seen(*runs: FollowedRun, width: int = 200, **terminal: Any) -> str:
    console = Console(file=io.StringIO(), width=width, **terminal)
    console.print(terminal_view(runs, console))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def _last_written(folder: Path, *, seconds_ago: float) -> FollowedRun:
    then = time.time() - seconds_ago
    os.utime(folder / "records.jsonl", (then, then))
    return FollowedRun(folder)


def test_a_run_has_its_last_reading_verdict_norm_clip_cost_and_speed(tmp_path: Path) -> None:
    write_run(tmp_path, 60, end=False, alerts=[alert_record(window=900)])
    seen = _seen(_last_written(tmp_path, seconds_ago=130.2))
    for text in (
        "small language model · window 600, after 38,400 sequences · last record 2 min 10 s ago\n",
        "   Time it first  a batch of 64 sequences in micro-batches of 32 takes 25 % of the time if this device is",
        "Noise scale now 205 sequences; between 178 and 243 · Average over the run 28.3 sequences; between 25.1 and "
        "32.9 · Batch size 64 sequences per step\n",
        "  loss 1.712 · Gradient norm 0.651 · 0 % of the windows clipped · measuring takes 0.91 % of the time · "
        "120 sequences a second\n",
        "  ! All ranks seem to train on the same data: check the sampler. (since window 900",
    ):
        assert text in seen.replace("\N{NO-BREAK SPACE}", " ")


def test_a_policy_has_its_entropy(tmp_path: Path) -> None:
    seen = _seen(FollowedRun(write_policy_run(tmp_path, 24)))
    assert "adding by GRPO · step 116 · ended: training ended\n" in seen
    assert " Entropy is falling  Watch the reward, and act if it no longer rises.\n" in seen
    assert "Last measured entropy 0.429" in seen


def test_a_run_without_a_reading_and_one_that_was_resumed(tmp_path: Path) -> None:
    written(tmp_path / "a", [header_record(run="just [begun]")])
    written(tmp_path / "b", [header_record(), reading_record(0, 1, status="unresolved"), end_record(10)])
    runs = [FollowedRun(tmp_path / "a"), FollowedRun(tmp_path / "b")]
    assert "just [begun] · no reading yet · last record " in _seen(*runs)
    assert "window 10, after 640 sequences · ended\n" in _seen(*runs)
    written(tmp_path / "b", [header_record()])
    runs[1].refresh()
    assert re.search("window 10, after 640 sequences · last record .* ago · restarted 1 time\n", _seen(*runs))


@pytest.mark.parametrize("width", [40, 80])
def test_long_lines_stay_indented(tmp_path: Path, width: int) -> None:
    first, *further = _seen(FollowedRun(write_run(tmp_path, 60)), width=width).rstrip().splitlines()
    assert first.startswith("small language model")
    assert len(further) > 5
    of_run = [line for line in further if "600" not in line and "sequences · " not in line]
    assert all(line.startswith("  ") for line in of_run)
    assert max(map(len, further)) <= width


@pytest.mark.parametrize("width", [80, 120, 58])
def test_runs_that_do_not_fit_have_a_line_each(tmp_path: Path, width: int) -> None:
    for k in range(6):
        header, alerts = header_record(run=f"a long name of experiment {k}"), [alert_record(window=900)] * (k == 2)
        write_run(tmp_path / str(k), 60, header=header, alerts=alerts, batch=64.0 * 3**k, seed=k, end=False)
    runs = [FollowedRun(folder) for folder in sorted(tmp_path.iterdir())]
    lines = _seen(*runs, width=width, height=24, force_terminal=True, color_system=None).splitlines()
    assert max(map(len, lines)) <= width
    assert lines[0].split()[:4] == ["Run", "Verdict", "Loss", "Age"]
    assert all(line.endswith("…") for line in lines[:7]) is (width < 80)
    if width >= 80:
        assert [line.split()[-4:] for line in lines[3:5]] == [["1", "189", "600", "576"], ["–", "217", "600", "1,728"]]
        assert [re.findall(r"\d\.\d{3}", line) for line in lines[1:4]] == [["1.712"], ["1.644"], ["1.720"]]
    name = {58: "a lo…nt 2", 80: "a long nam…periment 2", 120: "a long name of experiment 2"}[width]
    assert lines[7].startswith(f"! {name}: All ranks")


@pytest.mark.parametrize("width", [24, 40, 80, 140])
@pytest.mark.parametrize("height", [8, 80])
@pytest.mark.parametrize("name", ["", "my run"])
def test_runs_of_one_name_are_told_apart_at_any_width(tmp_path: Path, width: int, height: int, name: str) -> None:
    """By the part of their paths that differs, also where that is the end of a long folder's name."""
    rates = ("a-sweep-of-many-learning-rates-1e-3", "a-sweep-of-many-learning-rates-3e-3")
    for rate in rates:
        write_run(tmp_path / rate / "seed-0", 3, header=header_record(run=name), end=False)
    runs = [FollowedRun(tmp_path / rate / "seed-0") for rate in rates]
    seen = " ".join(_seen(*runs, width=width, height=height, force_terminal=True, color_system=None).split())
    assert seen.count("1e-") == 1
    assert seen.count("3e-") == 1


def test_the_loss_is_the_held_out_one_with_its_window(tmp_path: Path) -> None:
    records = [reading_record(i, 6) for i in range(6)]
    records[3] = with_metrics(records[3], {"eval_loss": 1.5})
    run = FollowedRun(written(tmp_path / "a", [header_record(), *records]))
    assert run.loss_text == "1.500 at 40"
    assert "  eval_loss 1.500 at 40 · Gradient norm" in _seen(run)
    silent = written(tmp_path / "b", [header_record(), with_metrics(reading_record(0, 1), {"loss": None})])
    assert FollowedRun(silent).loss_text == "–"
