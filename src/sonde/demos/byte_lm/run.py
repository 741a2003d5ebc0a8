"""`sonde demo` from beginning to end: choices, one process per rank, verdict, report."""

from __future__ import annotations

import logging
import os
import signal
import sys
from collections.abc import Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path
from tempfile import TemporaryDirectory

from rich.console import Console
from torch import multiprocessing
from torch.multiprocessing.spawn import ProcessException, ProcessRaisedException, start_processes

from sonde.demos.byte_lm.options import DemoOptions, decided
from sonde.demos.byte_lm.task import find_sources
from sonde.demos.byte_lm.train import train_rank
from sonde.demos.console import INTERRUPTED, PANEL_WIDTH, choose_folder, conclude
from sonde.log.sinks import RECORDS_NAME
from sonde.runs.reader import read_run

FAILED = 1


def run_demo(options: DemoOptions) -> int:
    """Train, judge the batch size, and leave a log and a report.

    Args:
        options: the options of the user.

    Returns:
        The exit status: 0; 130 after Ctrl-C; 1 when a rank failed.

    Raises:
        ValueError: when the options cannot be satisfied.
        FileExistsError: when the folder for the log and the report is not empty.
        FileNotFoundError: when this Python has no source files to learn from.
    """
    console = Console(highlight=False)
    sources = find_sources()
    folder = choose_folder(options.out)
    options = decided(options)
    folder.mkdir(parents=True, exist_ok=True)
    _announce(options, n_bytes=sum(source.stat().st_size for source in sources), console=console)
    if failure := launch(options, folder):
        log = folder / RECORDS_NAME
        log_text = f"; the log so far: {log}" if log.exists() else ""
        Console(stderr=True, highlight=False, markup=False, soft_wrap=True).print(f"{failure}{log_text}")
        return FAILED
    return end(options, folder, console)


def _announce(options: DemoOptions, *, n_bytes: int, console: Console) -> None:
    console.print(
        f"sonde demo: {options.ranks} processes on the CPU train a small transformer to write Python, byte by "
        f"byte, from the {n_bytes / 1e6:.0f} MB of Python's standard library. Meanwhile sonde measures the gradient "
        "noise scale B_simple: it shows how large a batch may be and still be worth its cost. Ctrl-C stops early and "
        "keeps what was measured.\n\n"
        f"Starting {options.ranks} processes ...\n",
        width=min(console.width, PANEL_WIDTH),
    )


def launch(options: DemoOptions, folder: Path) -> str:
    """Train on every rank and wait for the end. Ctrl-C asks all ranks to stop; a second one ends this process at once.

    Args:
        options: with a batch.
        folder: for the log.

    Returns:
        What ended the training, for the user; empty if it ended by itself or by Ctrl-C.
    """
    logging.getLogger("torch.multiprocessing.spawn").setLevel(logging.ERROR)  # what it warns of is told below
    # The ranks inherit these variables.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
    is_asked_to_stop = multiprocessing.get_context("spawn").Event()
    with TemporaryDirectory(prefix="sonde-demo-") as place:
        given = options, folder, Path(place) / "ranks", is_asked_to_stop, os.getpid()
        # Ctrl-C reaches all processes. The ranks inherit this, and never see it; here it waits until they are started.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        ranks = start_processes(train_rank, given, options.ranks, join=False, daemon=True)
        assert ranks is not None
        while True:
            try:
                signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
                if ranks.join():
                    return ""
            except KeyboardInterrupt:
                if is_asked_to_stop.is_set():
                    os._exit(INTERRUPTED)
                is_asked_to_stop.set()
            except ProcessException as error:
                return _why_ended(error, ranks.processes)


def _why_ended(error: ProcessException, ranks: Sequence[BaseProcess]) -> str:
    """What ended the ranks: first one that was killed, since then its peers fail too, and may be noticed before it."""
    for rank, process in enumerate(ranks):
        code = process.exitcode or 0
        if code < 0 and code != -signal.SIGTERM:  # by which torch ends the others
            name = signal.Signals(-code).name
            cause = "; the system kills a process when memory runs out" if name == "SIGKILL" else ""
            return f"sonde: error: rank {rank} was killed by {name}{cause}"
    if isinstance(error, ProcessRaisedException):
        *_, last = str(error).rstrip().splitlines()
        return f"{error}\nsonde: error: rank {error.error_index} failed: {last}"
    return f"sonde: error: rank {error.error_index} ended: {error}"


def end(options: DemoOptions, folder: Path, console: Console) -> int:
    """Say how a run has ended, and what follows from it.

    Args:
        options: of the run.
        folder: with its log.
        console: the console to print to.

    Returns:
        The exit status.
    """
    run = read_run(folder)
    if run.ended == "interrupted":
        done = f"step {run.readings[-1].window}" if run.readings else "the first step"
        complete = " Log and report are complete up to this step." if run.readings else ""
        console.print(f"Stopped at {done} of {options.steps}.{complete}")
    conclude(run, console)
    return INTERRUPTED if run.ended == "interrupted" else 0


COMMAND = (DemoOptions, run_demo)
