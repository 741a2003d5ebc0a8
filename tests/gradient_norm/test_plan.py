"""A plan that is used while gradients come, go and change their placements, and its pipeline stages."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.debug import CommDebugMode

import sonde
from sonde.gradient_norm.plan import NormPlan
from tests.gradient_norm.placed_gradients import Call, Case, check_on_ranks, each_of, placed, plain
from tests.ranks import Ranks, mesh_of
from tests.sharded import fsdp

rank = dist.get_rank


def partial(value: float = 1.0, like: Any = None) -> nn.Parameter:
    return placed(torch.full((4,), value), mesh_of((2,)), [Partial()], (4,), [like or Replicate()])


def learns() -> list[Any]:
    """The plan is made before any gradient exists, and used while gradients come, go and change their placement."""
    p, q = placed(torch.ones(2), mesh_of((2,)), [Shard(0)], (4,)), partial(0.5 * (rank() + 1))
    later, p.grad = p.grad, None
    summed_later, q.grad = q.grad, None
    plan, found = sonde.group_parameters_for_norm([p, q], mesh=mesh_of((2,))), list[Any]()
    for step in range(4):
        p.grad = later if step else None
        q.grad = summed_later if step == 2 else None
        with CommDebugMode() as counted:
            found.append(float(sonde.clip_grad_norm_distributed_(plan, None)))
        found.append(counted.get_total_counts())
    return found


def missing_while_planned() -> list[Any]:
    """When the plan is made, rank 1 has no gradient yet where rank 0 has a partial one."""
    p = partial()
    gradient, p.grad = p.grad, p.grad if rank() == 0 else None
    plan = sonde.group_parameters_for_norm([p], mesh=mesh_of((2,)))
    p.grad = gradient
    return [float(sonde.clip_grad_norm_distributed_(plan, None))]


def twice_a_step() -> list[Any]:
    """The second clip finds the gradient summed; in the next step it is missing on one rank."""
    p = partial()
    gradient, plan = p.grad, sonde.group_parameters_for_norm([p], mesh=mesh_of((2,)))
    norms = [float(sonde.clip_grad_norm_distributed_(plan, 100.0)) for _ in range(2)]
    p.grad = gradient if rank() == 0 else None
    return [*norms, float(sonde.clip_grad_norm_distributed_(plan, 100.0))]


def missing_on_one_rank(like: Any) -> list[Any]:
    """Zeros stand in for the gradient of a replicated, or of a sharded parameter."""
    p = partial(like=like)
    plan = sonde.group_parameters_for_norm([p], mesh=mesh_of((2,)))
    if rank() == 1:
        p.grad = None
    return [float(sonde.clip_grad_norm_distributed_(plan, 1.0)), (p.grad is None) == (rank() == 1)]


def five_partial() -> list[Any]:
    """They take one all-reduce. The optimizer and a second clip find them summed."""
    made, counts = [partial(float(rank() + k)) for k in range(5)], []
    for _ in range(2):
        with CommDebugMode() as counted:
            norm = sonde.clip_grad_norm_(made, math.inf, mesh=mesh_of((2,)))
        counts.append(counted.get_total_counts())
    gradients = [p.grad for p in made]
    assert all(isinstance(g, DTensor) and g.placements == (Replicate(),) for g in gradients)
    return [float(norm), *counts, *(float(g.to_local()[3]) for g in gradients)]  # type: ignore[union-attr]


def an_empty_rank(with_mesh: bool) -> list[Any]:
    """One rank has no gradient at all, and one parameter has none on both ranks."""
    cut = fsdp()
    for name in {"back.head.weight"} if rank() == 0 else set(cut.parameters):
        cut.parameters[name].grad = None
    mine = [p.grad.to_local() for p in cut.parameters.values() if p.grad is not None]  # type: ignore[operator]
    squares = torch.tensor(sum(float(t.double().square().sum()) for t in mine), dtype=torch.float64)
    dist.all_reduce(squares)
    norm = sonde.clip_grad_norm_(list(cut.parameters.values()), None, mesh=cut.mesh if with_mesh else None)
    return [float(norm) / math.sqrt(float(squares))]


def fsdp_after_evaluation() -> list[Any]:
    """FSDP2 then leaves other parameters in the outermost module: these have not replaced any."""
    model = fully_shard(nn.Linear(4, 2), mesh=mesh_of((2,)))
    plan = sonde.group_parameters_for_norm(model)
    model(torch.ones(2, 4)).sum().backward()
    with torch.no_grad():
        model(torch.ones(2, 4))
    return [float(sonde.clip_grad_norm_distributed_(plan, None))]


def another_shape() -> list[Any]:
    """At an old address: it is not read in blocks any more, as a new plan would not."""
    large, small = (placed(torch.ones(n // 2, 64), mesh_of((2,)), [Shard(0)], (n, 64)) for n in (256, 4))
    plan, found = NormPlan([large]), list[Any]()
    for p in (large, small):
        plan.rebind([p], None, None)
        found += [len(plan.collect()[0].locals), next(iter(plan)).in_blocks]
    return found


FOLLOWED: dict[str, tuple[Callable[[], list[Any]], list[Any]]] = {
    # Once a gradient has been partial, this rank takes part with zeros when it is missing: its peers may have it.
    "gradients that come and go": (learns, [0.0, 1, 2.0, 1, math.sqrt(4 + 4 * 1.5**2), 2, 2.0, 2]),
    "missing while planned": (missing_while_planned, [4.0]),
    "clipped twice a step": (twice_a_step, [4.0, 4.0, 2.0]),
    "missing on one rank": (lambda: missing_on_one_rank(None), [2.0, True]),
    "missing, sharded": (lambda: missing_on_one_rank(Shard(0)), [2.0, True]),
    "five partial": (five_partial, [math.sqrt(4 * 165), 2, 1, 1.0, 3.0, 5.0, 7.0, 9.0]),
    "another shape": (another_shape, [1, True, 1, False]),
    "an empty rank": (lambda: an_empty_rank(True), [1.0]),
    "an empty rank, no mesh": (lambda: an_empty_rank(False), [1.0]),
    "FSDP2 after an evaluation": (fsdp_after_evaluation, [math.sqrt(8 * 2**2 + 2 * 2**2)]),
}


@pytest.mark.parametrize("name", FOLLOWED)
def test_a_plan_follows_gradients(ranks2: Ranks, name: str) -> None:
    assert ranks2(_followed, name) == [pytest.approx(FOLLOWED[name][1], rel=1e-6)] * 2


def _followed(name: str) -> list[Any]:
    return FOLLOWED[name][0]()


def over_stages(by: Callable[..., Any]) -> Call:
    """Shards that lie on ranks of two pipeline stages."""
    mesh = mesh_of((2, 2), ("pp", "dp"))
    p = placed(torch.ones(1), mesh_of((4,)), [Shard(0)], (4,))
    return Call([p, stage()], {"mesh": mesh, "pp_mesh": mesh["pp"]}, by=by)


def stage(*names: str) -> nn.Parameter:
    """Each stage has its own."""
    return placed(torch.ones(2), mesh_of((2, 2), names or ("pp", "dp"))["data" if names else "dp"], [Shard(0)], (4,))


def with_stages(**axes: str) -> Call:
    mesh = mesh_of((2, 2), ("pp", "dp"))
    of = {"all": mesh, "pp": mesh["pp"], "dp": mesh["dp"]}
    return Call([stage()], {name: of.get(axis, axis) for name, axis in axes.items()}, None)


def planned_stages(late: bool, axis: str) -> Call:
    """The stages are given with the plan or with the call."""
    # Of a mesh with an axis "pp", the plan would ask for the stages at once.
    names = ("stage", "data") if late else ("pp", "dp")
    mesh = mesh_of((2, 2), names)
    options = {} if late else {"mesh": mesh, "pp_mesh": mesh["pp"]}
    plan = sonde.group_parameters_for_norm([stage(*(names if late else ()))], **options)
    given = {"max_norm": None} | ({"pp_mesh": mesh[axis]} if axis else {})
    return Call(plan, given, by=sonde.clip_grad_norm_distributed_)


def on_one_rank() -> Call:
    """A parameter on one rank alone, declared so."""
    mine = [("p", plain(torch.ones(4)))] if rank() == 0 else []
    options = {"mesh": mesh_of((2,)), "replicas": {name: 1 for name, _ in mine}}
    return Call(
        sonde.group_parameters_for_norm(mine, **options), {"max_norm": 1.0}, by=sonde.clip_grad_norm_distributed_
    )


ON_STAGES, STAGES = r"it is cut over ranks .* of pp_mesh=.*pass the mesh axis of the stages alone", 8**0.5
CASES = [
    Case("a plan over stages", 4, lambda: over_stages(sonde.group_parameters_for_norm), ON_STAGES),
    Case("a clip over stages", 4, lambda: over_stages(sonde.clip_grad_norm_), ON_STAGES),
    Case("stages of the plan", 4, lambda: planned_stages(False, ""), STAGES),
    Case("stages again", 4, lambda: planned_stages(False, "pp"), STAGES),
    Case("stages of the call", 4, lambda: planned_stages(True, "stage"), STAGES, 2),
    Case("other stages", 4, lambda: planned_stages(False, "dp"), "pp_mesh has other ranks than the plan's pp_mesh"),
    Case("no stages", 4, lambda: with_stages(mesh="all"), r"pass pp_mesh=mesh\['pp'\]"),
    Case("two axes", 4, lambda: with_stages(mesh="all", pp_mesh="all"), "pp_mesh must have 1 axis, got 2"),
    Case("no stage axis", 4, lambda: with_stages(mesh="all", pp_mesh="dp"), "of pp_mesh=, whose ranks are pipeline st"),
    Case("neither, no mesh", 4, lambda: with_stages(pp_mesh="dp"), "of pp_mesh=, whose ranks are pipeline st", None),
    Case("no mesh at all", 4, lambda: with_stages(mesh="world"), "mesh must be a DeviceMesh, got 'world'", 0),
    Case("on one rank", 2, on_one_rank, 2.0),
]


@each_of(CASES)
def test_stages_are_remembered_and_wrong_ones_refused(request: pytest.FixtureRequest, index: int) -> None:
    check_on_ranks(request, __name__, index)


def _opened() -> set[tuple[int, ...]]:
    mesh = mesh_of((2, 2), ("dp", "tp"))
    p = placed(torch.ones(3), mesh, [Shard(0), Partial()], (6,), [Shard(0), Replicate()])
    reduced: list[set[tuple[int, ...]]] = [set(), set()]
    real = dist.all_reduce

    def spy(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        reduced[-1].add(tuple(dist.get_process_group_ranks(kwargs.get("group") or dist.group.WORLD)))
        return real(tensor, *args, **kwargs)

    dist.all_reduce = spy
    try:
        plan = sonde.group_parameters_for_norm([p], mesh=mesh)
        reduced.append(set())
        sonde.clip_grad_norm_distributed_(plan, 1.0)
    finally:
        dist.all_reduce = real
    return reduced[2] - reduced[1]


def test_every_communicator_is_opened_by_the_plan(ranks4: Ranks) -> None:
    assert ranks4(_opened) == [set()] * 4


def with_gradients(module: nn.Module) -> nn.Module:
    for p in module.parameters():
        p.grad = torch.ones_like(p)
    return module


def test_a_plan_reads_as_a_mapping() -> None:
    layer = with_gradients(nn.Linear(3, 2))
    plan = sonde.group_parameters_for_norm(layer)
    assert isinstance(plan, Mapping)
    assert len(plan) == 1
    ((key, parameters),) = plan.items()
    assert key.dtype == torch.float32
    assert plan[key] is not parameters
    assert all(a is b for a, b in zip(plan[key], layer.parameters(), strict=True))
    assert list(plan) == list(plan.keys()) == [key]
    assert key in plan
    with pytest.raises(KeyError):
        plan["dense"]  # type: ignore[index]
    other = sonde.group_parameters_for_norm(layer)
    assert plan == plan != other  # no tensors are compared
    assert len({plan, other}) == 2
    assert not sonde.group_parameters_for_norm([])
    assert float(sonde.clip_grad_norm_([], 1.0)) == 0.0  # a plan of nothing is a plan all the same


def test_a_replaced_parameter_is_noticed() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    plan = sonde.group_parameters_for_norm(with_gradients(model))
    assert float(sonde.clip_grad_norm_distributed_(plan, None)) == 3.0
    model[1].weight = nn.Parameter(torch.zeros(1, 2))
    assert float(sonde.clip_grad_norm_distributed_(plan, None)) == pytest.approx(3.0)  # no gradient yet
    with_gradients(model)
    with pytest.raises(ValueError, match=r"1.weight came into the module, or replaced .* make the plan again"):
        sonde.clip_grad_norm_distributed_(plan, 1.0)
    assert model[1].weight.grad is not None
    assert model[1].weight.grad.tolist() == [[1.0, 1.0]]
    assert float(sonde.clip_grad_norm_(model, None)) == 3.0  # a drop-in looks each time


def _added_parameter(model: nn.Sequential) -> None:
    model[1].register_parameter("scale", nn.Parameter(torch.ones(1)))


def _added_module(model: nn.Sequential) -> None:
    model.append(nn.Linear(1, 1))


def _replaced_module(model: nn.Sequential) -> None:
    model[0] = nn.Linear(2, 2)


@pytest.mark.parametrize("change", [_added_parameter, _added_module, _replaced_module])
def test_parameters_that_come_later_are_noticed(change: Callable[[nn.Sequential], None]) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    plan = sonde.group_parameters_for_norm(with_gradients(model))
    assert float(sonde.clip_grad_norm_distributed_(plan, None)) == 3.0
    change(model)
    with_gradients(model)
    with pytest.raises(ValueError, match=r" came into the module, or replaced .* make the plan again"):
        sonde.clip_grad_norm_distributed_(plan, 1.0)
