"""Notices windows in which backward ran more often than the model's forward: their pieces share data."""

from __future__ import annotations

import time

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from sonde.batch_size.module_hook import ModuleHook, is_traced, put_on, why_no_hook
from sonde.parallel.devices import is_capturing, runs_beside_host


class ForwardWatch:
    """Compares the forward passes of a model with the backwards that were taken for pieces.

    Only backwards outside `piece()` are compared: whoever declares pieces knows them, and pays for no hook. A model
    whose submodules are called one by one has no forward pass of its own, and is not judged. Nor is a model that may
    have no hook, nor one whose forward was compiled with its hooks: forwards inside a graph are not counted, while
    those of other shapes may still run uncompiled.

    Args:
        model: as the user calls it.
        device: of the model.
        owner: lives as long as the model while forwards are watched: a loop that calls no probe need not keep it.
    """

    def __init__(self, model: nn.Module, device: torch.device, owner: object) -> None:
        self._forwards = _ForwardCounter(device, owner)
        self._may_be_recorded = runs_beside_host(device)
        self._handle: RemovableHandle | None = None
        self.n_backwards = 0
        """Backwards outside `piece()` in the present window."""
        self._had_more = False
        if not why_no_hook(model):
            self._handle = put_on(model.register_forward_hook, self._forwards)

    def backward_ended(self) -> None:
        """Count a backward outside `piece()`."""
        self.n_backwards += 1

    @property
    def n_forwards(self) -> int:
        """Forward passes of the present window so far."""
        return self._forwards.n

    @property
    def seconds(self) -> float:
        """Host time spent in the hook so far."""
        return self._forwards.seconds

    @property
    def were_recorded(self) -> bool:
        """Whether forwards with a graph of autograd have ever been recorded into a CUDA graph."""
        return self._forwards.were_recorded

    def window_passes(self) -> None:
        """Note the end of a window that was not measured: its backwards were not counted."""
        self._forwards.n = self.n_backwards = 0

    def window_ends(self, *, has_pieces: bool) -> bool:
        """Note the end of a measured window. If all its pieces were declared, forwards are no longer watched.

        Args:
            has_pieces: whether the window has any.

        Returns:
            Whether this window and the measured one before had more backwards than forwards. A single one proves
            nothing: a forward may have come before attach or in the window before, or the others have gone through
            submodules.
        """
        forwards, backwards = self._forwards.n, self.n_backwards
        self._forwards.n = self.n_backwards = 0
        had_more, self._had_more = self._had_more, 0 < forwards < backwards and not self._forwards.was_compiled
        # Whether graphs are recorded is asked in each forward, on devices that have graphs.
        if has_pieces and not (backwards or self._may_be_recorded or self._forwards.was_compiled):
            self.close()
        return self._had_more and had_more

    def close(self) -> None:
        """Remove the hook."""
        if self._handle is not None:
            self._handle.remove()
        self._handle = None


class _ForwardCounter(ModuleHook):
    """A forward hook that counts."""

    def __init__(self, device: torch.device, owner: object) -> None:
        self.n, self._owner = 0, owner
        self.seconds = 0.0
        self.was_compiled = self.were_recorded = False
        self._device, self._may_be_recorded = device, runs_beside_host(device)

    def __call__(self, module: nn.Module, args: object, output: object) -> None:
        if torch.compiler.is_compiling():
            # A count would be guarded by its value, and compiled again at each call. A constant is set without a guard.
            self.was_compiled = True
        elif not is_traced():
            start = time.perf_counter()
            if torch.is_grad_enabled():
                self.n += 1
                self.were_recorded |= self._may_be_recorded and is_capturing(self._device)
            self.seconds += time.perf_counter() - start
