"""Parameters that are frozen in mid-run, or trained again: all ranks learn of it with the same window.

Every measured window's sum over ranks carries two numbers of each rank: how many of its parameters are frozen, and a
hash of which. Where the sums change, the noise scale begins anew. Groups without gradients leave a reading by
themselves.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from sonde.batch_size.units import as_vector
from sonde.parallel.devices import exact_bits
from sonde.wording import some_of

_FOR = 3
"""Windows in a row after which `requires_grad` counts as changed. A loop that alternates is left alone."""
_MOST_BITS = 32
"""Of the hash."""


class FrozenWatch:
    """Looks at the end of each measured window which parameters are trained.

    Where `requires_grad` seems to have changed, it looks at the windows that follow too, measured or not: in a loop
    that alternates, several measured windows in a row may lack the same parameters by chance.

    Args:
        parameters: measured parameters of this rank, by name.
        n_ranks: ranks that windows are summed over.
        n_stages: ranks of the pipeline, or 1. As many ranks hold each stage's parameters, or a part of each.
        device: where the sums live.
    """

    def __init__(self, parameters: Mapping[str, Tensor], *, n_ranks: int, n_stages: int, device: torch.device) -> None:
        self._parameters, self._device = dict(parameters), device
        self._n_holding = max(1, n_ranks // n_stages)
        """Ranks that hold each parameter, or a part of it."""
        self._n_hashes = 2 ** min(exact_bits(device, n_ranks), _MOST_BITS)
        self._frozen: tuple[str, ...] | None = None
        """What this rank holds and does not train; None before the first window."""
        self._sent: tuple[tuple[str, ...], Tensor] | None = None
        self._told: tuple[str, ...] = ()
        """What of it was frozen in the first window that arrived, or when an alert told it last."""
        self._seen: tuple[str, ...] = ()
        self._n_seen = 0
        """What was frozen when this looked last, where that is something else; and how often in a row."""
        self.of_all: list[float] | None = None
        """The numbers of all ranks in the last window that has arrived, over the ranks that hold each parameter."""

    @property
    def is_undecided(self) -> bool:
        """Whether `requires_grad` may have changed, so that the next window is looked at even if it is not measured."""
        return self._n_seen > 0

    def look(self) -> None:
        """Look at a window that ends."""
        now = tuple(name for name, p in self._parameters.items() if not p.requires_grad)
        if self._frozen in (None, now):
            self._frozen, self._n_seen = now, 0
            return
        self._n_seen = self._n_seen + 1 if now == self._seen else 1
        self._seen = now
        if self._n_seen == _FOR:
            self._frozen, self._n_seen = now, 0

    def numbers(self) -> Tensor:
        """What this rank adds to the sum of a measured window; [2]."""
        frozen = self._frozen or ()
        if self._sent is None or self._sent[0] != frozen:  # made once, since each costs a copy to the device
            which = zlib.crc32(" ".join(frozen).encode()) % self._n_hashes
            self._sent = frozen, as_vector([float(len(frozen)), float(which)], self._device)
        return self._sent[1]

    def arrived(self, numbers: Tensor) -> tuple[str, str] | None:
        """Take the sum over ranks of a window; windows in order.

        Returns:
            The name of an alert and its message, if other parameters are trained than in the window before.
        """
        before, self.of_all = self.of_all, (numbers.double() / self._n_holding).tolist()
        now = self._frozen or ()
        if before is None:
            self._told = now
        if before in (None, self.of_all):
            return None
        gone, back = [n for n in now if n not in self._told], [n for n in self._told if n not in now]
        self._told = now
        is_frozen = bool(gone) or (not back and self.of_all[0] >= before[0])
        changes = []
        if is_frozen:
            changes.append(f"measured parameters are no longer trained ({some_of(gone, 2) or 'of other ranks'})")
        if back or not is_frozen:
            changes.append(f"measured parameters are trained again ({some_of(back, 2) or 'of other ranks'})")
        message = f"{', and '.join(changes)}: the noise scale begins anew {'without' if is_frozen else 'with'} them"
        return "frozen" if is_frozen else "unfrozen", message

    def restore(self, of_all: Sequence[float] | None) -> None:
        """Go on from the `of_all` of a saved state."""
        self._frozen, self._n_seen = None, 0
        self.of_all = None if of_all is None else list(of_all)
