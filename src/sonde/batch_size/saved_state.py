"""The noise-scale probe's saved state: its identity, and the refusal of a state with another identity."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from sonde.batch_size.budget import check_pace
from sonde.parallel.stages import ModelParameters
from sonde.stats.sealed_state import check_identity, parameters_digest, unsealed
from sonde.stats.state import check_count, check_keys, check_number

_LABEL = "noise-scale probe state"


def identity(unit: str, metric: str, parameters: ModelParameters) -> dict[str, str]:
    """The probe, and what it measures: unit, metric and parameters. Averages of others must not be continued."""
    return {
        "probe": "NoiseScaleProbe",
        "unit": unit,
        "metric": metric,
        "parameters": parameters_digest(parameters.names, parameters.shapes),
    }


def checked_contents(state: Any, own: Mapping[str, str], parameters: Collection[str]) -> dict[str, Any]:
    """The contents of a state from a checkpoint, if they fit this probe. The tracker checks the averages in them.

    Args:
        state: from a checkpoint.
        own: this probe's `identity`.
        parameters: names of the measured parameters of the whole model.

    Raises:
        ValueError: when the state is of another version, unit, metric or of other parameters, has unknown or missing
            keys, a text that is damaged, or a value that cannot be what its name says.
    """
    contents = unsealed(_LABEL, state)
    check_identity(_LABEL, contents.get("what"), own)
    check_keys(_LABEL, contents, {"what", "averages", "metrics", "frozen", "run", "windows", "covered", "pace"})
    frozen = contents["frozen"]
    if not isinstance(frozen, list) or not all(isinstance(name, str) and name in parameters for name in frozen):
        raise ValueError(f"frozen must be names of measured parameters, got {frozen!r:.60}: is the state damaged?")
    run = contents["run"]
    check_keys("run of the probe state", run, {"window", "units_seen"})
    check_count("run of the probe state", run, "window")
    check_number("run of the probe state", run, "units_seen", low=0)
    check_count(_LABEL, contents, "windows")
    averages = contents["averages"]
    seen = averages.get("n_seen") if isinstance(averages, Mapping) else None
    if isinstance(seen, int) and seen > contents["windows"]:
        raise ValueError(
            f"{_LABEL}: window {seen} was measured, but {contents['windows']} windows have ended: is it damaged?"
        )
    if contents["covered"] is not None:
        check_count(_LABEL, contents, "covered")
    check_pace(contents["pace"])
    return contents
