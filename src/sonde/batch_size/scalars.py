"""The user's own scalars of a window: a loss, a learning rate."""

from __future__ import annotations

import re

import torch
from torch import Tensor

from sonde.records import METRIC_NAME, RunLog


class Scalars:
    """Averages scalars by name until a measured window ends, which may be a thousand windows later: only sums are held.

    Args:
        log: of the run; a scalar must not have the name of a metric that its probes write.
    """

    def __init__(self, log: RunLog) -> None:
        self._log = log
        self._sums: dict[str, float | Tensor] = {}
        self._n: dict[str, int] = {}

    def add(self, name: str, value: float | Tensor) -> None:
        """Take one scalar.

        Raises:
            ValueError: for a tensor of more than one element, another type, a name that sonde itself writes, or a name
                that some trackers refuse.
        """
        if self._log.has_metric(name):
            raise ValueError(f"{name!r} is measured by sonde: log yours under another name")
        if not re.fullmatch(METRIC_NAME, name):
            raise ValueError(f"a scalar's name may hold letters, digits, '_' and '/', got {name!r}: rename it")
        if not isinstance(value, (int, float, Tensor)):
            raise ValueError(f"log({name}=...) takes a number or a 0-dim tensor, got {value!r}")
        if isinstance(value, Tensor) and (value.numel() != 1 or value.is_complex()):
            raise ValueError(
                f"log({name}=...) takes a real number or a 0-dim tensor, "
                f"got {value.dtype} of shape {tuple(value.shape)}"
            )
        self.note(name, value)

    def note(self, name: str, value: float | Tensor) -> None:
        """Take one scalar that is known to be one: a number or a real tensor of one element."""
        if isinstance(value, Tensor):
            # A copy, since the caller may go on adding to it; in fp32, which has every kind of arithmetic.
            value = value.detach().reshape(()).to(torch.float32, copy=True)
        self._sums[name] = self._sums.get(name, 0.0) + value
        self._n[name] = self._n.get(name, 0) + 1

    def take(self) -> dict[str, float | Tensor]:
        """The mean of each scalar since the last call. The scalars are then forgotten."""
        sums, n = self._sums, self._n
        self._sums, self._n = {}, {}
        return {name: total / n[name] for name, total in sums.items()}
