"""`sonde compare`: what it prints, its page, and its exit status; also without Bokeh."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from sonde.cli import main
from sonde.decision.decide import decide
from sonde.decision.pool import pool
from sonde.runs.compare.side_by_side import read_runs
from sonde.runs.compare.words import beside_rows, reached_rows, run_rows, setting_rows
from sonde.runs.facts import facts_of_runs
from sonde.runs.reader import read_run
from tests.runs.compare.plausible_runs import write_plausible
from tests.runs.report.plausible_run import header_record, written

ADAMW = "Adam or AdamW (β = 0.9)"


@pytest.mark.parametrize("width", [60, 80, 120, None])
@pytest.mark.parametrize("n", [2, 6, 20])
def test_no_number_is_cut_in_a_narrow_terminal_and_in_a_file(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, n: int, width: int | None
) -> None:
    """Without a width, standard output is no terminal: `> file`."""
    groups = [{"name": "AdamW", "lr": 1e-3, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1}]
    setup = header_record()["setup"] | {"optimizer_kind": ADAMW, "optimizer_settings": groups}
    runs = [write_plausible(tmp_path / f"run-{k}", batch=4.0 + k, n=30, setup=setup) for k in range(n)]
    if width is not None:
        monkeypatch.setenv("FORCE_COLOR", "1")
        monkeypatch.setenv("COLUMNS", str(width))
    assert main(["compare", *map(str, runs), "--out", str(tmp_path / "page.html")]) == 0
    assert f"{n} runs side by side" in (tmp_path / "page.html").read_text()
    found, out = read_runs(runs), re.sub("\x1b.*?m", "", capsys.readouterr().out)
    rows = [*run_rows(found), *beside_rows(found), *reached_rows(found), *setting_rows(found, 60)][1:]
    flat = " ".join(out.split())
    assert flat.startswith(" ".join(decide(pool(facts_of_runs([read_run(run) for run in runs]))).sentence.split()))
    assert [cell for row in rows for cell in row if " ".join(cell.split()) not in flat and "/" not in cell] == []
    tables = out.split("\n\nrun ")[1].split("\n\npage ")[0]
    assert max(map(len, tables.splitlines())) <= (width or 10_000)


@pytest.fixture
def runs(tmp_path: Path) -> list[str]:
    return [str(write_plausible(tmp_path / f"batch-{batch}", batch=batch, n=20)) for batch in (16.0, 64.0)]


def test_what_cannot_be_compared_is_a_sentence_and_2(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, runs: list[str]
) -> None:
    empty = str(written(tmp_path / "empty", [header_record()]))
    one = str(write_plausible(tmp_path / "one", n=1))
    tokens, setup = str(write_plausible(tmp_path / "tokens", unit="tokens")), header_record()["setup"]
    wide = str(write_plausible(tmp_path / "wide", setup=setup | {"parameters": 5}))
    taken = tmp_path / "mine.html"
    taken.write_text("precious")
    for paths, said in (
        ([runs[0]], "a comparison needs two runs with readings or more, got 1"),
        ([runs[0], empty], f"left out: {empty} holds no reading yet: train on, until it holds two"),
        ([runs[0], one], f"left out: {one} holds one reading yet"),
        ([*runs, tokens], "count different units (A: sequences, B: sequences, C: tokens): log all in one"),
        ([*runs, wide, "--json"], "models of different sizes (A: 1,234,567, B: 1,234,567, C: 5 parameters)"),
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
    assert "at equal sequences" in out
    assert "page  the report needs bokeh: pip install 'gradsonde[report]', then run the command again" in out
