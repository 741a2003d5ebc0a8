"""The trial beside a log: it comes back, and one that is damaged, or of another model, is left out with a note."""

from __future__ import annotations

import dataclasses
import json
import math
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sonde.decision.kept_trial import TRIAL_NAME, trial_text, with_trial
from sonde.decision.time_curve import TimeCurve, Timing
from tests.decision.known import facts, tried

LOGGED = facts(16, 300.0, model="1,000 parameters", curve=tried((16, 0.010)))


def beside(folder: Path, text: str) -> Any:
    (folder / TRIAL_NAME).write_text(text)
    return with_trial(LOGGED, folder)


@pytest.mark.parametrize("too_large", [256.0, math.inf])
def test_a_trial_comes_back_in_place_of_the_times_of_the_log(tmp_path: Path, too_large: float) -> None:
    assert with_trial(LOGGED, tmp_path) is LOGGED
    curve = TimeCurve((Timing(16, 1, 1, 0.013, 0.01, 1e9), Timing(64, 1, 1, 0.2)), too_large)
    assert beside(tmp_path, trial_text(curve, LOGGED)) == dataclasses.replace(LOGGED, curve=curve)


@pytest.mark.parametrize(("name", "other"), [("unit", "tokens"), ("model", "5 parameters"), ("model", "")])
def test_a_trial_of_another_model_or_unit_is_left_out(tmp_path: Path, name: str, other: str) -> None:
    text = trial_text(tried((16, 0.010), (64, 0.011)), dataclasses.replace(LOGGED, **{name: other}))
    found = beside(tmp_path, text)
    assert found.curve == LOGGED.curve
    [note] = found.notes
    assert note.endswith(f"trial.json is not used: it is of another {name}, {other or 'none'}. Start the trial again.")


TEXT = trial_text(tried((16, 0.010), (64, 0.011)), LOGGED)


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "null", "{}", TEXT.replace("0.011", "-1.0"), TEXT.replace("0.011", "[]"), TEXT[:-9]]
)
def test_a_damaged_trial_is_a_note_with_the_way_out(tmp_path: Path, text: str) -> None:
    found = beside(tmp_path, text)
    assert found.curve == LOGGED.curve
    [note] = found.notes
    assert note.endswith("trial.json is not used: it is damaged, or of another version. Start the trial again.")


def damaged() -> st.SearchStrategy[Any]:
    """A file of a curve in which one value is another one."""
    values = st.none() | st.booleans() | st.integers(-2, 2) | st.sampled_from(["", "8", [], {}, math.nan, 10**400])
    timing = [("timings", 1, key) for key in vars(LOGGED.curve.timings[0])] if LOGGED.curve else []
    paths = [("schema",), ("unit",), ("model",), ("timings",), ("too_large",), ("timings", 0), *timing]

    def put(path: tuple[Any, ...], value: Any) -> Any:
        found = place = json.loads(TEXT)
        for name in path[:-1]:
            place = place[name]
        place[path[-1]] = value
        return found

    return st.builds(put, st.sampled_from(paths), values) | values


@given(damaged())
@settings(max_examples=300, deadline=None, derandomize=True)
def test_a_damaged_file_is_left_out_or_gives_times(found: Any) -> None:
    with tempfile.TemporaryDirectory() as folder:
        known = beside(Path(folder), json.dumps(found))
    assert (known.curve == LOGGED.curve) == any("is not used" in note for note in known.notes)
    for size, accumulation, ranks in ((1, 1, 1), (8, 1, 2), (20, 3, 2), (1e6, 1, 8)):
        times, _ = known.curve.of_step(size, accumulation, ranks)
        assert 0 < times.low <= times.high < math.inf
    assert known.curve.largest >= 1
