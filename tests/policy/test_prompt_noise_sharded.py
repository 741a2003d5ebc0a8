"""The noise scale in prompts of a policy that is cut over ranks: the numbers of one process, and training unchanged."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from sonde.policy.prompt_noise import PromptNoiseProbe, PromptNoiseReading
from tests.policy.sharded_policy import by_hand, cut, own_responses, responses
from tests.ranks import Ranks
from tests.small_policy import loss

CUTS = {
    "fsdp": 2,
    "fsdp in bf16": 2,
    "fsdp, one parameter ignored": 2,
    "tp": 2,
    "sp": 2,
    "hsdp": 4,
    "fsdp over tp": 4,
    "fsdp over sp": 4,
    "tp beside data parallelism": 4,
}


def reading_of(kind: str) -> PromptNoiseReading:
    model, mesh, data_rank, n_data = cut(kind)
    return PromptNoiseProbe(model, mesh=mesh).measure(own_responses(data_rank, n_data))


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param("fsdp", marks=pytest.mark.shows("prompts", "FSDP2")),
        pytest.param("tp", marks=pytest.mark.shows("prompts", "TP")),
        pytest.param("sp", marks=pytest.mark.shows("prompts", "SP")),
        pytest.param("hsdp", marks=pytest.mark.shows("prompts", "HSDP")),
        pytest.param("fsdp over tp", marks=pytest.mark.shows("prompts", "FSDP2 over TP")),
        pytest.param("fsdp over sp", marks=pytest.mark.shows("prompts", "FSDP2 over SP")),
        *("fsdp in bf16", "fsdp, one parameter ignored", "tp beside data parallelism"),
    ],
)
def test_values_are_those_of_one_process(request: pytest.FixtureRequest, kind: str) -> None:
    """Uneven prompts and groups, one completion alone included. Within 1e-5 of tr Σ."""
    ranks: Ranks = request.getfixturevalue(f"ranks{CUTS[kind]}")
    reading, *others = ranks(reading_of, kind)
    trace_cov, grad_sq, within = by_hand(kind)
    assert reading.prompts_per_window == 7
    assert reading.trace_cov == pytest.approx(trace_cov, rel=1e-5)
    assert reading.grad_sq == pytest.approx(grad_sq, abs=1e-5 * trace_cov)
    # bf16 rounds a prompt and its halves differently, so that their inner product is rounded.
    assert reading.completions_share == pytest.approx(within / trace_cov, rel=2e-2 if "bf16" in kind else 1e-4)
    assert all(repr(other) == repr(reading) for other in others)


def test_every_cut_has_its_values_compared() -> None:
    """The list above names each cut, so a new one could be forgotten there."""
    (cases,) = (mark.args[1] for mark in test_values_are_those_of_one_process.pytestmark)  # type: ignore[attr-defined]
    assert {case if isinstance(case, str) else case.values[0] for case in cases} == set(CUTS)


def training_state(model: nn.Module) -> list[Any]:
    """Shards, gradients and random state; what FSDP2 shows and what it will reduce."""
    local: list[Any] = []
    for name, p in model.named_parameters():
        local += [name, type(p).__name__, id(p), id(p.grad), _local(p).clone(), _local(p.grad)]
    groups = [m._get_fsdp_state()._fsdp_param_group for m in model.modules() if isinstance(m, FSDPModule)]
    flags = [(g.is_sharded, g.reduce_grads, g.all_reduce_grads) for g in groups if g is not None]
    hooks = [len(p._backward_hooks or ()) for p in model.parameters()]
    return [*local, flags, hooks, [m.training for m in model.modules()], torch.get_rng_state()]


def _local(value: Tensor | None) -> Tensor:
    if value is None:
        return torch.empty(0)
    return (value.to_local() if isinstance(value, DTensor) else value).detach().clone()


def before_and_after(kinds: list[str]) -> list[str]:
    """Names of the cuts for which something differs after a measurement."""
    differ = []
    for kind in kinds:
        for reduces in (True, False) if "sdp" in kind else (True,):
            model, mesh, data_rank, n_data = cut(kind)
            own = own_responses(data_rank, n_data)
            model.train()
            loss(model, own).backward()
            if isinstance(model, FSDPModule):
                model.set_requires_gradient_sync(reduces)
                model.reshard()
            before = training_state(model)
            PromptNoiseProbe(model, mesh=mesh).measure(own)
            after = training_state(model)
            same = [torch.equal(a, b) if isinstance(a, Tensor) else a == b for a, b in zip(before, after, strict=True)]
            differ += [kind] * (not all(same))
    return differ


@pytest.mark.parametrize("n_ranks", [2, 4])
def test_training_is_unchanged(request: pytest.FixtureRequest, n_ranks: int) -> None:
    """Bit for bit, with gradients in `.grad`, whichever backwards FSDP2 reduces."""
    ranks: Ranks = request.getfixturevalue(f"ranks{n_ranks}")
    assert ranks(before_and_after, [kind for kind, n in CUTS.items() if n == n_ranks]) == [[]] * n_ranks


def refused() -> list[str]:
    """Messages of calls that all ranks refuse together."""
    messages = []
    rank = dist.get_rank()

    def raised(make: Any) -> None:
        try:
            make()
        except (ValueError, RuntimeError) as error:
            messages.append(str(error))

    model, _, _, _ = cut("fsdp")
    none = responses().rows(torch.arange(0 if rank else 4))
    raised(lambda: PromptNoiseProbe(model).measure(none))
    split = responses().rows(torch.arange(rank, len(responses()), 2))
    raised(lambda: PromptNoiseProbe(model).measure(split))
    model.set_requires_gradient_sync(False)
    loss(model, own_responses(rank, 2)).backward()
    raised(lambda: PromptNoiseProbe(model).measure(own_responses(rank, 2)))
    raised(lambda: PromptNoiseProbe(model, process_group=dist.group.WORLD))
    model, _, _, _ = cut("tp")
    raised(lambda: PromptNoiseProbe(model).measure(own_responses(rank, 2)))
    return messages


def test_refusals(ranks2: Ranks) -> None:
    with_responses, without = ranks2(refused)
    assert without[0].startswith("a rank has no response, expected at least one on each rank")
    assert with_responses[0] == f"rank 1 of the group failed: ValueError: {without[0]}"
    assert with_responses[1:] == without[1:]
    for message, expected in zip(
        without[1:],
        [
            "completions of one prompt are on several ranks",
            "gradients of an earlier backward wait inside FSDP2",
            "process_group= is for plain modules",
            "ranks that work on the same responses, as those of tensor parallelism, were given different ones",
        ],
        strict=True,
    ):
        assert message.startswith(expected)
