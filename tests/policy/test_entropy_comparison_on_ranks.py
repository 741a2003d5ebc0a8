"""Losses compared on ranks in DDP and FSDP2, beside one process with all responses."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from sonde.parallel.placements import local_tensor
from sonde.policy.entropy_change import EntropyChangeProbe
from sonde.policy.scoring.rollouts import Rollouts
from tests.ranks import Ranks, mesh_of
from tests.small_policy import STATISTICS, drawn, optimizer_of, policy

N_E, N_U = 11, 8


def losses(model: nn.Module, U: Rollouts) -> dict[str, Any]:
    def loss(power: float, bonus: float) -> Tensor:
        s, h = STATISTICS(model, U)
        credit = U.credit().to(s)
        return -(credit.sign() * credit.abs() ** power * s).sum() / len(U) - bonus * (h * U.mask).sum() / len(U)

    return {"plain": functools.partial(loss, 1.0, 0.0), "bonus": functools.partial(loss, 1.0, 0.05)}


def half(rollouts: Rollouts, n_first: int) -> Rollouts:
    numbers = rollouts.prompt.unique()
    own = numbers[:n_first] if dist.get_rank() == 0 else numbers[n_first:]
    return rollouts.rows(torch.isin(rollouts.prompt, own).nonzero()[:, 0])


def wrapped(how: str, kind: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = policy()
    optimizer = optimizer_of(model, kind)
    if how.startswith("DDP"):
        return DistributedDataParallel(
            model, gradient_as_bucket_view=True, find_unused_parameters="unused" in how, static_graph="static" in how
        ), optimizer
    state, mesh = optimizer.state_dict()["state"], mesh_of((2,))
    for layer in (model.hidden, model.out):
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    sharded = type(optimizer)(model.parameters(), lr=1e-3)
    sharded.param_groups[0].update(optimizer.defaults)
    for i, p in enumerate(model.parameters()):
        sharded.state[p] = {
            k: distribute_tensor(v, mesh, p.placements) if v.shape == p.shape else v  # type: ignore[attr-defined]
            for k, v in state.get(i, {}).items()
        }
    return model, sharded


def train(model: nn.Module, optimizer: torch.optim.Optimizer, U: Rollouts) -> None:
    optimizer.zero_grad()
    losses(model, U)["plain"]().backward()
    optimizer.step()


def bits(model: nn.Module) -> list[Tensor]:
    tensors = [t for p in model.parameters() for t in (p, p.grad) if t is not None]
    return [local_tensor(t.detach()).clone() for t in tensors]


def on_rank(how: str, kind: str) -> tuple[Any, bool, bool]:
    E, U = drawn(policy(), 0, N_E, seed=1), drawn(policy(), 200, N_U, seed=2)
    own, model_and_optimizer = half(U, N_U // 2), wrapped(how, kind)
    model, optimizer = model_and_optimizer
    found = EntropyChangeProbe(model, optimizer).compare(losses(model, own), half(E, 8))
    train(model, optimizer, own)
    before, grads = bits(model), [p.grad for p in model.parameters()]
    EntropyChangeProbe(model, optimizer).compare(losses(model, own), half(E, 8))
    is_kept = all(map(torch.equal, before, bits(model))) and all(
        p.grad is g for p, g in zip(model.parameters(), grads, strict=True)
    )
    train(model, optimizer, own)
    watched, (alone, other) = bits(model), wrapped(how, kind)
    for _ in range(2):
        train(alone, other, own)
    return (
        {name: f.delta for name, f in found.forecasts.items()} | {"se": found.differences["bonus"].se},
        is_kept,
        all(map(torch.equal, watched, bits(alone))),
    )


@pytest.mark.parametrize("kind", ["adamw", "sgd"])
@pytest.mark.parametrize("how", ["DDP", "DDP that finds unused parameters", "FSDP2"])
def test_ranks_agree_with_one_process_and_training_goes_on_bit_for_bit(ranks2: Ranks, how: str, kind: str) -> None:
    (first, *kept), (second, *also_kept) = ranks2(on_rank, how, kind)
    assert first == second
    assert all(kept + also_kept)
    model = policy()
    E, U = drawn(model, 0, N_E, seed=1), drawn(model, 200, N_U, seed=2)
    found = EntropyChangeProbe(model, optimizer_of(model, kind)).compare(losses(model, U), E)
    assert first["plain"] == pytest.approx(found.forecasts["plain"].delta, rel=2e-3)
    assert first["bonus"] == pytest.approx(found.forecasts["bonus"].delta, rel=2e-3)
    assert first["se"] == pytest.approx(found.differences["bonus"].se, rel=2e-2)


def fails_on_a_rank(how: str, what: str) -> str:
    E, U = drawn(policy(), 0, N_E, seed=1), drawn(policy(), 200, N_U, seed=2)
    model, optimizer = wrapped(how, "sgd")
    made = losses(model, half(U, N_U // 2))
    if what == "names" and dist.get_rank():
        made["another"] = made.pop("plain")
    elif what == "tensor":
        made["plain"] = made["plain"]()
    elif what == "raises" and dist.get_rank():
        made["bonus"] = functools.partial(divmod, 1, 0)
    try:
        EntropyChangeProbe(model, optimizer).compare(made, half(E, 8))
    except (ValueError, RuntimeError, ZeroDivisionError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


@pytest.mark.parametrize(
    ("what", "first", "second"),
    [
        ("names", "ValueError: the ranks compare different", "ValueError: the ranks compare different"),
        (
            "tensor",
            "ValueError: the loss 'plain' is a tensor, whose",
            "ValueError: the loss 'plain' is a tensor, whose",
        ),
        ("static", "ValueError: DDP with static_graph=True must", "ValueError: DDP with static_graph=True must"),
        ("raises", "RuntimeError: rank 1 of the group failed: Zero", "ZeroDivisionError: "),
    ],
)
def test_an_error_on_one_rank_is_raised_on_all(ranks2: Ranks, what: str, first: str, second: str) -> None:
    found = ranks2(fails_on_a_rank, "DDP of a static graph" if what == "static" else "DDP", what)
    assert found[0].startswith(first), found
    assert found[1].startswith(second), found
