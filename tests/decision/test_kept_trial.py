"""The trial beside a log: it comes back, and one that is damaged, or of another model, is left out with a note."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest

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
