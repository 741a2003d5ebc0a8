"""The noise-scale probe's saved state: its identity, and the refusal of a state with another identity."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from sonde.batch_size.budget import check_pace
from sonde.parallel.stages import ModelParameters
from sonde.stats import sealed_state
from sonde.stats.sealed_state import check_identity, parameters_digest
from sonde.stats.state import check_count, check_keys, check_number

_LABEL = "noise-scale probe state"
_NESTED_VERSION = 4
"""Of states that were nested mappings themselves."""


def unsealed(state: Any) -> dict[str, Any]:
    """The contents of a state from a checkpoint.

    Raises:
        ValueError: when it is of another version, has unknown or missing keys, or its text is damaged.
    """
    if isinstance(state, Mapping) and state.get("version") == _NESTED_VERSION:
        return {name: value for name, value in state.items() if name != "version"}
    return sealed_state.unsealed(_LABEL, state, older=[_NESTED_VERSION])


def identity(unit: str, metric: str, parameters: ModelParameters) -> dict[str, str]:
    """The unit, metric and parameters that are measured. Averages of others must not be continued."""
    return {
        "unit": unit,
        "metric": metric,
        "parameters": parameters_digest(parameters.names, parameters.shapes),
    }


def check_state(state: Mapping[str, Any], own: Mapping[str, str], parameters: Collection[str]) -> None:
    """Refuse contents that do not fit this probe. The tracker checks the averages in them.

    Args:
        state: the result of `unsealed`.
        own: this probe's `identity`.
        parameters: names of the measured parameters of the whole model.

    Raises:
        ValueError: when they are of another unit, metric or of other parameters, have unknown or missing keys, or a
            value that cannot be what its name says.
    """
    # States from before "frozen" was saved are still read, and those from before windows were left out.
    later = {"frozen": [], "windows": 0, "pace": {}, "metrics": {}, "covered": None}
    check_identity(_LABEL, state.get("what"), own)
    check_keys(_LABEL, {**later, **state}, {"what", "averages", "run", *later})
    frozen = state.get("frozen", [])
    if not isinstance(frozen, list) or not all(isinstance(name, str) and name in parameters for name in frozen):
        raise ValueError(f"frozen must be names of measured parameters, got {frozen!r:.60}: is the state damaged?")
    run = state["run"]
    check_keys("run of the probe state", run, {"window", "units_seen"})
    check_count("run of the probe state", run, "window")
    check_number("run of the probe state", run, "units_seen", low=0)
    if "windows" in state:
        check_count(_LABEL, state, "windows")
        averages = state["averages"]
        seen = averages.get("n_seen") if isinstance(averages, Mapping) else None
        if isinstance(seen, int) and seen > state["windows"]:
            raise ValueError(
                f"{_LABEL}: window {seen} was measured, but {state['windows']} windows have ended: is it damaged?"
            )
    if state.get("covered") is not None:
        check_count(_LABEL, state, "covered")
    if "pace" in state:
        check_pace(state["pace"])
