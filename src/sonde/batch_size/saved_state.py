"""The identity of a probe's saved state, and the refusal of a state with another identity."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping
from typing import Any

from sonde.batch_size.budget import check_pace
from sonde.parallel.stages import ModelParameters
from sonde.stats.state import check_count, check_keys, check_number

VERSION = 4


def identity(unit: str, metric: str, parameters: ModelParameters) -> dict[str, str]:
    """The unit, metric and parameters that are measured. Averages of others must not be continued."""
    # In order: the state refers to parameters by index.
    shapes = list(zip(parameters.names, parameters.shapes, strict=True))
    return {
        "unit": unit,
        "metric": metric,
        "parameters": hashlib.sha256(repr(shapes).encode()).hexdigest()[:16],
    }


def check_state(state: Any, own: Mapping[str, str], parameters: Collection[str]) -> None:
    """Refuse a state that does not fit this probe. The tracker checks the averages in it.

    Args:
        state: an object that should be the result of `state_dict`.
        own: this probe's `identity`.
        parameters: names of the measured parameters.

    Raises:
        ValueError: when it is of another version, unit, metric or of other parameters, has unknown or missing keys, or
            a value that cannot be what its name says.
    """
    if not isinstance(state, Mapping) or state.get("version") != VERSION:
        got = state.get("version") if isinstance(state, Mapping) else state
        raise ValueError(
            f"probe state has version {got!r:.60}, but this sonde reads version {VERSION}: start without the state"
        )
    # States from before "frozen" was saved are still read, and those from before windows were left out.
    later = {"frozen": [], "windows": 0, "pace": {}, "metrics": {}}
    check_keys("noise-scale probe state", {**later, **state}, {"version", "what", "averages", "run", *later})
    check_keys("noise-scale probe state", state["what"], set(own))
    for name, value in own.items():
        if state["what"][name] != value and name == "parameters":
            raise ValueError(
                "the state was saved by a probe that measured other parameters (names, shapes or order differ): attach "
                "before any parameter is frozen or released, as in the run that saved it, or start without the state"
            )
        if state["what"][name] != value:
            raise ValueError(
                f"the state was saved with {name} {state['what'][name]!r:.60}, but this probe has {name} {value!r}: "
                "load the state into a probe of the same unit, metric and parameters"
            )
    frozen = state.get("frozen", [])
    if not isinstance(frozen, list) or not all(isinstance(name, str) and name in parameters for name in frozen):
        raise ValueError(f"frozen must be names of measured parameters, got {frozen!r:.60}: is the state damaged?")
    run = state["run"]
    check_keys("run of the probe state", run, {"window", "units_seen"})
    check_count("run of the probe state", run, "window")
    check_number("run of the probe state", run, "units_seen", low=0)
    if "windows" in state:
        check_count("noise-scale probe state", state, "windows")
    if "pace" in state:
        check_pace(state["pace"])
