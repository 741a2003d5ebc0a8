"""The forecast of an entropy change on ranks with uneven batches, beside one process with all responses."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel

from sonde.contrib.hold_entropy import HoldEntropy
from sonde.parallel.placements import local_tensor
from sonde.policy.entropy_change import EntropyChangeProbe
from sonde.policy.entropy_options import EntropyChangeOptions
from sonde.policy.scoring.rollouts import Rollouts
from sonde.policy.stats.entropy_forecast import EntropyForecast
from tests.batch_size.cut_models import n_collectives
from tests.ranks import Ranks, mesh_of
from tests.small_policy import STATISTICS, SmallPolicy, drawn, loss, optimizer_of, policy, sample

N_E, N_U = 11, 8


def batches(update: str = "gradient") -> tuple[Rollouts, Rollouts]:
    """E and U; for a step, the loss has other terms too."""
    model = policy()
    U = drawn(model, 200, N_U, seed=2)
    if update == "step":
        tokens = torch.rand(U.mask.shape, generator=torch.Generator().manual_seed(3))
        U = dataclasses.replace(U, terms={"KL": tokens}, entropy_bonus=0.1 * tokens)
    return drawn(model, 0, N_E, seed=1), U


def own_prompts(rollouts: Rollouts, n_first: int) -> Rollouts:
    """The first rank has the first prompts, the second rank the others."""
    numbers = rollouts.prompt.unique()
    own = numbers[:n_first] if dist.get_rank() == 0 else numbers[n_first:]
    return rollouts.rows(torch.isin(rollouts.prompt, own).nonzero()[:, 0])


def bare(forecast: EntropyForecast) -> dict[str, Any]:
    """A forecast without the numbers that a clock or the system gives."""
    return {k: v for k, v in dataclasses.asdict(forecast).items() if k != "seconds"}


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
    E, U = batches(update)
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
        forecast = probe.forecast(own_prompts(E, 8), own_prompts(U, N_U // 2), rollouts=True, **options)
    else:  # this sampler does not run in step on all ranks, as a sharded model needs
        forecast = probe.forecast(own_prompts(E, 8), own_prompts(U, N_U // 2), **options)
    return bare(forecast), all(p.grad is g for p, g in zip(model.parameters(), before, strict=True))


@functools.cache
def in_one_process(update: str, kind: str) -> EntropyForecast:
    """The forecast of one process that has all responses."""
    model, optimizer = trained(kind)
    E, U = batches(update)
    loss(model, U).backward()
    options = EntropyChangeOptions(update=update)  # type: ignore[arg-type]
    probe = EntropyChangeProbe(model, optimizer, options, beside=HoldEntropy() if update == "step" else None)
    return probe.forecast(E, U, **({"causes": True} if update == "step" else {}))


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
    alone = in_one_process(update, kind)
    assert first["n_evaluation"] == N_E
    if update == "step":
        assert first["causes"]["terms"] == pytest.approx(alone.causes.terms, rel=2e-2)
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


# Losses compared.


def losses(model: nn.Module, U: Rollouts) -> dict[str, Any]:
    def of(power: float, bonus: float) -> Tensor:
        s, h = STATISTICS(model, U)
        credit = U.credit().to(s)
        return -(credit.sign() * credit.abs() ** power * s).sum() / len(U) - bonus * (h * U.mask).sum() / len(U)

    return {"plain": functools.partial(of, 1.0, 0.0), "bonus": functools.partial(of, 1.0, 0.05)}


def bits(model: nn.Module) -> list[Tensor]:
    tensors = [t for p in model.parameters() for t in (p, p.grad) if t is not None]
    return [local_tensor(t.detach()).clone() for t in tensors]


def compared(how: str, kind: str, options: dict[str, Any]) -> tuple[Any, bool, bool]:
    """What is found; and whether a comparison between the backward and the step changes anything, then or later."""
    E, U = batches()
    E, U = own_prompts(E, 8), own_prompts(U, N_U // 2)
    model, optimizer = wrapped(kind, how, **options)
    found = EntropyChangeProbe(model, optimizer).compare(losses(model, U), E)

    def train(of: nn.Module, by: torch.optim.Optimizer, is_watched: bool) -> bool:
        by.zero_grad()
        losses(of, U)["plain"]().backward()
        before, grads = bits(of), [p.grad for p in of.parameters()]
        if is_watched:
            EntropyChangeProbe(of, by).compare(losses(of, U), E)
        is_kept = all(map(torch.equal, before, bits(of)))
        is_kept &= all(p.grad is g for p, g in zip(of.parameters(), grads, strict=True))
        by.step()
        return is_kept

    is_kept = all([train(model, optimizer, is_watched=True) for _ in range(2)])
    alone, other = wrapped(kind, how, **options)
    for _ in range(2):
        train(alone, other, is_watched=False)
    numbers = {name: f.delta for name, f in found.forecasts.items()} | {"se": found.differences["bonus"].se}
    return numbers, is_kept, all(map(torch.equal, bits(model), bits(alone)))


@functools.cache
def compared_in_one_process(kind: str) -> Any:
    (model, optimizer), (E, U) = trained(kind), batches()
    return EntropyChangeProbe(model, optimizer).compare(losses(model, U), E)


@pytest.mark.parametrize("kind", ["adamw", "sgd"])
@pytest.mark.parametrize(("how", "options"), [("DDP", {}), ("DDP", {"find_unused_parameters": True}), ("FSDP2", {})])
def test_losses_compared_on_ranks_are_those_of_one_process_and_training_goes_on_bit_for_bit(
    ranks2: Ranks, how: str, options: dict[str, Any], kind: str
) -> None:
    (first, *kept), (second, *also_kept) = ranks2(compared, how, kind, options)
    assert first == second
    assert all(kept + also_kept)
    found = compared_in_one_process(kind)
    assert first["plain"] == pytest.approx(found.forecasts["plain"].delta, rel=2e-3)
    assert first["bonus"] == pytest.approx(found.forecasts["bonus"].delta, rel=2e-3)
    assert first["se"] == pytest.approx(found.differences["bonus"].se, rel=2e-2)


def comparison_that_fails(what: str) -> str:
    E, U = batches()
    model, optimizer = wrapped("sgd", "DDP", static_graph=what == "static")
    made = losses(model, own_prompts(U, N_U // 2))
    if what == "names" and dist.get_rank():
        made["another"] = made.pop("plain")
    elif what == "raises" and dist.get_rank():
        made["bonus"] = functools.partial(divmod, 1, 0)
    try:
        EntropyChangeProbe(model, optimizer).compare(made, own_prompts(E, 8))
    except (ValueError, RuntimeError, ZeroDivisionError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


@pytest.mark.parametrize(
    ("what", "messages"),
    [
        ("names", ["ValueError: the ranks compare different"] * 2),
        ("static", ["ValueError: DDP with static_graph=True must"] * 2),
        ("raises", ["RuntimeError: rank 1 of the group failed: Zero", "ZeroDivisionError: "]),
    ],
)
def test_a_comparison_that_fails_on_one_rank_fails_on_both(ranks2: Ranks, what: str, messages: list[str]) -> None:
    for found, message in zip(ranks2(comparison_that_fails, what), messages, strict=True):
        assert found.startswith(message), found


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
