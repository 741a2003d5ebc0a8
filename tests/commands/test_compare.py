"""`sonde compare`: what it prints, its page, and its exit status; also without Bokeh."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from sonde.cli import main
from tests.runs.compare.plausible_runs import write_plausible
from tests.runs.report.plausible_run import header_record, written


@pytest.fixture
def runs(tmp_path: Path) -> list[str]:
    return [str(write_plausible(tmp_path / f"batch-{batch}", batch=batch, n=20)) for batch in (16.0, 64.0)]


def test_the_terminal_says_what_the_runs_show(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, runs: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    assert main(["compare", *runs]) == 0
    out = capsys.readouterr().out
    assert "B's noise scale is " in out
    assert out.startswith("Keep a batch of about 64 sequences.")
    assert "At equal loss, the noise scale at batch 64 is" in out
    flat = " ".join(out.split())
    for row in ("A (batch-16.0) Batch too small 16", "B (batch-64.0) ", "B noise scale 1", "batch size 16 (A); 64 (B)"):
        assert row in flat
    assert out.endswith("page  compare.html\n")
    assert "2 runs side by side" in (tmp_path / "compare.html").read_text()


def test_what_cannot_be_compared_is_a_sentence_and_2(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, runs: list[str]
) -> None:
    empty = str(written(tmp_path / "empty", [header_record()]))
    taken = tmp_path / "mine.html"
    taken.write_text("precious")
    for paths, said in (
        ([runs[0]], "a comparison needs two runs with readings or more, got 1"),
        ([runs[0], empty], f"{empty} holds no reading yet (left out)"),
        ([*runs, "--out", str(taken)], f"{taken} exists and is not a report of sonde"),
        ([*runs, "--by", "hours"], "Invalid choice"),
    ):
        assert main(["compare", *paths]) == 2
        out, err = capsys.readouterr()
        assert said in out + err
        assert "Traceback" not in err
    assert taken.read_text() == "precious"


def test_without_bokeh_the_terminal_says_all_the_same(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, runs: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "bokeh", None)
    assert main(["compare", *runs, "--out", str(tmp_path / "page.html")]) == 0
    out = capsys.readouterr().out
    assert "noise scale" in out
    assert "page  the report needs bokeh: pip install 'gradsonde[report]', then run the command again" in out
