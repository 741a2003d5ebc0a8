"""A probe's state as it goes into a checkpoint: a version and one text, which says of what it is the state.

Distributed checkpoints take a state apart by its keys, and read only the keys that the loading probe's own state has,
so the keys must not depend on what was measured.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from sonde.stats.state import check_keys

VERSION = 6
"""Of the form."""


def sealed(contents: Mapping[str, Any]) -> dict[str, Any]:
    """The state as it goes into a checkpoint.

    Args:
        contents: JSON values.
    """
    return {"version": VERSION, "json": json.dumps(contents)}


def unsealed(label: str, state: Any) -> dict[str, Any]:
    """The contents of a state from a checkpoint.

    Args:
        label: of the state, for messages.
        state: the result of `sealed`.

    Raises:
        ValueError: when the state is of another version, has unknown or missing keys, or its text is damaged.
    """
    version = state.get("version") if isinstance(state, Mapping) else state
    if not isinstance(state, Mapping) or version != VERSION:
        raise ValueError(
            f"{label} has version {version!r:.60}, but this sonde reads version {VERSION}: start without the state"
        )
    check_keys(label, state, {"version", "json"})
    try:
        contents = json.loads(state["json"])
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"the text of the {label} is no JSON, got {state['json']!r:.60}: is it damaged?") from error
    if not isinstance(contents, dict):
        raise ValueError(f"the text of the {label} must be a mapping, got {contents!r:.60}: is it damaged?")
    return contents


def parameters_digest(names: Sequence[str], shapes: Sequence[object]) -> str:
    """A text that differs where the names, the whole shapes or the order of parameters differ.

    Their order counts, since a state may refer to parameters by index.
    """
    named_shapes = list(zip(names, shapes, strict=True))
    return hashlib.sha256(repr(named_shapes).encode()).hexdigest()[:16]


def check_identity(label: str, saved: Any, own: Mapping[str, object]) -> None:
    """Refuse the averages of something else than the loading probe measures.

    Args:
        label: of the state, for messages.
        saved: what the state says of the probe that saved it.
        own: the same of the loading probe. "probe" is the name of its class, and "parameters" is the result of
            `parameters_digest`.

    Raises:
        ValueError: when the two differ, naming the first difference.
    """
    if isinstance(saved, Mapping) and (saver := saved.get("probe", own["probe"])) != own["probe"]:
        raise ValueError(
            f"the state was saved by a {saver!s:.60}, but this is a {own['probe']}: give each probe the state that it "
            "saved itself"
        )
    check_keys(f"{label}, what", saved, set(own))
    for name, value in own.items():
        if type(saved[name]) is type(value) and saved[name] == value:
            continue
        if name == "parameters":
            raise ValueError(
                "the state was saved by a probe that measured other parameters (names, shapes or order differ): attach "
                "before any parameter is frozen or released, as in the run that saved it, or start without the state"
            )
        raise ValueError(
            f"the state was saved with {name} {saved[name]!r:.60}, but this probe has {name} {value!r}: load the state "
            f"into a probe with the same {name}, or start without the state"
        )
