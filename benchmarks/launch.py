"""Run a function in new processes, one for each rank."""

from __future__ import annotations

import gc
import multiprocessing
import os
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist

from benchmarks.training import Setup


def on_ranks(
    setup: Setup,
    function: Callable[..., Any],
    *args: Any,
    start: Literal["spawn", "forkserver"] = "forkserver",
    deadline_seconds: float = 1800.0,
) -> list[Any]:
    """Run `function(setup, *args)` on every rank, each in a new process, and return the results by rank.

    Args:
        setup: the number of ranks, and the threads of each.
        function: importable; its arguments and results can be pickled.
        *args: for the function.
        start: "spawn" takes seconds and gives every process a memory layout of its own, as timings need; "forkserver"
            takes milliseconds, and its processes return freed memory to the system at once. With an accelerator all
            are spawned: a process forked from one that has only counted CUDA's devices cannot use them.
        deadline_seconds: the longest that it may take.

    Raises:
        RuntimeError: with the traceback of a rank that failed, or when one does not answer in time.
    """
    start = start if setup.device == "cpu" else "spawn"
    context: Any = multiprocessing.get_context(start)
    if start == "forkserver":
        _start_forkserver(context)
    with tempfile.TemporaryDirectory() as folder:
        pipes, processes = [], []
        for rank in range(setup.ranks):
            ours, theirs = context.Pipe()
            work = (rank, str(Path(folder) / "store"), theirs, function, setup, args)
            process = context.Process(target=_serve, args=work, name=f"rank {rank}", daemon=True)
            process.start()
            theirs.close()
            pipes.append(ours)
            processes.append(process)
        try:
            deadline = time.monotonic() + deadline_seconds
            return [_receive(pipe, process, deadline) for pipe, process in zip(pipes, processes, strict=True)]
        finally:
            for process in processes:
                process.join(timeout=5)
                if process.is_alive():
                    process.kill()


def _start_forkserver(context: Any) -> None:
    """Start the server so that glibc returns freed tensors at once: peaks of memory then repeat to 0.1 MiB.

    Returning memory costs time, so processes that are timed are spawned instead.
    """
    context.set_forkserver_preload(["benchmarks.preload"])
    given = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536", "MALLOC_ARENA_MAX": "1"}
    before = {name: os.environ.get(name) for name in given}
    os.environ.update(given)
    forkserver.ensure_running()
    for name, value in before.items():
        if value is None:
            del os.environ[name]
        else:
            os.environ[name] = value


def _receive(pipe: Connection, process: BaseProcess, deadline: float) -> Any:
    if not pipe.poll(max(deadline - time.monotonic(), 0.0)):
        process.kill()
        raise RuntimeError(f"{process.name} did not answer in time and was ended")
    try:
        result, error = pipe.recv()
    except EOFError:
        process.join(timeout=5)
        raise RuntimeError(f"{process.name} died with exit code {process.exitcode}") from None
    if error is not None:
        raise RuntimeError(f"{process.name} failed:\n{error}")
    return result


def _serve(
    rank: int, store: str, pipe: Connection, function: Callable[..., Any], setup: Setup, args: tuple[Any, ...]
) -> None:
    torch.set_num_threads(setup.threads)
    gc.freeze()  # what is imported stays: each collection before a timed block would go through it, in half a second
    try:
        if setup.device != "cpu":
            torch.accelerator.set_device_index(rank)
        if setup.has_group:
            backend = dist.get_default_backend_for_device(setup.device)
            dist.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=setup.ranks)
        result = function(setup, *args)
        if setup.has_group:
            dist.barrier()
            dist.destroy_process_group()
        pipe.send((result, None))
    except BaseException:
        pipe.send((None, traceback.format_exc()))
