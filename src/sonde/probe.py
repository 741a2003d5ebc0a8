"""What probes have in common: the two protocols, and what a probe declares."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable


@runtime_checkable
class Probe(Protocol):
    """Measures something of a training run at the end of every window.

    docs/write-your-own-probe.md shows one.
    """

    def step(self) -> None:
        """The window's gradients are whole, and the optimizer has not used them yet. Called on every rank.

        It does not wait for the device, except where a measurement takes passes of its own, as a forecast does.
        """

    def metrics(self) -> Mapping[str, float | None]:
        """What is known now, by metric name: letters, digits, `_` and `/`; None where a number is not known.

        This may wait for the device.
        """

    def close(self) -> None:
        """Remove everything that was installed. May be called twice."""


@runtime_checkable
class RolloutProbe(Protocol):
    """Measures something of a policy whenever there are responses that it sampled."""

    def measure(self, rollouts: Any, /) -> Any:
        """Measure these `Rollouts`; each rank passes its own. Returns the measurement."""

    def metrics(self) -> Mapping[str, float | None]:
        """The latest measurement by metric name; None where a number is not known."""

    def close(self) -> None:
        """Remove everything that was installed. May be called twice."""


@dataclass(frozen=True)
class ReportSection:
    """A section of the report that draws metrics of a probe as curves.

    Attributes:
        title: what is shown.
        text: how to read it, in plain text.
        metrics: names, in the order in which they are drawn.
    """

    title: str
    text: str
    metrics: tuple[str, ...]
