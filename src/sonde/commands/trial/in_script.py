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
from collections import Counter
from pathlib import Path
from typing import Any, TextIO

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils._pytree import tree_leaves

from sonde.log.sinks import TRIAL


class StepTimes:
    """Writes a line for each step: seconds, those of the update, backwards, elements and sizes of data, ranks, memory.

    `is_even` says whether each optimizer of the script has stepped once in this step.
    The environment tells the path of the file, to which the rank is added.
    """

    def __init__(self) -> None:
        self._path, self._pid = os.environ[TRIAL], os.getpid()  # the script may clear its environment
        self._file: TextIO | None = None
        self._leader: weakref.ref[torch.optim.Optimizer] | None = None
        """The optimizer whose steps are counted: the first that steps. Others may step beside it."""
        self._optimizers = weakref.WeakSet[torch.optim.Optimizer]()
        self._n_updates = self._n_backwards = self._n_elements = self._depth = 0
        self._sizes = Counter[str]()
        """Of each dim of each tensor that outermost modules are called with."""
        self._begun: float | None = None
        self._update = self._update_begun = 0.0
        self._is_updating = self._has_closure = self._is_in_module = False
        backward, call = torch.autograd.backward, nn.Module.__call__

        def counted(*args: Any, **kwargs: Any) -> None:
            self._n_backwards += not self._depth  # checkpointed layers have backwards of their own
            self._has_closure |= self._is_updating  # a closure's backward is no part of the update
            self._depth += 1
            try:
                backward(*args, **kwargs)
            finally:
                self._depth -= 1

        def called(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            # Asked first: compiled code must depend on nothing that is counted here, or it is compiled again and again.
            if torch.compiler.is_compiling() or self._is_in_module or not torch.is_grad_enabled():
                return call(module, *args, **kwargs)
            # Of what an outermost module is called with, something is in proportion to the batch.
            given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
            data = [leaf for leaf in given if not isinstance(leaf, nn.Parameter)]
            self._n_elements += sum(leaf.numel() for leaf in data)
            self._sizes.update({f"{k} {dim}": n for k, leaf in enumerate(data) for dim, n in enumerate(leaf.shape)})
            self._is_in_module = True
            try:
                return call(module, *args, **kwargs)
            finally:
                self._is_in_module = False

        # torch.compile leaves this function alone only where it takes it for a part of torch, as it does `call`.
        called.__code__ = called.__code__.replace(co_filename=nn.modules.module.__file__)
        torch.autograd.backward = counted
        nn.Module.__call__ = called  # type: ignore[method-assign]
        register_optimizer_step_pre_hook(self._before_update)
        register_optimizer_step_post_hook(self._after_update)

    def _before_update(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        if os.getpid() != self._pid:
            return
        now = self._now()
        self._leader = self._leader or weakref.ref(optimizer)
        if self._leader() is optimizer:
            self._step_ended(now)
        self._optimizers.add(optimizer)
        self._n_updates += 1
        self._is_updating, self._update_begun = True, now

    def _after_update(self, *_: object) -> None:
        self._is_updating = False
        self._update += self._now() - self._update_begun

    def _step_ended(self, now: float) -> None:
        if self._begun is not None:
            has_ranks = dist.is_available() and dist.is_initialized()
            rank, ranks = (dist.get_rank(), dist.get_world_size()) if has_ranks else (0, 1)
            self._file = self._file or Path(f"{self._path}.{rank}").open("w", buffering=1)  # noqa: SIM115
            step = {
                "seconds": now - self._begun,
                "backwards": self._n_backwards,
                "elements": self._n_elements,
                "sizes": self._sizes,
                "is_even": self._n_updates == len(self._optimizers),
                "ranks": ranks,
                "memory": self._memory(),
            }
            if not self._has_closure:
                step["update"] = self._update
            self._file.write(json.dumps(step) + "\n")
        self._begun, self._update, self._n_updates, self._n_backwards, self._n_elements = now, 0.0, 0, 0, 0
        self._sizes.clear()

    def _now(self) -> float:
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
        return time.perf_counter()

    def _memory(self) -> float:
        """Most bytes so far, of the device or of the process."""
        if torch.cuda.is_initialized():
            return float(torch.cuda.max_memory_allocated())
        return 1024.0 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # KiB on Linux
