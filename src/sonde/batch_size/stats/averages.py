"""The averages that a noise-scale reading is made of, and their saved state."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from sonde.batch_size.stats.changed_gradients import ChangedGradients
from sonde.batch_size.stats.dependence import Dependence
from sonde.batch_size.stats.scale_witness import ScaleReading
from sonde.batch_size.stats.solved_window import SolvedWindow
from sonde.batch_size.stats.window_row import Drop
from sonde.batch_size.stats.windows_of_run import WindowsOfRun
from sonde.stats.sealed_state import Stateful

_FIXED = 5
"""Measured windows in turn of as many units that show that batches have this size now."""
_MEMORY = 50.0
"""Measured windows over which units and the checks of data are averaged."""


class NoiseScaleAverages(Stateful):
    """The windows of a run, exponential averages beside them, and counts of the windows that were left out.

    Args:
        groups: names of the parameter groups, in the order of a window's entries.
        further_units: names of further units that windows are counted in.
        memory: of the exponential averages, in measured windows.
    """

    STATE = (
        *("run", "windows", "n_seen", "changed", "dependence", "dropped", "u", "scale", "scale_residual"),
        *("_effective", "_units", "_units_weight", "_last_units", "_n_equal", "_further"),
    )

    def __init__(self, groups: Sequence[str], further_units: Sequence[str] = (), *, memory: float = _MEMORY) -> None:
        self._decay = 1.0 - 1.0 / memory
        self._further: dict[str, list[float]] = {name: [0.0, 0.0] for name in further_units}
        """Of each further unit: its sum over windows, and the sum of units over the same windows."""
        self.run = WindowsOfRun(groups)
        self.windows = 0
        """Windows that were averaged."""
        self.n_seen = 0
        """The number of the last measured window in training, used or dropped."""
        self.changed = ChangedGradients(self._decay)
        self.dependence = Dependence(memory)
        self.dropped: dict[str, int] = {}
        self.last_drop = ""
        """Why the last window that was dropped was; not kept in the state."""
        self.n_missing = 0
        """Windows that were dropped since the last one that was averaged; not kept in the state."""
        self._effective: float | None = None
        """Effective units over units, in the last window."""
        self.u: float | None = None
        self.scale: float | None = None
        self.scale_residual: float | None = None
        self._units = self._units_weight = 0.0
        self._last_units, self._n_equal = 0.0, 0
        """Units of the last window, and how many windows in turn had as many."""

    def see_units(self, n_units: float, further_units: Sequence[float] = ()) -> None:
        """Average the units of a window, whether the window is used or dropped."""
        decay = self._decay
        for (name, sums), n in zip(self._further.items(), further_units, strict=True):
            if math.isfinite(n):
                self._further[name] = [decay * sums[0] + n, decay * sums[1] + n_units]
        self._n_equal = self._n_equal + 1 if n_units == self._last_units else 1
        self._last_units = n_units
        if self._n_equal == _FIXED and n_units != self._units:  # a changed batch is not averaged with the one before
            self._units_weight = 0.0
        self._units_weight = decay * self._units_weight + 1.0
        # So that the mean of equal windows is their size, to the last bit: a log shows it.
        self._units += (n_units - self._units) / self._units_weight

    def drop(self, drop: Drop, scale: ScaleReading) -> None:
        """Count a window that cannot be used."""
        self.last_drop, self.n_missing = drop.reason, self.n_missing + 1
        self.changed.update(scale, why_changed=drop.reason if drop.kind == "changed" else None, averaged=False)
        self.dropped[drop.reason] = self.dropped.get(drop.reason, 0) + 1

    def add(self, window: SolvedWindow, scale: ScaleReading, rate: float | None = None) -> None:
        """Average a window."""
        self.changed.update(scale, why_changed=None, averaged=True)
        self.run.add(window, self.n_seen, rate)
        self.windows, self.n_missing = self.windows + 1, 0
        numbers = {"differences": (window.witness_differences, window.witness_squares)}
        if (ranks := window.within_between) is not None:
            numbers["consistency"] = ranks.trace_cov, ranks.grad_sq
        self.dependence.add(numbers)
        self._effective, self.u = window.effective_units / self._last_units, window.u
        self.scale, self.scale_residual = scale.scale, scale.residual

    @property
    def units_per_window(self) -> float | None:
        """Average units of a window; None before the first."""
        return self._units if self._units_weight else None

    def effective(self, n_units: float | None) -> float | None:
        """The effective number of so many units (Kish), if they weigh as those of the last window do."""
        return None if n_units is None or self._effective is None else n_units * self._effective

    @property
    def further_per_unit(self) -> dict[str, float | None]:
        """How many of each further unit one unit is, on average; None before the first window."""
        return {name: n / n_units if n_units else None for name, (n, n_units) in self._further.items()}

    @property
    def consistency(self) -> float | None:
        """As `Dependence.consistency`."""
        return self.dependence.consistency

    def doubts(self) -> dict[str, str]:
        """Reasons not to trust the averages, however narrow their interval: messages by name."""
        changed = self.changed.doubt()
        return ({} if changed is None else {"changed": changed}) | self.dependence.doubts()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned, of averages with the same groups and memory, in averages just made."""
        own = self._further
        super().load_state_dict(state)
        # Further units that only one of the two runs counts in begin anew: they only convert the estimate.
        self._further = {name: self._further.get(name, sums) for name, sums in own.items()}
