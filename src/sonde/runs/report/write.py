"""The report of a run: one HTML file that needs nothing else, verdict first."""

from __future__ import annotations

import os
from pathlib import Path

from sonde.runs.reader import Run, read_run

GENERATOR = '<meta name="generator" content="sonde '
"""What tells a report from any other HTML file."""


def write_report(run_path: str | Path, out: str | Path | None = None) -> Path:
    """Write the report of a run.

    Args:
        run_path: the run's folder, or its `.jsonl` file.
        out: the file to write; `report.html` beside the log by default. An older report there is replaced in one step;
            any other file is left alone.

    Returns:
        The file written.

    Raises:
        FileNotFoundError: when there is no such run.
        ValueError: when the log is not a run's or holds no reading yet, or `out` is not a report.
        ImportError: without the `bokeh` package.
    """
    run = read_run(run_path)
    if run.is_empty:
        every = run.header.setup.get("log_every")
        due = f"one is due every {every} windows" if every else "one is due every few windows"
        raise ValueError(
            f"{run.path} holds no reading yet, expected at least one ({due}, and at its end): "
            "let the run go on, then try again"
        )
    target = run.path.parent / "report.html" if out is None else Path(out)
    _check_target(target)
    _write_in_one_step(target, _render(run))
    return target


def _render(run: Run) -> str:
    try:
        import bokeh  # noqa: F401
    except ImportError as error:
        raise ImportError("the report needs bokeh: pip install 'sonde[report]'") from error
    from sonde.runs.report.page import render_page

    return render_page(run)


def _check_target(target: Path) -> None:
    """Refuse to replace anything but an older report."""
    if target.is_dir():
        raise ValueError(
            f"the report is one file, got the folder {target}: give a file name, such as {target / 'report.html'}"
        )
    if target.exists():
        with target.open("rb") as file:
            beginning = file.read(1000)
        if GENERATOR.encode() not in beginning:
            raise ValueError(
                f"{target} exists and is not a report of sonde's, nothing was written: choose another file name"
            )


def _write_in_one_step(target: Path, text: str) -> None:
    """Whoever opens the file sees the old report or the new one, never half of one."""
    target.parent.mkdir(parents=True, exist_ok=True)
    unfinished = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        unfinished.write_bytes(text.encode("utf-8", "replace"))  # names may hold lone surrogates
        unfinished.replace(target)
    finally:
        unfinished.unlink(missing_ok=True)
