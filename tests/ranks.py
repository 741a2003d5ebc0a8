"""Runs functions on N ranks that live for the whole test run: a start takes seconds, a call milliseconds."""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import multiprocessing
import os
import pickle
import signal
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from tests.garbage import Imported
from tests.new_process import forkserver

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

DEADLINE_SECONDS = 60.0


def seed() -> None:
    """`torch.manual_seed(0)`, which without an accelerator works out where it was called for a later one: 0.5 ms."""
    has_none = torch.accelerator.current_accelerator() is None  # in this build of torch: devices are not counted
    (torch.default_generator.manual_seed if has_none else torch.manual_seed)(0)


@functools.cache
def mesh_of(shape: tuple[int, ...], names: tuple[str, ...] | None = None) -> DeviceMesh:
    """The mesh of all ranks, the same object at every call: a new mesh makes new groups, whose threads never end."""
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh("cpu", shape, mesh_dim_names=names)


def _share_one_device() -> None:
    """All of gloo's groups in this process use one network device.

    Otherwise each has its own, with a thread that wakes 100 times a second: with 50 groups, a tenth of all time.
    """
    from torch._C._distributed_c10d import ProcessGroupGloo

    made: Any = ProcessGroupGloo
    device, of_its_own = made.create_default_device(), made.__init__

    def with_the_device(self: Any, store: Any, rank: int, size: int, timeout: Any, **newer: Any) -> None:
        options = made._Options()
        options._devices, options._timeout = [device], timeout
        for name, value in newer.items():  # `enable_reconfigure`, since torch 2.15
            setattr(options, name, value)
        of_its_own(self, store, rank, size, options)

    made.__init__ = with_the_device


def _serve(rank: int, world: int, backend: str, on_device: bool, store: str, pipe: Connection) -> None:
    torch.set_num_threads(1)
    imported = Imported()
    faulthandler.enable(open(f"{store}.crash{rank}", "w"))  # noqa: SIM115 - it stays open as long as the process
    if on_device:
        torch.accelerator.set_device_index(rank % torch.accelerator.device_count())
    if backend == "gloo" and "GLOO_SOCKET_IFNAME" not in os.environ:  # which devices made here would not heed
        _share_one_device()
    dist.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=world)
    while (job := pipe.recv()) is not None:
        function, args = job
        seed()
        try:
            answer = pickle.dumps((function(*args), None))  # `send` would share each tensor by a connection of its own
        except BaseException:
            answer = pickle.dumps((None, traceback.format_exc()))
        pipe.send_bytes(answer)
        imported.add()
    dist.destroy_process_group()


class Ranks:
    """N processes in one process group; `ranks(function, *args)` returns each rank's result.

    The function must be importable (module level), its arguments and results picklable. If a rank fails or does not
    answer in time, its peers may hang in a collective: all ranks are killed, and started again at the next call.

    Args:
        world: number of ranks.
        backend: of the process group.
        on_device: each rank sets the accelerator's device of its number; where there are fewer, ranks share them.
        deadline_seconds: for an answer.
    """

    def __init__(
        self,
        world: int,
        backend: str = "gloo",
        *,
        on_device: bool = False,
        deadline_seconds: float = DEADLINE_SECONDS,
    ) -> None:
        self.world, self._deadline_seconds = world, deadline_seconds
        self._backend, self._on_device = backend, on_device
        self._pipes: list[Connection] = []
        self._processes: list[Any] = []

    def __call__(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        if not all(process.is_alive() for process in self._processes):  # one died between two calls
            self.stop(kill=True)
        if not self._processes:
            self._start()
        self._signal(signal.SIGCONT)
        for pipe in self._pipes:
            pipe.send((function, args))
        results: dict[int, Any] = {}
        errors: dict[int, str] = {}
        deadline = time.monotonic() + self._deadline_seconds
        while len(results) < self.world and not errors and time.monotonic() < deadline:
            for pipe in wait([p for i, p in enumerate(self._pipes) if i not in results], timeout=0.2):
                rank = self._pipes.index(pipe)
                try:
                    value, error = pickle.loads(pipe.recv_bytes())
                except (EOFError, ConnectionResetError):
                    value, error = None, self._how_it_died(rank)
                except Exception:  # an answer that cannot be rebuilt here
                    value, error = None, traceback.format_exc()
                if error is None:
                    results[rank] = value
                else:
                    errors[rank] = error
        if len(results) == self.world:
            # Threads of gloo's wake all the time: the idle ranks of two workers would take a twentieth of a core.
            self._signal(signal.SIGSTOP)
            return [results[r] for r in range(self.world)]
        self.stop(kill=True)
        silent = sorted(set(range(self.world)) - set(results) - set(errors))
        raise AssertionError(
            "\n".join(f"rank {r}: {e}" for r, e in errors.items())
            or f"no answer within {self._deadline_seconds:g} s from ranks {silent}"
        )

    def _start(self) -> None:
        # A fork of a process that has only counted CUDA's devices cannot use them, and imports may count them.
        context: Any = multiprocessing.get_context("spawn") if self._on_device else forkserver()
        self._folder = tempfile.TemporaryDirectory()
        store = str(Path(self._folder.name) / "store")
        for rank in range(self.world):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_serve, args=(rank, self.world, self._backend, self._on_device, store, theirs), daemon=True
            )
            process.start()
            self._pipes.append(ours)
            self._processes.append(process)

    def _how_it_died(self, rank: int) -> str:
        self._processes[rank].join(10)
        crash = Path(self._folder.name) / f"store.crash{rank}"
        where = crash.read_text() if crash.exists() else "its folder is gone too: did a fork of this process exit?"
        return f"the process died (exit status {self._processes[rank].exitcode})\n{where}"

    def _signal(self, number: signal.Signals) -> None:
        for process in self._processes:
            with contextlib.suppress(ProcessLookupError):  # the process may have died
                os.kill(process.pid, number)

    def stop(self, *, kill: bool = False) -> None:
        """End the processes."""
        self._signal(signal.SIGCONT)
        for pipe, process in zip(self._pipes, self._processes, strict=True):
            if kill:
                process.kill()
            else:
                pipe.send(None)
        for pipe, process in zip(self._pipes, self._processes, strict=True):
            process.join(10)
            pipe.close()
        if self._processes:
            self._folder.cleanup()
        self._pipes, self._processes = [], []
