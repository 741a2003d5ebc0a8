"""A state of the noise-scale probe with any damage is refused, or gives a reading: no other error is raised."""

from __future__ import annotations

import json
import math

import torch

from tests.batch_size.loops import attached, small_model, train
from tests.damaged_states import damaged


def test_every_damage_is_refused_with_nothing_changed_or_gives_a_reading() -> None:
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with attached(model, optimizer, groups=lambda name: name[:1]) as probe:
        train(model, probe, optimizer, windows=12)
        whole = probe.state_dict()
        n_refused = n_taken = 0
        for path, changed in damaged(json.loads(whole["json"]), ("1", {}, -1, 0, 1e300, 10**400, math.nan)):
            if path.startswith("averages/run/"):  # not looked at entry by entry
                continue
            state = whole | {"json": json.dumps(changed)}
            try:
                probe.load_state_dict(state)
            except ValueError:
                n_refused += 1
                assert probe.state_dict() == whole, path
                continue
            n_taken += 1
            assert probe.metrics(), path
            probe.load_state_dict(whole)
    assert n_refused > 3 * n_taken > 0
