"""Writes the report of a run: one HTML file that needs nothing else, with the verdict first."""

from __future__ import annotations

import os
from pathlib import Path

from sonde.runs.reader import Run, read_run
from sonde.version import install_hint

GENERATOR = '<meta name="generator" content="sonde '
"""A report contains this text. Other HTML files do not."""


def write_report(run_path: str | Path, out: str | Path | None = None) -> Path:
    """Write the report of a run.

    Args:
        run_path: the run's folder, or its `.jsonl` file.
        out: the file to write; `report.html` beside the log by default. An older report is replaced in one step.
            Any other file is left alone.

    Returns:
        The file that was written.

    Raises:
        FileNotFoundError: when there is no such run.
        ValueError: when the file is not the log of a run, the log holds no reading yet, or `out` exists and is not a
            report.
        ImportError: without the `bokeh` package.
    """
    _check_bokeh()
    run = read_run(run_path)
    if run.is_empty:
        every = run.probe("reading").setup.get("log_every") or "few"
        raise ValueError(
            f"{run.path} holds no reading yet, expected at least one (a run writes one every {every} windows and at "
            "its end): let the run continue, then try again"
        )
    target = run.path.parent / "report.html" if out is None else Path(out)
    _check_target(target)
    _write_in_one_step(target, _render(run))
    return target


def _check_bokeh() -> None:
    try:
        import bokeh  # noqa: F401
    except ImportError as error:
        raise ImportError(f"the report needs bokeh: {install_hint('report')}") from error


def _render(run: Run) -> str:
    from sonde.runs.report.page import render_page

    return render_page(run)


def _check_target(target: Path) -> None:
    """Refuse to replace anything but an older report."""
    if target.is_dir():
        raise ValueError(
            f"the report is one file, got the folder {target}: give a file name such as {target / 'report.html'}"
        )
    if target.exists():
        with target.open("rb") as file:
            beginning = file.read(1000)
        if GENERATOR.encode() not in beginning:
            raise ValueError(
                f"{target} exists and is not a report of sonde, so nothing was written: choose another file name"
            )


def _write_in_one_step(target: Path, text: str) -> None:
    """Write the file so that a reader sees the old report or the new report, never half of a report."""
    target.parent.mkdir(parents=True, exist_ok=True)
    unfinished = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        unfinished.write_bytes(text.encode("utf-8", "replace"))  # a name may contain lone surrogates
        unfinished.replace(target)
    except OSError as error:
        raise OSError(error.errno, f"the report could not be written: {error.strerror}", str(target)) from error
    finally:
        unfinished.unlink(missing_ok=True)
