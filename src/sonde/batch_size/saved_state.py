"""A probe's saved state: its form in a checkpoint, its identity, and the refusal of a state with another identity.

In a checkpoint the state is a version and one text. Distributed checkpoints take a state apart by its keys, and read
only the keys that the loading probe's own state has, so the keys must not depend on what was measured.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from sonde.batch_size.budget import check_pace
from sonde.parallel.stages import ModelParameters
from sonde.stats.state import check_count, check_keys, check_number

VERSION = 5
_NESTED_VERSION = 4
"""Of states that were nested mappings themselves."""


def sealed(contents: Mapping[str, Any]) -> dict[str, Any]:
    """The state as it goes into a checkpoint.

    Args:
        contents: JSON values.
    """
    return {"version": VERSION, "json": json.dumps(contents)}


def unsealed(state: Any) -> dict[str, Any]:
    """The contents of a state from a checkpoint.

    Raises:
        ValueError: when it is of another version, has unknown or missing keys, or its text is damaged.
    """
    version = state.get("version") if isinstance(state, Mapping) else state
    if version == _NESTED_VERSION and isinstance(state, Mapping):
        return {name: value for name, value in state.items() if name != "version"}
    if version != VERSION or not isinstance(state, Mapping):
        raise ValueError(
            f"probe state has version {version!r:.60}, but this sonde reads versions {_NESTED_VERSION} and {VERSION}: "
            "start without the state"
        )
    check_keys("noise-scale probe state", state, {"version", "json"})
    try:
        contents = json.loads(state["json"])
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"the text of the probe state is no JSON, got {state['json']!r:.60}: is it damaged?"
        ) from error
    if not isinstance(contents, dict):
        raise ValueError(f"the text of the probe state must be a mapping, got {contents!r:.60}: is it damaged?")
    return contents


def identity(unit: str, metric: str, parameters: ModelParameters) -> dict[str, str]:
    """The unit, metric and parameters that are measured. Averages of others must not be continued."""
    # In order: the state refers to parameters by index.
    shapes = list(zip(parameters.names, parameters.shapes, strict=True))
    return {
        "unit": unit,
        "metric": metric,
        "parameters": hashlib.sha256(repr(shapes).encode()).hexdigest()[:16],
    }


def check_state(state: Mapping[str, Any], own: Mapping[str, str], parameters: Collection[str]) -> None:
    """Refuse contents that do not fit this probe. The tracker checks the averages in them.

    Args:
        state: the result of `unsealed`.
        own: this probe's `identity`.
        parameters: names of the measured parameters.

    Raises:
        ValueError: when they are of another unit, metric or of other parameters, have unknown or missing keys, or a
            value that cannot be what its name says.
    """
    # States from before "frozen" was saved are still read, and those from before windows were left out.
    later = {"frozen": [], "windows": 0, "pace": {}, "metrics": {}, "covered": None, "biased": False, "mechanism": None}
    check_keys("noise-scale probe state", {**later, **state}, {"what", "averages", "run", *later})
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
    _check_mechanism(state.get("mechanism"))
    if not isinstance(biased := state.get("biased", False), bool):
        raise ValueError(f"noise-scale probe state: biased must be true or false, got {biased!r:.60}: is it damaged?")
    if "windows" in state:
        check_count("noise-scale probe state", state, "windows")
    if "pace" in state:
        check_pace(state["pace"])


def _check_mechanism(choice: object) -> None:
    if choice is None:
        return
    is_pair = isinstance(choice, Sequence) and len(choice) == 2 and choice[0] in ("pieces", "examples")
    if not is_pair or type(choice[1]) is not int or choice[1] < 1:  # type: ignore[index]
        raise ValueError(
            "noise-scale probe state: mechanism must be 'pieces' or 'examples' and a number of pieces, got "
            f"{choice!r:.60}: is it damaged?"
        )
