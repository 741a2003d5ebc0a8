"""`sonde demo` from beginning to end: choices, training, verdict, report."""

from __future__ import annotations

import os
from pathlib import Path

import torch
from rich.console import Console

from sonde.demos.byte_lm.data import find_sources
from sonde.demos.byte_lm.interrupt import INTERRUPTED
from sonde.demos.byte_lm.launch import TrainingFailed, launch
from sonde.demos.byte_lm.options import DemoOptions, Setup, decide
from sonde.demos.console import PANEL_WIDTH, LastingConsole, choose_folder, leave_report, verdict_panel
from sonde.log.sinks import RECORDS_NAME
from sonde.runs.reader import read_run
from sonde.runs.report.verdicts import judge_reading

_VERDICT_STYLES = {"about_right": "green", "too_small": "yellow", "too_large": "yellow"}


def run_demo(options: DemoOptions) -> int:
    """Train, judge the batch size, and leave a log and a report.

    Args:
        options: the options of the user.

    Returns:
        The exit status: 0, 130 after Ctrl-C, or another number when a rank failed.

    Raises:
        ValueError: when the options cannot be satisfied.
        FileExistsError: when the folder for the log and the report is not empty.
        FileNotFoundError: when this Python has no source files to learn from.
    """
    console = LastingConsole(highlight=False)
    sources = find_sources()
    folder = choose_folder(options.out)
    setup = decide(options, folder, n_gpus=torch.cuda.device_count(), n_cores=_n_cores())
    folder.mkdir(parents=True, exist_ok=True)
    _announce(setup, n_bytes=sum(source.stat().st_size for source in sources), console=console)
    try:
        ending = launch(setup)
    except TrainingFailed as failure:
        if console.show_cursor():  # in a terminal, a killed rank leaves its panel open
            console.print()
        _explain(failure, folder / RECORDS_NAME)
        return failure.status
    if ending.interrupted:
        outcome = "log and report are complete up to this step" if ending.n_steps else "no step was finished"
        console.print(f"Stopped at step {ending.n_steps} of {setup.n_steps}; {outcome}.")
    conclude(setup, console)
    return INTERRUPTED if ending.interrupted else 0


def _n_cores() -> int:
    """Cores that this process may use. In a container or under taskset there are fewer than the machine has."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _announce(setup: Setup, *, n_bytes: int, console: Console) -> None:
    where = "the CPU" if setup.device == "cpu" else "one GPU each"
    console.print(
        f"sonde demo: {setup.n_ranks} processes on {where} train a small transformer to write Python, byte by byte, "
        f"from the {n_bytes / 1e6:.0f} MB of Python's standard library. Meanwhile sonde measures the gradient noise "
        "scale B_simple: it shows how large a batch may be and still be worth its cost. Ctrl-C stops early and keeps "
        "what was measured.\n\n"
        f"Starting {setup.n_ranks} processes ...\n",
        width=min(console.width, PANEL_WIDTH),
    )


def _explain(failure: TrainingFailed, log: Path) -> None:
    console = Console(stderr=True, highlight=False, markup=False, soft_wrap=True)
    if failure.traceback:
        console.print(failure.traceback)
    log_text = f"; the log so far: {log}" if log.exists() else ""
    console.print(f"sonde: error: {failure}{log_text}")


def conclude(setup: Setup, console: Console) -> None:
    """Print the verdict on a run, write its report, and print where the log and the report are.

    Args:
        setup: the run, which has ended.
        console: the console to print to.
    """
    run = read_run(setup.folder)
    if not run.readings:
        console.print(f"Nothing was measured. The log is {run.path}.", soft_wrap=True)
        return
    verdict = judge_reading(run.readings[-1], run.probe("reading").unit)
    style = _VERDICT_STYLES.get(verdict.kind, "cyan")
    console.print(verdict_panel(verdict.headline, verdict.detail, style=style, width=console.width))
    leave_report(run.path, setup.folder, console)
