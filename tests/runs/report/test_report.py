"""The report on a noise scale: its verdict, its figures or the reason why one is missing, and the file it is in."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from sonde.log.sinks import JsonlSink
from sonde.records import RunLog
from sonde.runs.reader import read_run
from sonde.runs.report.verdicts import failed_checks, verdict_panels
from sonde.runs.report.write import write_report
from tests.runs.report.plausible_run import (
    alert_record,
    header_record,
    reading_record,
    with_metrics,
    write_run,
    written,
)
from tests.runs.report.visible_text import visible_text

MAX_BYTES = 2_000_000


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The report of a run without anything odd, of prompts."""
    more = {"grad_scaler": True, "comm_hook": None, "units_per_piece": 8, "metric": "adam"}
    # A short run may take the allowance, which is far more than its budget.
    setup = header_record()["setup"] | more | {"budget": 0.01, "allowance": 10.0}
    alerts = [alert_record("All data are the same.")]
    header = header_record(unit="prompts", setup=setup)
    return write_report(write_run(tmp_path_factory.mktemp("plain"), alerts=alerts, header=header))


def test_what_to_do_then_why_then_what_it_costs_then_every_section(plain: Path) -> None:
    assert plain.name == "report.html"
    text = visible_text(plain)
    sections = [
        "small language model",
        "Time it first Time it first: a batch of ",
        "Noise scale now",
        "Next sonde advise ",
        "Why, and what this rests on For a run like this one, B crit is 2.51 to 657",
        "Judged from the last reading: window 600, after 38,400 prompts",
        "What the batch size costs",
        "Loss",
        "Noise scale and batch size",
        "Noise and signal",
        "Noise scale by part of the model",
        "Gradient norm and clipping",
        "threshold of the clip",
        "How this was measured",
        "All data are the same. (window 40; it has passed since)",
    ]
    place = 0
    for section in sections:
        place = text.index(section, place)
    assert "Something looks wrong" not in text  # what was right again needs nothing done


@pytest.mark.parametrize(
    ("b_simple", "low", "high", "action"),
    [
        (6400.0, 6000.0, 6800.0, "Time it first: a batch of 4,096 sequences takes 0.8"),
        (8.0, 6.0, 10.0, "Time it first: a batch of 64 sequences in micro-batches of 32 takes 25"),
        (None, 50.0, None, "Time it first: a batch of 64 sequences in micro-batches of 32 takes 25"),
        (None, 0.0, 0.0, "No verdict yet on the batch of 64 sequences."),
    ],
)
def test_the_advice_is_what_the_critical_batch_allows(
    tmp_path: Path, b_simple: float | None, low: float, high: float | None, action: str
) -> None:
    status = "resolved" if b_simple else "lower_bound" if high is None else "upper_bound"
    record = reading_record(0, 1, status=status, log_every=600, advice="train about 120 more steps")
    known = {"gns/b_simple": b_simple, "gns/b_simple_low": low, "gns/b_simple_high": high}
    known |= dict.fromkeys(name for name in record["metrics"] if "average" in name)
    write_run(tmp_path, 1, status=status, log_every=600, advice=record["advice"], metrics=record["metrics"] | known)
    [panel] = verdict_panels(read_run(tmp_path))
    assert panel.action.startswith(action)


@pytest.mark.parametrize(
    ("starts", "alerts", "failed"),
    [
        # Alerts by start and window, with no reading that repeats them.
        (((10, 1000), (510, 520)), [(0, 900)], "window 900, over"),  # the restart undid it
        (((10, 1000), (510, 520)), [(0, 300)], "window 300, over"),  # it did not
        (((10, 1000), (510, 520)), [(0, 900), (1, 510)], "window 510, over"),
        (((10, 1000), (510, 520)), [(0, 900), (1, 525)], "since window 525"),  # no reading since
        (((10, 1000), (510, 520)), [(1, 510), (1, 525)], "since window 525"),
        # A check that fails at each reading from the alert on, up to a window.
        (((10, 1000),), [(0, 900, 1000)], "since window 900"),
        (((10, 1000), (510, 520)), [(0, 900, 1000)], "windows 900 to 1,000, over"),
        (((10, 1000), (510, 520)), [(0, 300, 1000), (1, 510, 520)], "since window 300"),
        (((10, 1000), (510, 520)), [(0, 900, 1000), (1, 510, 520)], "since window 510"),
        (((10, 1000), (510, 520)), [(0, 900, 1000), (1, 510, 510)], "window 510, over"),
        (((10, 50),), [(0, 10, 30)], "windows 10 to 30, over"),
    ],
)
def test_which_checks_fail_now_and_which_are_over(
    tmp_path: Path, starts: tuple[tuple[int, int], ...], alerts: list[tuple[int, ...]], failed: str
) -> None:
    for start, (first, last) in enumerate(starts):
        records, own = [header_record()], [rest for of_start, *rest in alerts if of_start == start]
        for window in range(first, last + 1, 10):
            records += [alert_record("the cause", window=at) for at, *_ in own if window <= at < window + 10]
            goes_on = any(until and at <= window <= until[0] for at, *until in own)
            found = {"same_data": "the cause"} if goes_on else {}
            records.append(reading_record(5, 100, status="resolved", alerts=found) | {"window": window})
        written(tmp_path, records)
    run = read_run(tmp_path)
    [check] = failed_checks(run)
    assert check.when + (", over" if check.is_over else "") == failed
    assert check.message == "the cause"


