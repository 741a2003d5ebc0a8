"""What every probe has in common, so that a training loop can call those it has without knowing which they are."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol, runtime_checkable


@runtime_checkable
class Probe(Protocol):
    """Measures something of a training run, at the end of every window.

    docs/write-your-own-probe.md shows one.
    """

    def step(self) -> None:
        """The window's gradients are whole, and the optimizer has not used them yet. On every rank.

        It does not wait for the device, except where a measurement takes passes of its own, as a forecast does.
        """

    def metrics(self) -> Mapping[str, float | None]:
        """What is known by now, by metric name: letters, digits, `_` and `/`; None where unknown.

        This may wait for the device.
        """

    def close(self) -> None:
        """Take away whatever was installed. May be called twice."""
