"""The result of a measurement at fixed weights, and what it prints on the way."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from torch import Tensor, nn

from sonde.batch_size.setup import BATCH_NORM, n_batch_norms
from sonde.batch_size.stats.reading import NoiseScaleReading
from sonde.wording import duration, number, plural

Ending = Literal["precise", "data ended", "limit"]
"""Why a measurement ended: the interval is as narrow as was asked for, or there was no more to take."""


@dataclass(frozen=True)
class Measurement:
    """The noise scale of a model at fixed weights.

    Attributes:
        reading: the noise scale of the whole model and of each group, averaged over all windows.
        ended: why the measurement ended; None while it goes on.
        until: the precision that was asked for.
        n_units: units measured, on all ranks.
        n_batches: micro-batches measured, on all ranks.
        loss: mean loss over them, each with its weight; None before the first window.
        seconds: how long it took.
    """

    reading: NoiseScaleReading
    ended: Ending | None
    until: float
    n_units: float
    n_batches: int
    loss: float | None
    seconds: float

    @property
    def precision(self) -> float | None:
        """The distance of the interval's farther end from B_simple, over B_simple; None unless both ends are known."""
        return precision(self.reading.b_simple, self.reading.low, self.reading.high)

    def __str__(self) -> str:
        known, unit = self.reading, self.reading.unit
        text = f"B_simple not known ({known.reason})"
        if known.status == "resolved":
            text = f"B_simple {number(known.b_simple)} {unit} [{number(known.low)} – {number(known.high)}]"
        elif known.status == "lower_bound":
            text = f"B_simple > {number(known.low)} {unit}"
        elif known.status == "upper_bound":
            text = f"B_simple < {number(known.high)} {unit}"
        if self.precision is not None:
            text += f", ± {100 * self.precision:.3g} %"
        return f"{text}, from {number(self.n_units)} {unit} in {duration(self.seconds)}{self._ending()}"

    def _ending(self) -> str:
        if self.ended is None or (self.ended == "precise" and self.precision is not None):
            return ""
        why = {"data ended": "the data ended", "limit": "the limit was reached", "precise": "the numbers are in doubt"}
        # The reason of a reading in doubt is its advice already.
        advice = f": {self.reading.advice}" if self.reading.advice else ""
        return f"; {why[self.ended]} before ± {100 * self.until:.3g} %{advice}"


def precision(b_simple: float | None, low: float | None, high: float | None) -> float | None:
    """The distance of an interval's farther end from B_simple, over B_simple; None unless both ends are known."""
    if not b_simple or low is None or high is None or math.isinf(high):
        return None
    return max(high / b_simple - 1.0, 1.0 - low / b_simple)


_DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)


def beginning(model: nn.Module, parameters: Sequence[Tensor], *, n_ranks: int, unit: str) -> Iterator[str]:
    """What is measured, line by line, for people.

    Args:
        model: as the user passed it.
        parameters: that are measured.
        n_ranks: that measure together.
        unit: plural name of the unit.
    """
    n_parameters = plural(sum(p.numel() for p in parameters), "trainable parameter")
    on_ranks = f", {n_ranks} ranks" if n_ranks > 1 else ""
    yield f"measuring {n_parameters} on {parameters[0].device}{on_ranks}, in {unit}"
    if n := sum(m.training and m.p > 0 for m in model.modules() if isinstance(m, _DROPOUTS)):
        layers = plural(n, "dropout layer")
        yield f"{layers} in train mode: this adds noise, as in training. model.eval() turns dropout off"
    if n := n_batch_norms(model):
        yield f"{plural(n, 'layer')}: {BATCH_NORM}"
