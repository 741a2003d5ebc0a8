"""A probe's state as it goes into a checkpoint: a version and one text, which says of what it is the state.

Distributed checkpoints take a state apart by its keys, and read only the keys that the loading probe's own state has,
so the keys must not depend on what was measured. Only sonde writes the text, so its checksum shows any damage: values
are not checked one by one.
"""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

VERSION = 15
"""Of the form and of the contents: raise it with any change of their names or meanings."""


class Stateful:
    """An object whose state is the attributes that `STATE` names.

    They are JSON values, objects with a state, or dictionaries of these, of which a state restores those that it has.
    """

    STATE: ClassVar[tuple[str, ...]]

    def state_dict(self) -> dict[str, Any]:
        """Everything that `load_state_dict` needs, as JSON values."""
        own = {name: getattr(self, name) for name in self.STATE}
        return dict(json.loads(json.dumps(own, default=lambda part: part.state_dict())))

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned, in an object made with the same arguments."""
        for name in self.STATE:
            own, saved = getattr(self, name), state[name]
            if isinstance(own, Stateful):
                own.load_state_dict(saved)
            elif isinstance(own, dict) and any(isinstance(part, Stateful) for part in own.values()):
                for key in own.keys() & saved.keys():
                    own[key].load_state_dict(saved[key])
            else:
                setattr(self, name, copy.deepcopy(saved))


def sealed(contents: Mapping[str, Any]) -> dict[str, Any]:
    """The state as it goes into a checkpoint.

    Args:
        contents: JSON values.
    """
    text = json.dumps(contents)
    return {"version": VERSION, "json": f"{_checksum(text)} {text}"}


def unsealed(label: str, state: Any) -> dict[str, Any]:
    """The contents of a state from a checkpoint.

    Args:
        label: of the state, for messages.
        state: the result of `sealed`.

    Raises:
        ValueError: when the state is damaged, or of another version.
    """
    version = state.get("version") if isinstance(state, Mapping) else state
    saved = state.get("json") if isinstance(state, Mapping) else None
    checksum, _, text = saved.partition(" ") if isinstance(saved, str) else ("", "", "")
    if version != VERSION or checksum != _checksum(text):
        raise ValueError(
            f"the {label}, of version {version!r:.60}, is damaged or is not of version {VERSION}, which this sonde "
            "reads: start without the state"
        )
    return dict(json.loads(text))


def parameters_digest(names: Sequence[str], shapes: Sequence[object]) -> str:
    """A text that differs where the names, the whole shapes or the order of parameters differ.

    Their order counts, since a state may refer to parameters by index.
    """
    named_shapes = list(zip(names, shapes, strict=True))
    return hashlib.sha256(repr(named_shapes).encode()).hexdigest()[:16]


def check_identity(saved: Mapping[str, object], own: Mapping[str, object]) -> None:
    """Refuse the averages of something else than the loading probe measures.

    Args:
        saved: what the state says of the probe that saved it.
        own: the same of the loading probe. "probe" is the name of its class, and "parameters" is the result of
            `parameters_digest`.

    Raises:
        ValueError: when the two differ, naming the first difference.
    """
    if saved["probe"] != own["probe"]:
        raise ValueError(
            f"the state was saved by a {saved['probe']}, but this is a {own['probe']}: give each probe the state that "
            "it saved itself"
        )
    for name in (name for name, value in own.items() if saved[name] != value):
        if name == "parameters":
            raise ValueError(
                "the state was saved by a probe that measured other parameters (names, shapes or order differ): attach "
                "before any parameter is frozen or released, as in the run that saved it, or start without the state"
            )
        raise ValueError(
            f"the state was saved with {name} {saved[name]!r:.200}, but this probe has {name} {own[name]!r:.200}: load "
            f"the state into a probe with the same {name}, or start without the state"
        )


def _checksum(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]
