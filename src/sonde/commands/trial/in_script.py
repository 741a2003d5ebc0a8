"""Times the steps of a script that is tried, inside each of its processes. Nothing else is measured meanwhile.

A step lasts from the moment before the optimizer steps to that moment of the next step, with the loading of data, all
backwards, and the optimizer's own update. Each step is a line of a file, which the process that started the script
reads. A device is waited for at both ends of an update, so that its time is known.
"""

from __future__ import annotations

import json
import os
import resource
import time
import weakref
from pathlib import Path
from typing import Any, TextIO

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils._pytree import tree_leaves

from sonde.log.sinks import TRIAL

_FIRST_STEPS = 3
"""Steps whose data are counted. They allocate and compile, so their times are not used."""


class StepTimes:
    """Writes a line for each step: seconds, seconds of the update, backwards, elements of data, ranks, peak of memory.

    Args:
        path: of the file.
    """

    def __init__(self, path: Path) -> None:
        self._path, self._pid = path, os.getpid()
        self._file: TextIO | None = None
        self._leader: weakref.ref[torch.optim.Optimizer] | None = None
        """The optimizer whose steps are counted: the first that steps. Others may step beside it."""
        self._n_steps = self._n_backwards = self._n_elements = self._depth = 0
        self._begun: float | None = None
        self._update = self._update_begun = 0.0
        self._is_updating = self._has_closure = False
        backward = torch.autograd.backward

        def counted(*args: Any, **kwargs: Any) -> None:
            self._n_backwards += 1
            self._has_closure |= self._is_updating  # a closure's backward is no part of the update
            backward(*args, **kwargs)

        torch.autograd.backward = counted
        register_optimizer_step_pre_hook(self._before_update)
        register_optimizer_step_post_hook(self._after_update)
        pre = nn.modules.module.register_module_forward_pre_hook(self._before_call)
        post = nn.modules.module.register_module_forward_hook(self._after_call, with_kwargs=True, always_call=True)
        self._of_calls = [pre, post]

    def _before_call(self, *_: object) -> None:
        self._depth += 1

    def _after_call(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        """Count the elements of what the outermost modules are called with: they are in proportion to the batch."""
        self._depth -= 1
        if self._depth == 0 and torch.is_grad_enabled():
            self._n_elements += sum(leaf.numel() for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor))

    def _before_update(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        if os.getpid() != self._pid:
            return
        now = self._now()
        self._leader = self._leader or weakref.ref(optimizer)
        if self._leader() is optimizer:
            self._step_ended(now)
        self._is_updating, self._update_begun = True, now

    def _after_update(self, *_: object) -> None:
        self._is_updating = False
        self._update += self._now() - self._update_begun

    def _step_ended(self, now: float) -> None:
        if self._begun is not None:
            self._n_steps += 1
            self._write(
                seconds=now - self._begun,
                update=None if self._has_closure else self._update,
                backwards=self._n_backwards,
                elements=self._n_elements if self._of_calls else None,
                ranks=dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1,
                memory=self._memory(),
            )
            if self._n_steps == _FIRST_STEPS:
                for handle in self._of_calls:
                    handle.remove()
                self._of_calls = []
        self._begun, self._update, self._n_backwards, self._n_elements = now, 0.0, 0, 0

    def _write(self, **step: float | None) -> None:
        if self._file is None:
            rank = dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
            self._file = Path(f"{self._path}.{rank}").open("w", buffering=1)  # noqa: SIM115
        self._file.write(json.dumps(step) + "\n")

    def _now(self) -> float:
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            torch.cuda.synchronize()
        return time.perf_counter()

    def _memory(self) -> float:
        """Most bytes so far, of the device or of the process."""
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            return float(torch.cuda.max_memory_allocated())
        return 1024.0 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # KiB on Linux


def watch() -> None:
    """Time the steps of this process."""
    StepTimes(Path(os.environ[TRIAL]))
