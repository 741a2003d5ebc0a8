"""A probe of the noise scale in prompts that resumes from a checkpoint reads as the probe that was not interrupted."""

from __future__ import annotations

import copy
import hashlib
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import sonde
from sonde import PromptNoiseProbe, PromptNoiseReading
from sonde.stats.sealed_state import VERSION, unsealed
from tests.ranks import Ranks, mesh_of
from tests.small_policy import drawn, policy

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")  # one process saves alone here

FIRST_PART, WINDOWS, N_PROMPTS = 3, 6, 6


def wrapped(wrapper: str) -> nn.Module:
    model = policy()
    if wrapper == "DDP":
        return DistributedDataParallel(model)
    if wrapper == "FSDP2":
        mesh = mesh_of((dist.get_world_size(),))
        fully_shard(model.hidden, mesh=mesh)
        return fully_shard(model, mesh=mesh)  # type: ignore[return-value]
    return model


def measured(probe: PromptNoiseProbe, windows: range, rank: int = 0, n_ranks: int = 1) -> None:
    """Measure these windows, each with the same responses however many ranks share them. In one, prompts are alone."""
    sampler = policy()
    for window in windows:
        n_each = 1 if window == 1 else 2
        rollouts = drawn(sampler, 10 * window, N_PROMPTS, seed=window, n_each=n_each)
        if n_each == 1:  # a group of one completion has no advantage over its mean
            rollouts = copy.copy(rollouts)
            object.__setattr__(rollouts, "advantage", torch.linspace(-1.0, 1.5, N_PROMPTS))
        own = (rollouts.prompt - 10 * window) * n_ranks // N_PROMPTS == rank
        probe.measure(rollouts.rows(own.nonzero()[:, 0]))


def probe_of(model: nn.Module, **options: Any) -> PromptNoiseProbe:
    return PromptNoiseProbe(model, **options)


def by_torch(state: Any) -> Any:
    file = io.BytesIO()
    torch.save({"probe": state}, file)
    file.seek(0)
    return torch.load(file, weights_only=True)["probe"]


def by_json(state: Any) -> Any:
    return json.loads(json.dumps(state, allow_nan=False))


@pytest.fixture(scope="module")
def uninterrupted() -> PromptNoiseProbe:
    probe = probe_of(policy())
    measured(probe, range(WINDOWS))
    assert probe.reading().status != "unresolved"
    return probe


@pytest.fixture(scope="module")
def half() -> dict[str, Any]:
    """The state after the first windows."""
    probe = probe_of(policy())
    measured(probe, range(FIRST_PART))
    assert probe.reading().completions_share is not None
    return probe.state_dict()


@pytest.mark.parametrize("form", [by_torch, by_json])
def test_a_resumed_probe_is_the_uninterrupted_one_bit_for_bit(
    uninterrupted: PromptNoiseProbe, half: dict[str, Any], form: Callable[[Any], Any]
) -> None:
    probe = probe_of(policy())
    probe.load_state_dict(form(half))
    assert probe.state_dict() == half
    assert probe.reading().windows == FIRST_PART
    assert probe.reading().prompts_per_window == N_PROMPTS
    measured(probe, range(FIRST_PART, WINDOWS))
    assert probe.reading() == uninterrupted.reading()
    assert probe.metrics() == uninterrupted.metrics()
    assert probe.state_dict() == uninterrupted.state_dict()


def on_ranks(jobs: list[tuple[str, str, str]]) -> list[tuple[PromptNoiseReading, PromptNoiseReading]]:
    """Of each wrapper: save its first windows, or load the state and measure the others; both readings."""
    readings = []
    rank, n_ranks = dist.get_rank(), dist.get_world_size()
    for wrapper, load, save in jobs:
        probe = probe_of(wrapped(wrapper))
        if load:
            dcp.load({"probe": probe}, checkpoint_id=load)
            before = probe.reading()
            measured(probe, range(FIRST_PART, WINDOWS), rank, n_ranks)
        else:
            before = probe.reading()
            measured(probe, range(FIRST_PART), rank, n_ranks)
        if save:
            dcp.save({"probe": probe}, checkpoint_id=save)
        readings.append((before, probe.reading()))
    return readings


