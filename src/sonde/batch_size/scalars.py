"""The user's own scalars of a window: a loss, a learning rate."""

from __future__ import annotations

import re

import torch
from torch import Tensor

from sonde.records import METRIC_NAME, RunLog


class Scalars:
    """Collects scalars by name until their window ends. A scalar that is given several times is averaged.

    Args:
        log: of the run; a scalar must not have the name of a metric that its probes write.
    """

    def __init__(self, log: RunLog) -> None:
        self._log = log
        self._given: dict[str, list[float | Tensor]] = {}

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
        if isinstance(value, Tensor):
            if value.numel() != 1 or value.is_complex():
                raise ValueError(
                    f"log({name}=...) takes a real number or a 0-dim tensor, "
                    f"got {value.dtype} of shape {tuple(value.shape)}"
                )
            # A copy, since the caller may go on adding to it; in fp32, which has every kind of arithmetic.
            value = value.detach().reshape(()).to(torch.float32, copy=True)
        self._given.setdefault(name, []).append(value)

    def take(self) -> dict[str, float | Tensor]:
        """The mean of each scalar since the last call. The scalars are then forgotten."""
        given, self._given = self._given, {}
        return {name: sum(values) / len(values) for name, values in given.items()}
