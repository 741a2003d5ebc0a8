"""Starts one process per rank on this machine with torch's elastic launcher."""

from __future__ import annotations

import logging
import os
import signal
import sys
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from tempfile import TemporaryDirectory
from types import FrameType
from typing import Any

from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing import api as multiprocessing_api
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from sonde.demos.byte_lm.interrupt import INTERRUPTED, interrupts_left_to_ranks
from sonde.demos.byte_lm.options import Setup
from sonde.demos.byte_lm.train import Ending, train_rank


class TrainingFailed(Exception):
    """The training failed, and no rank is running any more.

    Attributes:
        status: the exit status for the command.
        traceback: the traceback of the rank that raised; empty if no rank raised.
    """

    def __init__(self, message: str, *, status: int = 1, traceback: str = "") -> None:
        super().__init__(message)
        self.status, self.traceback = status, traceback


def launch(setup: Setup) -> Ending:
    """Train on every rank and wait for the end.

    Args:
        setup: the run.

    Raises:
        TrainingFailed: when a rank raised or was killed, or when a signal ended this process.
    """
    _silence_launcher()
    with (
        TemporaryDirectory(prefix="sonde-demo-") as error_folder,
        interrupts_left_to_ranks(),
        _ending_signals() as ending,
    ):
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=setup.n_ranks,
            run_id=uuid.uuid4().hex,
            rdzv_backend="c10d",
            rdzv_endpoint="127.0.0.1:0",  # any free port, reached from this machine only
            local_addr="127.0.0.1",
            max_restarts=0,
            logs_specs=DefaultLogsSpecs(log_dir=error_folder),
            **ending,
        )
        try:
            endings: dict[int, Ending] = elastic_launch(config, train_rank)(setup)
        except ChildFailedError as error:
            raise _explain(*error.get_first_failure()) from error
        except SignalException as error:
            raise TrainingFailed(f"ended by {error.sigval.name}", status=128 + error.sigval) from error
    return endings[0]


@contextmanager
def _ending_signals() -> Iterator[dict[str, Any]]:
    """The launcher's options by which SIGTERM, SIGHUP and SIGQUIT end the ranks, but SIGINT does not."""
    if hasattr(LaunchConfig, "signals_to_handle"):
        yield {"signals_to_handle": "SIGTERM,SIGHUP,SIGQUIT"}
        return
    # torch 2.9 always ends the ranks at SIGINT too, by the handler that its module names when they start.
    end_ranks = multiprocessing_api._terminate_process_handler

    def unless_interrupted(signum: int, frame: FrameType | None) -> None:
        if signum != signal.SIGINT:
            end_ranks(signum, frame)

    multiprocessing_api._terminate_process_handler = unless_interrupted
    try:
        yield {}
    finally:
        multiprocessing_api._terminate_process_handler = end_ranks


def _silence_launcher() -> None:
    """Hide the messages that torch writes for cluster operators. Every failure is raised as an error as well."""
    for name in ("torch.distributed.elastic", "torch.multiprocessing.spawn"):
        logger = logging.getLogger(name)
        logger.addHandler(logging.NullHandler())
        logger.propagate = False
    # The ranks inherit these variables.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")


def _explain(rank: int, failure: ProcessFailure) -> TrainingFailed:
    if failure.exitcode == INTERRUPTED:
        return TrainingFailed("stopped at once by a second Ctrl-C", status=INTERRUPTED)
    if failure.exitcode < 0:
        cause = "; the system kills a process when memory runs out" if failure.signal_name() == "SIGKILL" else ""
        return TrainingFailed(f"rank {rank} was killed by {failure.signal_name()}{cause}")
    error = failure.error_file_data["message"]
    if isinstance(error, str):
        return TrainingFailed(f"rank {rank} ended with status {failure.exitcode}")
    summary = error["message"].partition("\n")[0]
    return TrainingFailed(f"rank {rank} failed: {summary}", traceback=error["extraInfo"]["py_callstack"])