def assert_same(reading: PromptNoiseReading, expected: PromptNoiseReading) -> None:
    # 1e-5: other ranks add fp32 gradients up in another order.
    assert reading.trace_cov == pytest.approx(expected.trace_cov, rel=1e-5)
    assert reading.grad_sq == pytest.approx(expected.grad_sq, abs=1e-5 * expected.trace_cov)  # type: ignore[operator]
    assert reading.completions_share == pytest.approx(expected.completions_share, rel=1e-4)
    assert (reading.low, reading.high) == pytest.approx((expected.low, expected.high), rel=1e-3)
    assert (reading.status, reading.windows, reading.prompts_per_window) == (expected.status, WINDOWS, N_PROMPTS)


def test_saved_on_two_ranks_and_resumed_on_three_and_on_one(
    ranks2: Ranks, ranks3: Ranks, tmp_path: Path, uninterrupted: PromptNoiseProbe
) -> None:
    """By another wrapper too: names and whole shapes are the same in all of them."""
    expected = uninterrupted.reading()
    assert issubclass(PromptNoiseProbe, Stateful)
    ddp, fsdp = str(tmp_path / "ddp"), str(tmp_path / "fsdp")
    (_, of_ddp), (_, of_fsdp) = ranks2(on_ranks, [("DDP", "", ddp), ("FSDP2", "", fsdp)])[0]
    for by_rank in ranks3(on_ranks, [("FSDP2", ddp, ""), ("DDP", fsdp, "")]):
        for (before, after), saved in zip(by_rank, (of_ddp, of_fsdp), strict=True):
            assert before == saved
            assert_same(after, expected)
    for folder, saved in ((ddp, of_ddp), (fsdp, of_fsdp)):
        probe = probe_of(wrapped("plain"))
        dcp.load({"probe": probe}, checkpoint_id=folder, no_dist=True)
        assert probe.reading() == saved
        measured(probe, range(FIRST_PART, WINDOWS))
        assert_same(probe.reading(), expected)


def others() -> dict[str, tuple[PromptNoiseProbe, str]]:
    """Probes that must not go on with the state, and what they say."""
    frozen = policy()
    frozen.token.weight.requires_grad_(False)
    return {
        "model": (probe_of(nn.Linear(2, 2)), "measured other parameters"),
        "frozen": (probe_of(frozen), "measured other parameters"),
        "weighs": (
            probe_of(policy(), weighs="tokens"),
            "with weighs 'completions', but this probe has weighs 'tokens'",
        ),
        "statistics": (
            probe_of(policy(), token_statistics=lambda model, rollouts: (torch.empty(0), torch.empty(0))),
            "with token statistics 'CausalLMStatistics', but this probe has token statistics 'function'",
        ),
    }


@pytest.mark.parametrize("name", ["model", "frozen", "weighs", "statistics"])
def test_the_state_of_another_measurement_is_refused(half: dict[str, Any], name: str) -> None:
    probe, message = others()[name]
    before = probe.state_dict()
    with pytest.raises(ValueError, match=message):
        probe.load_state_dict(half)
    assert probe.state_dict() == before


def test_probes_do_not_take_each_others_states(half: dict[str, Any]) -> None:
    model = policy()
    with sonde.attach(model, unit="prompts", units_per_piece=1, verbose=False) as other:
        with pytest.raises(ValueError, match="saved by a PromptNoiseProbe, but this is a NoiseScaleProbe"):
            other.load_state_dict(half)
        with pytest.raises(ValueError, match="saved by a NoiseScaleProbe, but this is a PromptNoiseProbe"):
            probe_of(model).load_state_dict(other.state_dict())


def test_a_damaged_text_is_refused_and_changes_nothing(half: dict[str, Any]) -> None:
    probe = probe_of(policy())
    before = probe.state_dict()
    for change in ({"version": VERSION - 1}, {"json": half["json"][:-1]}):
        with pytest.raises(ValueError, match=r"the prompt-noise probe state, of version .*: start without the state"):
            probe.load_state_dict(half | change)
        assert probe.state_dict() == before


def test_contents_with_other_keys_have_another_version(half: dict[str, Any]) -> None:
    contents = unsealed("state", half)
    averages = contents["averages"]
    names = [list(each) for each in (contents, contents["what"], averages, averages["windows"])]
    of_contents = hashlib.sha256(repr(names).encode()).hexdigest()[:8]
    assert (VERSION, of_contents) == (15, "22e11818"), "raise VERSION: states with other keys must be refused"
