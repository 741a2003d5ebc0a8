"""The saved state: a restart continues from it, and a foreign or damaged state changes nothing."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import pytest
import torch
from torch import nn

from sonde import NoiseScaleProbe
from sonde.stats.sealed_state import VERSION
from tests.batch_size.loops import (
    attached,
    contents_of,
    small_model,
    train,
)


def test_a_restart_continues_from_the_state() -> None:
    def run(model: nn.Module, probe: NoiseScaleProbe, seed: int) -> None:
        train(model, probe, torch.optim.SGD(model.parameters(), lr=0.0), windows=10, seed=seed)

    model = small_model()
    with attached(model) as whole:
        run(model, whole, 0)
        run(model, whole, 1)
        expected = whole.reading()
    with attached(model) as first:
        run(model, first, 0)
        state, before = first.state_dict(), first.reading()
    with attached(model) as second:
        second.load_state_dict(state)
        assert second.reading() == before
        run(model, second, 1)
        got = second.reading()
    # Other elements are compared after a restart, and κ has their rounding: some 1e-8.
    assert (got.b_simple, got.low, got.high) == pytest.approx(
        (expected.b_simple, expected.low, expected.high), rel=1e-6
    )
    assert got.windows == 20
    for name, group in got.groups.items():
        assert group.trace_cov == pytest.approx(expected.groups[name].trace_cov, rel=1e-6)


def keys(value: Any) -> Any:
    return {name: keys(entry) for name, entry in value.items()} if isinstance(value, dict) else None


def test_contents_with_other_keys_have_another_version() -> None:
    with attached(nn.Linear(2, 2)) as probe:
        of_contents = hashlib.sha256(json.dumps(keys(contents_of(probe))).encode()).hexdigest()[:8]
    assert (VERSION, of_contents) == (9, "a231e79c"), "raise VERSION: states with other keys must be refused"


def test_state_of_another_unit_metric_or_groups_is_refused() -> None:
    model = small_model()
    optimizer = torch.optim.AdamW(model.parameters())
    with attached(model) as rows:
        state = rows.state_dict()
    with attached(model, unit="images") as images, pytest.raises(ValueError, match="saved with unit 'rows'"):
        images.load_state_dict(state)
    with (
        attached(model, optimizer, metric="adam") as adam,
        pytest.raises(ValueError, match="saved with metric 'euclidean'"),
    ):
        adam.load_state_dict(state)
    with (
        attached(model, groups="kinds") as kinds,
        pytest.raises(ValueError, match=r"saved with groups \['0', .* but this probe has groups \['"),
    ):
        kinds.load_state_dict(state)


def test_windows_still_in_the_readback_are_not_added_to_a_loaded_state() -> None:
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with attached(model, optimizer) as probe:
        train(model, probe, optimizer, windows=5)
        state = probe.state_dict()
        train(model, probe, optimizer, windows=7)
        probe.load_state_dict(state)
        assert probe.reading().windows == 5
