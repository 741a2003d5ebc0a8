from __future__ import annotations

import json
import math
from typing import Any

import pytest

from sonde.batch_size.stats.changed_gradients import ChangedGradients
from sonde.batch_size.stats.scale_witness import ScaleReading

WHY = "noise was added"


def reading(*, changed: set[int] = set(), sound: set[int] = set(), absent: set[int] = set()) -> ScaleReading:  # noqa: B006
    kind = "changed" if changed else "scaled"
    return ScaleReading(1.0, 0.0, kind, frozenset(changed), frozenset(sound), frozenset(absent))  # type: ignore[arg-type]


SOUND = reading(sound={0, 1})


def take(tampering: ChangedGradients, *readings: ScaleReading, times: int = 1) -> None:
    for _ in range(times):
        for r in readings:
            tampering.update(r, why_changed=WHY if r.changed else None, averaged=not r.changed)


def test_sound_windows_raise_no_doubt() -> None:
    tampering = ChangedGradients(1.0)
    take(tampering, SOUND, times=50)
    assert tampering.doubt() is None


def test_an_accident_is_over_when_what_is_always_compared_is_sound_again() -> None:
    """Parameter 7 was compared in the same window, and will not be again for long."""
    tampering = ChangedGradients(0.99)
    take(tampering, SOUND, times=50)
    take(tampering, reading(changed={0, 1, 7}))
    assert WHY in str(tampering.doubt())
    take(tampering, SOUND)
    assert tampering.doubt() is None


def test_what_was_changed_alone_is_in_doubt_until_it_is_seen_sound() -> None:
    tampering = ChangedGradients(1.0)
    take(tampering, SOUND, times=100)
    take(tampering, reading(changed={7}, sound={0, 1}))
    take(tampering, SOUND, times=40)
    assert "has not been seen sound since" in str(tampering.doubt())
    take(tampering, reading(sound={0, 1, 7}))
    assert tampering.doubt() is None


def test_what_was_changed_again_and_again_taints_the_windows_between() -> None:
    tampering = ChangedGradients(1.0)
    take(tampering, SOUND, times=10)
    take(tampering, reading(changed={7}, sound={0, 1}), *[SOUND] * 9, times=3)
    take(tampering, reading(sound={0, 1, 7}))
    assert "30 of the last windows were changed" in str(tampering.doubt())


def test_a_window_whose_pieces_are_of_no_use_acquits_nobody() -> None:
    tampering = ChangedGradients(1.0)
    take(tampering, SOUND, times=100)
    take(tampering, reading(changed={7}, sound={0, 1}))
    tampering.update(reading(sound={0, 1, 7}), why_changed=None, averaged=False)
    assert tampering.doubt() is not None


def test_a_parameter_without_a_gradient_is_not_sound_but_in_the_end_of_no_account() -> None:
    tampering = ChangedGradients(1.0)
    take(tampering, SOUND, times=100)
    take(tampering, reading(changed={7}, sound={0, 1}))
    take(tampering, reading(sound={0, 1}, absent={7}), times=2)
    assert tampering.doubt() is not None
    take(tampering, reading(sound={0, 1}, absent={7}))
    assert tampering.doubt() is None


def test_the_first_window_makes_no_suspects() -> None:
    """Gradients may have been there when the probe was attached."""
    tampering = ChangedGradients(1.0)
    take(tampering, reading(changed={7}, sound={0, 1}))
    assert tampering.doubt() is None


def test_the_state_round_trips() -> None:
    tampering, again = ChangedGradients(0.9), ChangedGradients(0.9)
    take(tampering, SOUND, reading(changed={7}, sound={0, 1}), reading(absent={7}, sound={0}))
    again.load_state_dict(json.loads(json.dumps(tampering.state_dict())))
    assert again.doubt() == tampering.doubt() is not None
    for one in (tampering, again):
        take(one, reading(sound={7}))
        assert one.doubt() is None


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"why": 3}, "'why' must be text"),
        ({"weight": -1.0}, "'weight' must be a finite number of at least 0"),
        ({"changed": math.nan}, "'changed' must be a finite number"),
        ({"suspects": [1]}, "'suspects' must map parameters to counts"),
        ({"suspects": {"x": {}}}, "must be a parameter's index"),
        ({"suspects": {"1": {"times": 1}}}, "missing keys"),
        ({"suspects": {"1": {"times": 1.5, "since": 0, "absences": 0}}}, "'times' must be a whole number"),
        ({"more": 1}, "unknown keys"),
    ],
    ids=str,
)
def test_a_damaged_state_is_refused_and_changes_nothing(change: dict[str, Any], match: str) -> None:
    tampering = ChangedGradients(0.9)
    take(tampering, SOUND)
    before = tampering.state_dict()
    with pytest.raises(ValueError, match=match):
        tampering.load_state_dict(before | change)
    assert tampering.state_dict() == before
