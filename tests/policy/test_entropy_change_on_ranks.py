"""The forecast of an entropy change on ranks with uneven batches, beside one process with all responses."""

from __future__ import annotations

import dataclasses
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel

from sonde.contrib.hold_entropy import HoldEntropy
from sonde.policy.entropy_change import EntropyChangeProbe
from sonde.policy.entropy_options import EntropyChangeOptions
from sonde.policy.scoring.rollouts import Rollouts
from sonde.policy.stats.entropy_forecast import EntropyForecast
from tests.batch_size.cut_models import n_collectives
from tests.ranks import Ranks, mesh_of
from tests.small_policy import STATISTICS, SmallPolicy, drawn, loss, optimizer_of, policy, sample

N_E, N_U = 11, 8


def batches() -> tuple[Rollouts, Rollouts]:
    model = policy()
    return drawn(model, 0, N_E, seed=1), drawn(model, 200, N_U, seed=2)


def own_prompts(rollouts: Rollouts, n_first: int) -> Rollouts:
    """The first rank has the first prompts, the second rank the others."""
    numbers = rollouts.prompt.unique()
    own = numbers[:n_first] if dist.get_rank() == 0 else numbers[n_first:]
    return rollouts.rows(torch.isin(rollouts.prompt, own).nonzero()[:, 0])


def bare(forecast: EntropyForecast) -> dict[str, Any]:
    """A forecast without the numbers that a clock or the system gives."""
    return {k: v for k, v in dataclasses.asdict(forecast).items() if k not in ("seconds", "peak_bytes")}


def trained(kind: str) -> tuple[SmallPolicy, torch.optim.Optimizer]:
    model = policy()
    return model, optimizer_of(model, kind)


