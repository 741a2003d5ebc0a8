"""Options of the probe of an entropy change: as one object, and as the deprecated single keywords."""

from __future__ import annotations

import pytest

from sonde.policy.entropy_change import EntropyChangeProbe
from tests.policy.entropy_scene import Scene


def test_options_as_single_keywords_still_work_for_one_release() -> None:
    scene = Scene()
    with pytest.warns(
        DeprecationWarning, match=r"write EntropyChangeProbe\(.*, sonde\.EntropyChangeOptions\(level=0.5\)\)"
    ):
        old = EntropyChangeProbe(scene.model, scene.optimizer, level=0.5)
    assert old.forecast(scene.E).low == scene.probe(level=0.5).forecast(scene.E).low
    with pytest.raises(TypeError, match=r"has no argument 'objectiv': did you mean 'objective'\?"):
        EntropyChangeProbe(scene.model, scene.optimizer, objectiv="sequence")
    with (
        pytest.warns(DeprecationWarning, match="is deprecated"),
        pytest.raises(ValueError, match="level must be between 0 and 1, got 95"),
    ):
        EntropyChangeProbe(scene.model, scene.optimizer, level=95)
