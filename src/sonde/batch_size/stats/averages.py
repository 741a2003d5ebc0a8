"""The averages that a noise-scale reading is made of, and their saved state."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from sonde.batch_size.stats.changed_gradients import ChangedGradients
from sonde.batch_size.stats.example_order import ExampleWatch
from sonde.batch_size.stats.neighbours import NeighbourWatch
from sonde.batch_size.stats.noise_scale import RunningNoiseScale
from sonde.batch_size.stats.piece_order import OrderWatch
from sonde.batch_size.stats.repeats import RepeatWatch
from sonde.batch_size.stats.scale_witness import ScaleReading
from sonde.batch_size.stats.solved_window import SolvedWindow
from sonde.batch_size.stats.window_row import Drop
from sonde.batch_size.stats.windows_of_run import WindowsOfRun

_SAME = 1e-9
"""Ratio of noise to signal below which pieces hold the same data. Kernels without a fixed order of sums leave 1e-12."""
_FIXED = 5
"""Measured windows in turn of as many units that show that batches have this size now."""
_MEMORY = 50.0
"""Measured windows over which units and the checks of data are averaged."""


class NoiseScaleAverages:
    """The windows of a run, exponential averages beside them, and counts of the windows that were left out.

    Args:
        groups: names of the parameter groups, in the order of a window's entries.
        further_units: names of further units that windows are counted in.
        memory: of the exponential averages, in measured windows.
    """

    def __init__(self, groups: Sequence[str], further_units: Sequence[str] = (), *, memory: float = _MEMORY) -> None:
        self._memory = memory
        self.further_units = tuple(further_units)
        self._further: dict[str, tuple[float, float]] = dict.fromkeys(further_units, (0.0, 0.0))
        """Of each further unit: its sum over windows, and the sum of units over the same windows."""
        self.run = WindowsOfRun(groups)
        self.windows = 0
        """Windows that were averaged."""
        self.n_seen = 0
        """The number of the last measured window in training, used or dropped."""
        self.within_between = RunningNoiseScale(memory)
        """tr Σ within ranks (as its trace) and between ranks (as its signal): the ratio is the consistency."""
        self.changed = ChangedGradients(self._decay)
        self.neighbours = NeighbourWatch(self._decay)
        self.order = OrderWatch(self._decay)
        self.examples = ExampleWatch(self._decay)
        self.repeats = RepeatWatch(self._decay)
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
        self._squares = self._differences = 0.0

    def see_units(self, n_units: float, further_units: Sequence[float] = ()) -> None:
        """Average the units of a window, whether the window is used or dropped."""
        decay = self._decay
        for (name, sums), n in zip(self._further.items(), further_units, strict=True):
            if math.isfinite(n):
                self._further[name] = (decay * sums[0] + n, decay * sums[1] + n_units)
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
        if window.within_between is not None:
            self.within_between.update(window.within_between)
        decay = self._decay
        self._squares = decay * self._squares + window.witness_squares
        self._differences = decay * self._differences + window.witness_differences
        self._effective, self.u = window.effective_units / self._last_units, window.u
        self.scale, self.scale_residual = scale.scale, scale.residual

    @property
    def _decay(self) -> float:
        return 1.0 - 1.0 / self._memory

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
        """tr Σ within ranks over tr Σ between ranks; infinite where ranks do not differ; None if not measurable."""
        within, between = self.within_between.trace_cov, self.within_between.grad_sq
        if within is None or between is None:
            return None
        # Ranks with the same data differ by rounding only.
        return within / between if between > _SAME * within else math.inf

    @property
    def pieces_differ(self) -> bool:
        """Whether the pieces of a window differ by more than rounding."""
        return self._squares == 0.0 or self._differences > _SAME * self._squares

    def state_dict(self) -> dict[str, Any]:
        """Everything that `load_state_dict` needs; numbers, strings and containers of them."""
        return {
            "run": self.run.state_dict(),
            "windows": self.windows,
            "n_seen": self.n_seen,
            "consistency": self.within_between.state_dict(),
            "units": self._units,
            "units_weight": self._units_weight,
            "last_units": self._last_units,
            "n_equal": self._n_equal,
            "squares": self._squares,
            "differences": self._differences,
            "effective": self._effective,
            "u": self.u,
            "scale": self.scale,
            "scale_residual": self.scale_residual,
            "changed_gradients": self.changed.state_dict(),
            "neighbours": self.neighbours.state_dict(),
            "order": self.order.state_dict(),
            "examples": self.examples.state_dict(),
            "repeats": self.repeats.state_dict(),
            "dropped": dict(self.dropped),
            "further_units": {name: list(sums) for name, sums in self._further.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned, of averages with the same groups and memory, in averages just made."""
        self.run.load_state_dict(state["run"])
        self.n_seen, self.windows = state["n_seen"], state["windows"]
        self.within_between.load_state_dict(state["consistency"])
        self.changed.load_state_dict(state["changed_gradients"])
        self.neighbours.load_state_dict(state["neighbours"])
        self.order.load_state_dict(state["order"])
        self.examples.load_state_dict(state["examples"])
        self.repeats.load_state_dict(state["repeats"])
        self._units, self._units_weight = state["units"], state["units_weight"]
        self._last_units, self._n_equal = state["last_units"], state["n_equal"]
        self._squares, self._differences = state["squares"], state["differences"]
        self._effective, self.u = state["effective"], state["u"]
        self.scale, self.scale_residual = state["scale"], state["scale_residual"]
        self.dropped = dict(state["dropped"])
        # Further units that only one of the two runs counts in begin anew: they only convert the estimate.
        for name, (n, n_units) in state["further_units"].items():
            if name in self._further:
                self._further[name] = (n, n_units)