def wrapped(kind: str, how: str, **options: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    """The policy and the optimizer of one process, sharded or replicated."""
    model, optimizer = trained(kind)
    if how == "DDP":
        return DistributedDataParallel(model, **options), optimizer
    state = optimizer.state_dict()["state"]
    mesh = mesh_of((2,))
    for layer in (model.hidden, model.out):
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    sharded = type(optimizer)(model.parameters(), **{k: v for k, v in optimizer.defaults.items() if k == "lr"})
    sharded.param_groups[0].update(optimizer.defaults)
    from torch.distributed.tensor import distribute_tensor

    for i, p in enumerate(model.parameters()):
        sharded.state[p] = {
            k: distribute_tensor(v, mesh, p.placements) if v.shape == p.shape else v  # type: ignore[attr-defined]
            for k, v in state.get(i, {}).items()
        }
    return model, sharded


def backward(model: nn.Module, U: Rollouts) -> None:
    """The backward of training; DDP and FSDP2 average over ranks."""
    s, _ = STATISTICS(model, U)
    (-(U.credit().to(s) * s).sum() / len(U)).backward()


def on_rank(how: str, update: str, kind: str) -> tuple[dict[str, Any], bool]:
    model, optimizer = wrapped(kind, how)
    E, U = batches()
    backward(model, own_prompts(U, N_U // 2))
    before = [p.grad for p in model.parameters()]
    probe = EntropyChangeProbe(
        model,
        optimizer,
        EntropyChangeOptions(update=update),  # type: ignore[arg-type]
        beside=HoldEntropy() if update == "step" else None,
        sampler=lambda m: sample(m, [0 + 10 * dist.get_rank(), 1 + 10 * dist.get_rank()]),
    )
    options = {"causes": True} if update == "step" else {}
    if how == "DDP":
        forecast = probe.measure(own_prompts(E, 8), own_prompts(U, N_U // 2), **options)
    else:  # this sampler does not run in step on all ranks, as a sharded model needs
        forecast = probe.forecast(own_prompts(E, 8), own_prompts(U, N_U // 2), **options)
    return bare(forecast), all(p.grad is g for p, g in zip(model.parameters(), before, strict=True))


@pytest.mark.parametrize("kind", ["adamw", "sgd"])
@pytest.mark.parametrize("update", ["step", "gradient"])
@pytest.mark.parametrize(
    "how",
    [
        pytest.param("DDP", marks=pytest.mark.shows("entropy change", "DDP")),
        pytest.param("FSDP2", marks=pytest.mark.shows("entropy change", "FSDP2")),
    ],
)
def test_uneven_ranks_agree_with_one_process(ranks2: Ranks, how: str, update: str, kind: str) -> None:
    (first, is_kept), (second, _) = ranks2(on_rank, how, update, kind)
    assert is_kept
    assert first == second  # to the last bit
    model, optimizer = trained(kind)
    E, U = batches()
    loss(model, U).backward()
    options = EntropyChangeOptions(update=update)  # type: ignore[arg-type]
    probe = EntropyChangeProbe(model, optimizer, options, beside=HoldEntropy() if update == "step" else None)
    alone = probe.forecast(E, U, **({"causes": True} if update == "step" else {}))
    assert first["n_evaluation"] == N_E
    for name in ("delta", "se", "entropy", "v_x", "v_y"):
        # central differences of fp32 scores keep 3 to 4 digits
        assert first[name] == pytest.approx(getattr(alone, name), rel=1e-2, abs=1e-12), name
    if alone.coefficient_to_hold is not None:
        for name in ("change_per_unit", "change_per_unit_se", "delta"):
            value = getattr(alone.coefficient_to_hold, name)
            assert first["coefficient_to_hold"][name] == pytest.approx(value, rel=1e-2), name
    assert alone.causes is not None
    expected = {c.prompt: c.change for c in alone.causes.prompts}
    scale = max(map(abs, expected.values()))
    for cause in first["causes"]["prompts"]:
        assert cause["change"] == pytest.approx(expected[cause["prompt"]], abs=1e-2 * scale)


class Watching:
    """Token statistics that note whether DDP would reduce the next backward."""

    def __init__(self, ddp: DistributedDataParallel) -> None:
        self.ddp = ddp
        self.would_reduce: list[bool] = []

    def __call__(self, model: nn.Module, rollouts: Rollouts, /) -> tuple[Tensor, Tensor]:
        if torch.is_grad_enabled():
            self.would_reduce.append(self.ddp.require_backward_grad_sync)
        return STATISTICS(model, rollouts)


def count_sums(kind: str, static_graph: bool) -> tuple[int, list[bool], Tensor]:
    model, optimizer = wrapped(kind, "DDP", static_graph=static_graph)
    assert isinstance(model, DistributedDataParallel)
    E, U = batches()
    backward(model, own_prompts(U, N_U // 2))
    watching = Watching(model)
    probe = EntropyChangeProbe(model, optimizer, EntropyChangeOptions(update="gradient"), token_statistics=watching)
    before = n_collectives()
    with mock.patch.object(dist, "all_gather_object", wraps=dist.all_gather_object) as gathered:
        probe.forecast(own_prompts(E, 8), own_prompts(U, N_U // 2))
    # An exchange of objects is two collectives: sizes first. The group counts DDP's own reductions too.
    n_sums = n_collectives() - before - 2 * gathered.call_count
    for _ in range(3):  # DDP still works, and reduces
        optimizer.step()
        optimizer.zero_grad()
        backward(model, own_prompts(U, N_U // 2))
    return n_sums, watching.would_reduce, torch.cat([p.detach().flatten() for p in model.parameters()])


@pytest.mark.parametrize("static_graph", [False, True])
@pytest.mark.parametrize("kind", ["sgd", "adamw"])
def test_no_micro_batch_is_reduced_and_each_sum_is_reduced_once(ranks2: Ranks, kind: str, static_graph: bool) -> None:
    (n_sums, would_reduce, weights), (_, _, others) = ranks2(count_sums, kind, static_graph)
    assert n_sums == (3 if kind == "sgd" else 4)  # the two halves of X̄; and Ȳ, with Adam by halves too
    assert would_reduce
    assert not any(would_reduce)
    assert torch.equal(weights, others)


def refused_first_fsdp() -> str:
    model = FullyShardedDataParallel(policy(), device_id=torch.device("cpu"), use_orig_params=True)
    try:
        EntropyChangeProbe(model, None, process_group=dist.group.WORLD)
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
def test_fsdps_first_version_is_refused_whatever_the_group(ranks2: Ranks) -> None:
    for message in ranks2(refused_first_fsdp):
        assert message == "FSDP's first version does not tell how it cuts parameters: use fully_shard (FSDP2)"
