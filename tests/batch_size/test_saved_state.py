"""The saved state: a restart continues from it, and a foreign or damaged state changes nothing."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import pytest
import torch
from torch import nn

from sonde.stats.sealed_state import VERSION
from tests.batch_size.loops import (
    attached,
    contents_of,
    small_model,
    train,
)


def keys(value: Any) -> Any:
    return {name: keys(entry) for name, entry in value.items()} if isinstance(value, dict) else None


def test_contents_with_other_keys_have_another_version() -> None:
    with attached(nn.Linear(2, 2)) as probe:
        of_contents = hashlib.sha256(json.dumps(keys(contents_of(probe))).encode()).hexdigest()[:8]
    assert (VERSION, of_contents) == (10, "57077b0f"), "raise VERSION: states with other keys must be refused"


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
