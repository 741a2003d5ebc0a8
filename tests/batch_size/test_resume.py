"""A run that is resumed from a checkpoint reads as the run that was not interrupted, on any number of ranks."""

from __future__ import annotations

import hashlib
import io
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn.parallel import DistributedDataParallel

import sonde
from sonde.stats.sealed_state import VERSION
from tests.batch_size.loops import attached, batch, contents_of, mean_loss, small_model, train
from tests.ranks import Ranks, mesh_of

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")  # one process saves alone here

N_PIECES, FIRST_PART, WINDOWS = 6, 14, 26


class Weights:
    """A model's weights as one entry of a checkpoint, whole or cut."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def state_dict(self) -> dict[str, Any]:
        return get_model_state_dict(self.model)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        set_model_state_dict(self.model, state)


def wrapped(wrapper: str) -> nn.Module:
    model = small_model(torch.float64)
    if wrapper == "DDP":
        return DistributedDataParallel(model)
    if wrapper == "FSDP2":
        for layer in model:
            if list(layer.parameters()):
                fully_shard(layer, mesh=mesh_of((dist.get_world_size(),)))
        return fully_shard(model, mesh=mesh_of((dist.get_world_size(),)))  # type: ignore[return-value]
    return model


def run(
    wrapper: str, windows: tuple[int, int], load: str = "", save: str = "", *, asynchronous: bool = False
) -> sonde.NoiseScaleReading:
    """Train through these windows; each has the same six pieces however many ranks share them."""
    model = wrapped(wrapper)
    rank, n_ranks = (0, 1) if wrapper == "plain" else (dist.get_rank(), dist.get_world_size())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with attached(model, optimizer, groups="kinds", unit=("rows", "tokens")) as probe:
        entries = {"probe": probe, "model": Weights(model)}
        if load:
            dcp.load(entries, checkpoint_id=load, no_dist=wrapper == "plain")
        for window in range(*windows):
            generator = torch.Generator().manual_seed(window)
            pieces = [batch(4, generator, torch.float64) for _ in range(N_PIECES)]
            own = pieces[rank * N_PIECES // n_ranks : (rank + 1) * N_PIECES // n_ranks]
            for k, (x, y) in enumerate(own):
                is_last = k == len(own) - 1
                if isinstance(model, DistributedDataParallel):
                    model.require_backward_grad_sync = is_last
                if isinstance(model, FSDPModule):
                    model.set_requires_gradient_sync(is_last)
                with probe.piece(units={"rows": 4, "tokens": 4 + window}):
                    (mean_loss(model, x, y) / len(own)).backward()
            probe.clip_grad_norm_(1.0)
            optimizer.step()
            optimizer.zero_grad()
        if save and asynchronous:
            dcp.async_save(entries, checkpoint_id=save).result()
        elif save:
            dcp.save(entries, checkpoint_id=save, no_dist=wrapper == "plain")
        return probe.reading()


def assert_same(reading: sonde.NoiseScaleReading, expected: sonde.NoiseScaleReading) -> None:
    # κ is compared on other elements after a restart, and has their rounding.
    for name in ("b_simple", "low", "high", "trace_cov", "grad_sq", "units_per_window"):
        assert getattr(reading, name) == pytest.approx(getattr(expected, name), rel=1e-6), name
    assert (reading.windows, reading.dropped, reading.status) == (WINDOWS, {}, "resolved")
    assert reading.in_unit("tokens").b_simple == pytest.approx(expected.in_unit("tokens").b_simple, rel=1e-6)
    assert list(reading.groups) == list(expected.groups)
    for name, group in reading.groups.items():
        assert group.trace_cov == pytest.approx(expected.groups[name].trace_cov, rel=1e-6)
        assert group.status == expected.groups[name].status


@pytest.fixture(scope="module")
def uninterrupted() -> sonde.NoiseScaleReading:
    reading = run("plain", (0, WINDOWS))
    assert reading.status == "resolved"
    return reading


@pytest.mark.parametrize(("saved", "resumed"), [("DDP", "DDP"), ("FSDP2", "FSDP2")])
def test_saved_on_two_ranks_and_resumed_on_two_three_and_one(
    ranks2: Ranks, ranks3: Ranks, tmp_path: Path, uninterrupted: sonde.NoiseScaleReading, saved: str, resumed: str
) -> None:
    """Each window's gradient is that of the plain run, so the estimates are, whoever shares the pieces."""
    folder = str(tmp_path / "checkpoint")
    is_async = saved == resumed == "DDP"
    ranks2(_run, saved, (0, FIRST_PART), "", folder, is_async)
    for ranks in (ranks2, ranks3):
        for reading in ranks(_run, resumed, (FIRST_PART, WINDOWS), folder, "", False):
            assert_same(reading, uninterrupted)
    if saved == "DDP":
        assert_same(run("plain", (FIRST_PART, WINDOWS), load=folder), uninterrupted)


