from __future__ import annotations

import json

from sonde.batch_size.stats.changed_gradients import ChangedGradients
from sonde.batch_size.stats.scale_witness import ScaleReading

WHY = "noise was added"


def reading(*, changed: set[int] = set(), sound: set[int] = set(), absent: set[int] = set()) -> ScaleReading:  # noqa: B006
    kind = "changed" if changed else "scaled"
    return ScaleReading(1.0, 0.0, kind, frozenset(changed), frozenset(sound), frozenset(absent))  # type: ignore[arg-type]


SOUND = reading(sound={0, 1})


def take(changed: ChangedGradients, *readings: ScaleReading, times: int = 1) -> None:
    for _ in range(times):
        for r in readings:
            changed.update(r, why_changed=WHY if r.changed else None, averaged=not r.changed)


def test_sound_windows_raise_no_doubt() -> None:
    changed = ChangedGradients(1.0)
    take(changed, SOUND, times=50)
    assert changed.doubt() is None


def test_an_accident_is_over_when_the_fixed_parameters_are_sound_again() -> None:
    """Parameter 7 was compared in the same window, and its next comparison comes much later."""
    changed = ChangedGradients(0.99)
    take(changed, SOUND, times=50)
    take(changed, reading(changed={0, 1, 7}))
    assert WHY in str(changed.doubt())
    take(changed, SOUND)
    assert changed.doubt() is None


def test_a_parameter_that_was_changed_alone_is_in_doubt_until_it_is_sound() -> None:
    changed = ChangedGradients(1.0)
    take(changed, SOUND, times=100)
    take(changed, reading(changed={7}, sound={0, 1}))
    take(changed, SOUND, times=40)
    assert "no unchanged gradient of that parameter has been seen since" in str(changed.doubt())
    take(changed, reading(sound={0, 1, 7}))
    assert changed.doubt() is None


def test_repeated_changes_taint_the_windows_between() -> None:
    changed = ChangedGradients(1.0)
    take(changed, SOUND, times=10)
    take(changed, reading(changed={7}, sound={0, 1}), *[SOUND] * 9, times=3)
    take(changed, reading(sound={0, 1, 7}))
    assert "30 of the last windows were changed" in str(changed.doubt())


def test_a_window_with_unusable_pieces_clears_no_parameter() -> None:
    changed = ChangedGradients(1.0)
    take(changed, SOUND, times=100)
    take(changed, reading(changed={7}, sound={0, 1}))
    changed.update(reading(sound={0, 1, 7}), why_changed=None, averaged=False)
    assert changed.doubt() is not None


def test_a_parameter_without_gradients_is_cleared_after_three_checks() -> None:
    changed = ChangedGradients(1.0)
    take(changed, SOUND, times=100)
    take(changed, reading(changed={7}, sound={0, 1}))
    take(changed, reading(sound={0, 1}, absent={7}), times=2)
    assert changed.doubt() is not None
    take(changed, reading(sound={0, 1}, absent={7}))
    assert changed.doubt() is None


def test_the_first_window_leaves_no_parameter_in_doubt() -> None:
    """Gradients may have been there when the probe was attached."""
    changed = ChangedGradients(1.0)
    take(changed, reading(changed={7}, sound={0, 1}))
    assert changed.doubt() is None


def test_the_state_round_trips() -> None:
    changed, again = ChangedGradients(0.9), ChangedGradients(0.9)
    take(changed, SOUND, reading(changed={7}, sound={0, 1}), reading(absent={7}, sound={0}))
    again.load_state_dict(json.loads(json.dumps(changed.state_dict())))
    assert again.doubt() == changed.doubt() is not None
    for each in (changed, again):
        take(each, reading(sound={7}))
        assert each.doubt() is None
