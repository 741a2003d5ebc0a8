"""What a probe's saved state is of, and the refusal of one that is of something else."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor

from sonde.stats.state import check_count, check_keys, check_number

VERSION = 3


def identity(unit: str, metric: str, parameters: Iterable[tuple[str, Tensor]]) -> dict[str, str]:
    """What is measured, in which unit and metric: averages of something else must not be gone on from."""
    shapes = [(name, tuple(p.shape)) for name, p in parameters]  # in their order: they are counted by it
    return {
        "unit": unit,
        "metric": metric,
        "parameters": hashlib.sha256(repr(shapes).encode()).hexdigest()[:16],
    }


def check_state(state: Any, here: Mapping[str, str]) -> None:
    """Refuse a state that does not fit this probe; its averages are for the tracker to judge.

    Args:
        state: what `state_dict` returned, perhaps.
        here: this probe's `identity`.

    Raises:
        ValueError: when it is of another version, unit, metric or of other parameters, has unknown or missing keys, or
            a value that cannot be what its name says.
    """
    if not isinstance(state, Mapping) or state.get("version") != VERSION:
        got = state.get("version") if isinstance(state, Mapping) else state
        raise ValueError(f"probe state has version {got!r:.60}, this sonde reads version {VERSION}")
    check_keys("noise-scale probe state", state, {"version", "what", "averages", "run"})
    check_keys("noise-scale probe state", state["what"], set(here))
    for name, value in here.items():
        if state["what"][name] != value:
            raise ValueError(f"the state is of other {name} ({state['what'][name]!r:.60}), this probe has {value!r}")
    run = state["run"]
    check_keys("run of the probe state", run, {"window", "units_seen"})
    check_count("run of the probe state", run, "window")
    check_number("run of the probe state", run, "units_seen", low=0)
