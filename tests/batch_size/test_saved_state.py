"""The saved state: a restart continues from it, and a foreign or damaged state changes nothing."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import nn

from sonde import NoiseScaleProbe
from sonde.stats.sealed_state import sealed
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


@pytest.mark.parametrize("change", [{"more": 1}, {"averages": {}}, {"run": {"window": 1}}])
def test_foreign_state_is_refused_whole(change: dict[str, Any]) -> None:
    model = small_model()
    with attached(model) as probe:
        train(model, probe, torch.optim.SGD(model.parameters(), lr=0.0), windows=3)
        before = contents_of(probe)
        with pytest.raises(ValueError, match="unknown keys"):
            probe.load_state_dict(sealed(before | change))
        assert contents_of(probe) == before


@pytest.mark.parametrize("missing", ["averages/run", "metrics", "frozen", "windows", "covered", "pace"])
def test_a_state_that_lacks_something_is_refused_whole(missing: str) -> None:
    model = small_model()
    with attached(model) as probe:
        train(model, probe, torch.optim.SGD(model.parameters(), lr=0.0), windows=3)
        before = contents_of(probe)
        older = copy.deepcopy(before)
        *above, name = missing.split("/")
        del (older[above[0]] if above else older)[name]
        with pytest.raises(ValueError, match=rf"missing keys \['{name}'\]: was it written by another version\?"):
            probe.load_state_dict(sealed(older))
        assert contents_of(probe) == before


_DAMAGE: list[tuple[list[str], Any]] = [
    (["run"], None),
    (["windows"], -1),
    (["pace"], None),
    (["pace", "every"], 0),
    (["pace", "costs"], [[1.0]]),
    (["run", "window"], -1),
    (["run", "window"], 2.5),
    (["run", "units_seen"], "many"),
    (["averages", "run"], 7),
    (["averages", "run", "groups"], []),
    (["averages", "n_seen"], "many"),
    (["averages", "units"], math.inf),
    (["averages", "units_weight"], -1),
    (["averages", "dropped"], ["zero"]),
    (["averages", "dropped"], {"zero": -1}),
]


@pytest.mark.parametrize(("path", "value"), _DAMAGE, ids=str)
def test_damaged_state_is_refused_whole(path: list[str], value: Any) -> None:
    model = small_model()
    with attached(model) as probe:
        train(model, probe, torch.optim.SGD(model.parameters(), lr=0.0), windows=3)
        before = contents_of(probe)
        damaged = place = copy.deepcopy(before)
        for key in path[:-1]:
            place = place[key]
        place[path[-1]] = value
        with pytest.raises(ValueError, match=r"must be|must map|has the groups"):
            probe.load_state_dict(sealed(damaged))
        assert contents_of(probe) == before


def test_state_of_another_model_is_refused() -> None:
    with (
        attached(small_model()) as a,
        attached(nn.Linear(2, 2)) as b,
        pytest.raises(ValueError, match=r"measured other parameters .*attach before any parameter is frozen"),
    ):
        b.load_state_dict(a.state_dict())


def test_state_of_another_unit_or_metric_is_refused() -> None:
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


def test_windows_still_in_the_readback_are_not_added_to_a_loaded_state() -> None:
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with attached(model, optimizer) as probe:
        train(model, probe, optimizer, windows=5)
        state = probe.state_dict()
        train(model, probe, optimizer, windows=7)
        probe.load_state_dict(state)
        assert probe.reading().windows == 5
