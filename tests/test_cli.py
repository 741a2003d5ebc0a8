from __future__ import annotations

from pathlib import Path

import pytest

import sonde
from sonde.cli import main
from tests.new_process import Python
from tests.runs.report.plausible_run import write_run


def _error(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    """What a command that must fail says."""
    assert main(argv) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert "Traceback" not in err
    return err


def test_help_lists_commands_and_options(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    commands = capsys.readouterr().out
    assert main(["demo", "--help"]) == 0
    demo = capsys.readouterr().out
    assert main(["report", "--help"]) == 0
    report = capsys.readouterr().out
    assert all(text in commands for text in ("demo", "report", "--version"))
    for option in ("--steps N", "--ranks N", "--batch N", "--out FOLDER", "16 per rank)"):
        assert option in demo
    assert "--out FILE" in report
    assert "{None}" not in demo + report


def test_a_wrong_option_names_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--stpes", "3"]) == 2
    out, err = capsys.readouterr()
    assert "--steps" in out + err


def test_demo_refuses_options_and_folders_before_it_writes(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.txt").write_text("precious")
    for options, said in (
        (
            ["--batch", "30"],
            "must be a multiple of ranks × micro-batches = 2 × 2, got 30: pass --ba",
        ),
        (["--steps", "0"], "steps must be at least 1, got 0"),
        (
            ["--out", str(tmp_path)],
            f"sonde: error: log and report go to a new or empty folder, got {tmp_path}, a folder that is not empty: "
            "choose another --out\n",
        ),
        (["--out", str(tmp_path / "mine.txt")], "got"),
    ):
        assert said in _error(capsys, "demo", *options)
    assert [p.name for p in tmp_path.iterdir()] == ["mine.txt"]


def test_report(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    pytest.importorskip("bokeh")
    write_run(tmp_path)
    assert main(["report", str(tmp_path), "--out", str(tmp_path / "page.html")]) == 0
    assert capsys.readouterr().out == f"report  {tmp_path / 'page.html'}\n"
    assert (tmp_path / "page.html").read_text().startswith("<!DOCTYPE html>")


def test_no_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    out, err = capsys.readouterr()
    assert "demo" in out + err


def test_an_unknown_command_names_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert "got 'rnu': did you mean run?" in _error(capsys, "rnu")
    assert "sonde --help says what they do" in _error(capsys, "xyz")


def test_python_dash_m(tmp_path: Path) -> None:
    with Python("-m", "sonde", "--version", folder=tmp_path) as python:
        assert python.wait().out == f"sonde {sonde.__version__}\n"