def test_what_looks_wrong_now_comes_first(tmp_path: Path) -> None:
    text = visible_text(write_report(write_run(tmp_path, 3, alerts=[alert_record("all is lost", window=40)])))
    assert "Something looks wrong All is lost (since window 40)" in text
    assert text.index("Something looks wrong") < text.index("No verdict yet")


def test_a_name_that_is_not_unicode_still_gets_its_report(tmp_path: Path) -> None:
    """The name of a folder may hold a byte that is not UTF-8. Python reads it as a lone surrogate."""
    text = visible_text(write_report(write_run(tmp_path, 3, header=header_record(run="run \udce9 7"))))
    assert "run ? 7" in text


def test_how_this_was_measured_is_shown_with_its_numbers(plain: Path) -> None:
    text = visible_text(plain)
    for absent in ("comm hook", "sequence"):
        assert absent not in text
    for fact in (
        "wrapper: DistributedDataParallel ranks: 2 device: cpu",
        "parameters: 1,234,567",
        "metric: adam",
        "grad scaler: yes units per piece: 8 budget: 0.01 allowance: 10.0",
        "8 pieces in the last window.",
        "what is remembered grows with the run",
        "Measured windows 12: windows of training for each measured one now.",
        "Cost 0.91 %: part of the time that measuring takes, in the last windows.",
        "at 95 % confidence",
        "60 readings, up to window 600.",
        "2 windows: a piece was not finite",
        "Overhead 2.1 ms: host time that the probe costs, per window of training.",
        "sonde 0.1.0, torch 2.13.0, python 3.11.7",
        '"learning rate": 0.003',
        "Started 21 September 2026, 14:13 UTC · last reading 53 min later",
        "ended: closed",
    ):
        assert fact in text, fact


def test_numbers_of_the_verdict_are_those_of_the_last_reading(tmp_path: Path) -> None:
    known = {"gns/b_simple": 192.0, "gns/b_simple_low": 150.0, "gns/b_simple_high": 250.0}
    known |= {"gns/b_simple_average": 80.0, "gns/b_simple_average_low": 70.0, "gns/b_simple_average_high": 90.0}
    record = with_metrics(reading_record(0, 1, status="resolved", log_every=600), known)
    text = visible_text(write_report(written(tmp_path, [header_record(), record])))
    assert "Noise scale now 192 sequences; between 150 and 250" in text
    assert "Average over the run 80 sequences; between 70 and 90" in text
    # Of whole runs, the average speaks: B_crit is 1.5 times it, 120. 1 + 120/64 steps, 1 + 64/120 sequences.
    assert "steps are 2.9× and sequences 1.5× the least possible." in text


@pytest.mark.parametrize(
    ("status", "sentences"),
    [
        (
            "lower_bound",
            [
                "B crit is more than",
                "no upper limit known",
                "used, E/E min , if B crit is at the lower bound",
            ],
        ),
        (
            "upper_bound",
            [
                "B crit is less than",
                "no lower limit known",
                "used, E/E min , if B crit is at the upper bound",
            ],
        ),
        (
            "unresolved",
            [
                "No verdict yet",
                "No reading has an estimate or a lower bound of the noise scale yet",
                "The trade-off needs a noise scale",
            ],
        ),
    ],
)
def test_the_report_says_what_is_not_known(tmp_path: Path, status: str, sentences: list[str]) -> None:
    text = visible_text(write_report(write_run(tmp_path, 20, status=status)))
    for sentence in sentences:
        assert sentence in text, sentence


class Reward:
    """A probe of one's own."""

    def step(self) -> None: ...

    def metrics(self) -> dict[str, float | None]:
        return {"reward": 0.5}

    def close(self) -> None: ...


def test_a_log_of_ones_own_probe_alone_claims_no_batch_size(tmp_path: Path) -> None:
    log = RunLog(JsonlSink(tmp_path))
    log.measure(Reward(), 1)
    log.end("done", window=1)
    text = visible_text(write_report(tmp_path))
    assert "How this was measured" in text
    for word in ("atch size", "noise scale", "sample"):
        assert word not in text, word


def test_sections_without_data_say_so(tmp_path: Path) -> None:
    record = reading_record(0, 1, status="resolved", groups={})
    absent = dict.fromkeys(
        ("grad/norm", "grad/max_norm", "grad/clip_fraction", "loss", "gns/consistency", "gns/scale", "cost/fraction")
    )
    records = [header_record(metadata={}), with_metrics(record, absent) | {"groups": {}, "dropped": {}}]
    text = visible_text(write_report(written(tmp_path, records)))
    for sentence in (
        "The log holds no values of groups of parameters: sonde.attach(log_groups=True) writes them.",
        "The gradient norm was not measured in this run.",
        "This run logged no loss and no other values.",
        "Windows left out None up to window 10.",
    ):
        assert sentence in text, sentence