def _run(wrapper: str, windows: tuple[int, int], load: str, save: str, asynchronous: bool) -> sonde.NoiseScaleReading:
    return run(wrapper, windows, load, save, asynchronous=asynchronous)


def test_saved_in_one_process_and_resumed_on_ranks(
    ranks3: Ranks, tmp_path: Path, uninterrupted: sonde.NoiseScaleReading
) -> None:
    folder = str(tmp_path / "checkpoint")
    run("plain", (0, FIRST_PART), save=folder)
    for reading in ranks3(_run, "FSDP2", (FIRST_PART, WINDOWS), folder, "", False):
        assert_same(reading, uninterrupted)


def by_torch(state: Any) -> Any:
    file = io.BytesIO()
    torch.save({"probe": state}, file)
    file.seek(0)
    return torch.load(file, weights_only=True)["probe"]


FORMS = {"torch.save": by_torch, "JSON": lambda state: json.loads(json.dumps(state))}


@pytest.mark.parametrize("form", FORMS)
def test_other_forms_of_checkpoints(form: str) -> None:
    """A state with dropped windows, whose reasons a fresh probe does not know, comes back bit for bit."""
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with attached(model, optimizer) as probe:
        train(model, probe, optimizer, windows=12)
        train(model, probe, optimizer, windows=1, sizes=(4,))
        state, reading = probe.state_dict(), probe.reading()
    assert reading.dropped
    with attached(model, optimizer) as again:
        again.load_state_dict(FORMS[form](state))
        assert again.reading() == reading
        assert again.state_dict() == state


def test_a_distributed_checkpoint_brings_back_what_a_fresh_probe_has_no_entry_for(tmp_path: Path) -> None:
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with attached(model, optimizer) as probe:
        train(model, probe, optimizer, windows=12)
        train(model, probe, optimizer, windows=1, sizes=(4,))
        dcp.save({"probe": probe}, checkpoint_id=tmp_path / "one", no_dist=True)
        state, reading = contents_of(probe), probe.reading()
    for n_windows in (0, 30):  # a state that is shorter, and one that is longer, than the saved one
        with attached(model, optimizer) as again:
            train(model, again, optimizer, windows=n_windows)
            dcp.load({"probe": again}, checkpoint_id=tmp_path / "one", no_dist=True)
            assert again.reading() == reading
            assert {**contents_of(again), "spent": None} == {**state, "spent": None}  # costs are timed


def test_a_checkpoint_of_another_model_is_refused_and_changes_nothing(tmp_path: Path) -> None:
    with attached(nn.Linear(2, 2)) as other:
        dcp.save({"probe": other}, checkpoint_id=tmp_path / "other", no_dist=True)
    model = small_model()
    with attached(model) as probe:
        train(model, probe, torch.optim.SGD(model.parameters(), lr=0.0), windows=3)
        before = probe.state_dict()
        with pytest.raises(ValueError, match="measured other parameters"):
            dcp.load({"probe": probe}, checkpoint_id=tmp_path / "other", no_dist=True)
        assert probe.state_dict() == before


@pytest.mark.parametrize(
    "change", [{"version": VERSION + 1}, {"version": VERSION - 1}, {"json": "{}"}, {"json": None}, None, []], ids=str
)
def test_a_damaged_or_foreign_state_is_refused_and_changes_nothing(change: Any) -> None:
    model = small_model()
    with attached(model) as probe:
        state = probe.state_dict()
        train(model, probe, torch.optim.SGD(model.parameters(), lr=0.0), windows=3)
        before = probe.state_dict()
        damaged = state | change if isinstance(change, dict) else change
        with pytest.raises(ValueError, match=rf"not of version {VERSION}, which this sonde reads: start without"):
            probe.load_state_dict(damaged)
        assert probe.state_dict() == before


def test_any_character_that_is_changed_or_lost_is_noticed() -> None:
    with attached(small_model()) as probe:
        state = probe.state_dict()
        text = state["json"]
        for i in range(len(text)):
            other = "0" if text[i] != "0" else "1"
            for damaged in (text[:i], text[:i] + text[i + 1 :], text[:i] + other + text[i + 1 :]):
                with pytest.raises(ValueError, match="is damaged"):
                    probe.load_state_dict(state | {"json": damaged})


# What a state must fit, and what is left out of it.


def keys(value: Any) -> Any:
    return {name: keys(entry) for name, entry in value.items()} if isinstance(value, dict) else None


def test_contents_with_other_keys_have_another_version() -> None:
    with attached(nn.Linear(2, 2)) as probe:
        of_contents = hashlib.sha256(json.dumps(keys(contents_of(probe))).encode()).hexdigest()[:8]
    assert (VERSION, of_contents) == (15, "c0e960ff"), "raise VERSION: states with other keys must be refused"


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
