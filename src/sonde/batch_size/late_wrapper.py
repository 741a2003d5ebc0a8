"""Notices a wrapper that a model gets after attach."""

from __future__ import annotations

import weakref

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from sonde.batch_size.taps.tap import Problem
from sonde.batch_size.unmeasured_parameters import UnmeasuredParameters
from sonde.parallel.refused_models import wrapper_around
from sonde.parallel.unwrap import unwrap_model
from sonde.parallel.wrappers import Wrapper

_MOST_LOOKS = 5
"""A look at every living object takes some hundredths of a second, so a run takes few."""


class LateWrapper:
    """Notices that a model was wrapped, cut or changed after attach, so that its windows cannot be measured.

    A cut model has other parameters, which every measured window shows. DDP leaves the parameters alone. So its module
    is looked for among all living objects, where a plain model trains in a job of several processes: when the first
    window ends, and again after windows whose gradient was changed.

    Args:
        model: as the user gave it to attach.
        wrapper: what it was wrapped in then.
        unmeasured: its parameters that are not measured.
    """

    def __init__(self, model: nn.Module, wrapper: Wrapper, unmeasured: UnmeasuredParameters) -> None:
        self._model, self._unmeasured = model, unmeasured
        self._may_come = wrapper.group is None
        self._is_due, self._n_looks = True, 0
        self._found: weakref.ref[nn.Module] | None = None

    def look_again(self) -> None:
        """Look for a wrapper when the next measured window ends: one may be what has changed a gradient."""
        self._is_due = self._n_looks < _MOST_LOOKS

    def problems(self) -> tuple[Problem, ...]:
        """Why the measured window that ends now cannot be used; empty without a wrapper that came late."""
        if (change := self._unmeasured.late_change()) is not None:
            return (change,)
        if self._may_come and self._is_due:
            self._is_due, self._n_looks = False, self._n_looks + 1
            wrapper = _averaging_wrapper(self._model)
            self._found = weakref.ref(wrapper) if wrapper is not None else None
        is_wrapped = self._found is not None and self._found() is not None
        return (Problem.WRAPPED_LATE,) if is_wrapped else ()


def _averaging_wrapper(model: nn.Module) -> nn.Module | None:
    """What averages the gradients of a model, or of a part of it, over several ranks; None without a wrapper."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return None
    inside = (m for m in model.modules() if isinstance(m, DistributedDataParallel))
    wrapper = next(inside, None) or wrapper_around(unwrap_model(model))
    is_alone = isinstance(wrapper, DistributedDataParallel) and wrapper.process_group.size() == 1
    return None if is_alone else wrapper