def test_every_value_that_could_break_an_axis_is_drawn(tmp_path: Path) -> None:
    records = [header_record()]
    for i in range(5):
        record = reading_record(i, 5, status="resolved", log_every=100)
        odd = {"gns/b_simple": 0.0, "gns/b_simple_low": 0.0, "gns/b_simple_high": 0.0, "gns/grad_sq": -1.0 - i}
        logged = {
            "zero": 0.0,
            "other": 1.7e308,
            "swings": (-1) ** i * 1e308,
            "negative": -3.5,
            "huge": 1e300 * (i + 1),
            "tiny": 1e-300,
            "gns/trace_cov": 0.0,
        }
        records.append(with_metrics(record, odd | logged))
    text = visible_text(write_report(written(tmp_path, records)))
    assert "|G|² estimated at or below 0: not yet distinguishable from 0" in text
    assert "All pieces had the same gradient, so check that they hold different data." in text


def test_a_restart_and_a_cut_off_line_are_shown(tmp_path: Path) -> None:
    write_run(tmp_path, 20, end=False)
    with (tmp_path / "records.jsonl").open("ab") as file:
        file.write(b'{"kind":"rea')
    text = visible_text(write_report(write_run(tmp_path, 20, seed=1, end=False)))
    assert "restarted 1 time" in text
    assert "the run was restarted here" in text
    assert "a crash damaged the log: line 22 was cut off when the run was interrupted" in text
    assert "no end recorded: the run is still going on, or it was cut off" in text


def test_the_report_of_a_long_run_is_small(tmp_path: Path) -> None:
    groups = [f"model.layers.{i}.self_attn.q_proj" for i in range(600)]
    records = [header_record(metadata={"notes": "<&>" * 500_000, "name": "x" * 100_000}, run="r" * 50_000)]
    names = [f"metric {k}" for k in range(50)]
    for i in range(3000):
        record = reading_record(i, 3000, groups=groups if i == 2999 else groups[:1])
        records.append(with_metrics(record, dict.fromkeys(names, 0.1 * i)))
    records += [alert_record("something is wrong " * 200, window=i) for i in range(2000)]
    report = write_report(written(tmp_path, records))
    assert report.stat().st_size < MAX_BYTES
    text = visible_text(report)
    assert "Of 3,000 readings, each pixel shows the lowest and the highest." in text
    assert "The first 400 are drawn; the log has 200 more groups." in text
    assert "47 more values in the log" in text  # the loss and 3 of 50 are drawn


def test_no_address_and_no_foreign_script(plain: Path) -> None:
    page = plain.read_text(encoding="utf-8")
    outside_scripts = re.sub(r"<script>.*?</script>", "", page, flags=re.DOTALL)
    assert "<script" not in outside_scripts
    assert re.findall(r"""(?:src|href)=["'](?!data:|#)""", outside_scripts) == []
    assert "default-src 'none'" in outside_scripts


def test_an_older_report_is_replaced_and_nothing_else(tmp_path: Path) -> None:
    write_run(tmp_path / "run", 3)
    first = write_report(tmp_path / "run")
    first.write_text(first.read_text(encoding="utf-8")[:2000], encoding="utf-8")  # an older, shorter one
    assert write_report(tmp_path / "run").stat().st_size > 1_000_000
    assert write_report(tmp_path / "run", tmp_path / "new" / "page.html") == tmp_path / "new" / "page.html"

    for name in ("train.py", "records.jsonl"):
        other = tmp_path / "run" / name
        if name == "train.py":
            other.write_text("print()")
        before = other.read_bytes()
        with pytest.raises(ValueError, match="exists and is not a report of sonde, so nothing was written"):
            write_report(tmp_path / "run", other)
        assert other.read_bytes() == before
    with pytest.raises(ValueError, match="the report is one file, got the folder"):
        write_report(tmp_path / "run", tmp_path)
    assert sorted(p.name for p in (tmp_path / "run").iterdir()) == ["records.jsonl", "report.html", "train.py"]


def test_a_run_without_readings_is_refused_and_nothing_written(tmp_path: Path) -> None:
    write_run(tmp_path, 0)
    with pytest.raises(
        ValueError,
        match=r"holds no reading yet, expected at least one \(a run writes one every 10 windows and at its end\)",
    ):
        write_report(tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["records.jsonl"]
    with pytest.raises(FileNotFoundError, match="no run at"):
        write_report(tmp_path / "nowhere")


def test_without_bokeh_the_error_names_an_install_that_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_run(tmp_path, 1)
    monkeypatch.setitem(sys.modules, "bokeh", None)
    with pytest.raises(ImportError, match=r"the report needs bokeh: pip install 'gradsonde\[report\]'"):
        write_report(tmp_path)
    assert not (tmp_path / "report.html").exists()
