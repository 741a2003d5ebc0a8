"""New processes, forked from a server that has imported torch: a start takes milliseconds, an import seconds."""

from __future__ import annotations

import atexit
import contextlib
import gc
import multiprocessing
import os
import runpy
import signal
import sys
import tempfile
import types
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing.context import ForkServerContext
from multiprocessing.forkserver import ensure_running
from pathlib import Path
from typing import Any

# What most processes would import for seconds: torch imports its compiler at the first optimizer, and the parts of it
# that every backend uses at the first compilation. Modules of tests import pytest. Public names of sonde are lazy.
_IMPORTED = [
    "hypothesis",
    "pytest",
    "torch.nn.parallel",
    "torch.distributed.fsdp",
    "torch.distributed.pipelining",
    "torch._dynamo.backends.debugging",
    "torch._inductor.compile_fx",
    "sonde.batch_size.probe",
    "sonde.cli",
    "sonde.commands.run_script.watcher",
    "sonde.policy.entropy_change",
    "sonde.policy.log",
    "sonde.runs.report.write",
]


WITHOUT_TORCH = """
import sys

class NoTorch:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "torch":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, NoTorch())
from sonde.cli import main
sys.exit(max(main(command.split()) for command in sys.argv[1:]))
"""
"""Code for `python -c` that runs sonde's commands, an argument each, as if torch were not installed."""


def forkserver() -> ForkServerContext:
    """The server of this test run; it starts with its first process."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_IMPORTED)
    return context


def start_forkserver() -> None:
    """Start the server now, before code that would start one with other imports."""
    forkserver()
    ensure_running()


def in_new_process(function: Callable[..., Any], *args: Any) -> Any:
    """The result of an importable function, in a process that has only imported."""
    with ProcessPoolExecutor(1, forkserver()) as one:
        return one.submit(function, *args).result(timeout=200)


@dataclass(frozen=True)
class Ended:
    """A Python that has ended: its exit status, or minus the signal that ended it, and what it wrote."""

    status: int
    out: str
    err: str


class Python:
    """`python` with these arguments, a script, `-m` and a module or `-c` and code, in a session of its own.

    On exit, it and all processes that it has started are killed.

    Args:
        *arguments: of the command line.
        folder: where it runs.
        environment: variables on top of those of this process.
    """

    def __init__(self, *arguments: str, folder: Path, environment: Mapping[str, str] | None = None) -> None:
        self._outputs = tempfile.TemporaryDirectory()
        paths = [str(Path(self._outputs.name) / name) for name in ("out", "err")]
        variables = dict(os.environ) | dict(environment or {})
        self._process = forkserver().Process(target=as_python, args=(arguments, str(folder), variables, paths))
        self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid

    def out(self) -> str:
        """What it has printed so far."""
        path = Path(self._outputs.name) / "out"
        return path.read_text() if path.exists() else ""

    def kill(self) -> None:
        """End it at once, but none of the processes that it has started."""
        os.kill(self.pid, signal.SIGKILL)

    def wait(self, seconds: float = 120.0) -> Ended:
        """Its end, which must come in this time."""
        self._process.join(seconds)
        status = self._process.exitcode
        out, err = ((Path(self._outputs.name) / name).read_text() for name in ("out", "err"))
        assert status is not None, f"it did not end within {seconds:g} s\n{out}\n{err}"
        return Ended(status, out, err)

    def __enter__(self) -> Python:
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self._process.kill()  # it may not have had its session yet
        self._process.join()
        self._outputs.cleanup()


def as_python(arguments: Sequence[str], folder: str, variables: Mapping[str, str], outputs: Sequence[str]) -> None:
    """What the interpreter does with its command line."""
    os.setsid()
    gc.freeze()  # what the server has imported stays: a collection would go through it, and copy its memory
    for number, path in zip((1, 2), outputs, strict=True):
        os.dup2(os.open(path, os.O_CREAT | os.O_WRONLY), number)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(variables)
    first, *others = arguments
    try:
        if first == "-m":
            sys.argv = others
            sys.modules.pop(others[0], None)  # a new interpreter has not imported it
            runpy.run_module(others[0], run_name="__main__", alter_sys=True)
        elif first == "-c":
            code, *others = others
            sys.argv, sys.modules["__main__"] = ["-c", *others], types.ModuleType("__main__")
            exec(compile(code, "<string>", "exec"), vars(sys.modules["__main__"]))
        else:
            sys.argv = [first, *others]
            sys.path.insert(0, str(Path(first).parent))
            runpy.run_path(first, run_name="__main__")
    finally:
        atexit._run_exitfuncs()
