"""Gradients that were still in `.grad` when a window's first backward came, or no longer when another one came."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from sonde.batch_size.taps.autograd_internals import backward_number
from sonde.batch_size.taps.tap import Number
from sonde.batch_size.taps.witness import Witness
from sonde.parallel.devices import to_device
from sonde.parallel.placements import local_tensor, spec_of


class LeftOvers:
    """Looks at `.grad` of a few parameters before autograd first adds to it in a window.

    Args:
        parameters: all measured parameters, whole or sharded.
        witness: which parameters to look at, and which of their elements.
    """

    def __init__(self, parameters: Sequence[Tensor], witness: Witness) -> None:
        self.watched = {i: parameters[i] for i in witness.fixed}
        self._witness, self._device = witness, parameters[0].device
        self._found: list[Tensor] = []
        self.new_window()

    def new_window(self) -> None:
        """The next backward is the first of a window."""
        self.unseen = set(self.watched)
        """Watched parameters that no backward of this window has reached."""
        self._first: int | None = None
        """Autograd's number of the window's first backward."""

    def look(self, index: int) -> None:
        """Look at a parameter in `unseen`, in a hook that runs before autograd adds to `.grad`."""
        self.unseen.discard(index)
        if self._first is None:
            self._first = backward_number()
        grad = self.watched[index].grad
        # After the first backward, DDP or FSDP2 may have reduced other ranks' gradients of this window into `.grad`.
        if grad is None or grad.is_sparse or backward_number() != self._first:
            return
        # The answer stays on the device.
        elements = self._witness.read_shard(index, local_tensor(grad.detach()), spec_of(grad))
        self._found.append(elements.any())

    def are_gone(self) -> bool:
        """Whether a watched parameter that a backward of this window has reached has no `.grad`. It looks at one."""
        for index, parameter in self.watched.items():
            if index not in self.unseen:
                return parameter.grad is None
        return False

    def take(self) -> Number:
        """How many parameters had a gradient left over since the last call."""
        found, self._found = self._found, []
        return torch.stack([to_device(n, self._device) for n in found]).sum() if found else 0
