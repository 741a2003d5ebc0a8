"""A plan that is used while gradients come, go and change their placements, and its pipeline stages."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.debug import CommDebugMode

import sonde
from tests.gradient_norm.placed_gradients import placed
from tests.ranks import Ranks, mesh_of


def _cut_over_stages() -> list[str]:
    """Shards that lie on ranks of two pipeline stages."""
    mesh = mesh_of((2, 2), ("pp", "dp"))
    p = placed(torch.ones(1), mesh_of((4,)), [Shard(0)], (4,))
    q = placed(torch.ones(2), mesh["dp"], [Shard(0)], (4,))
    with pytest.raises(ValueError, match=r"it is cut over ranks .* of pp_mesh=") as planned:
        sonde.group_parameters_for_norm([p, q], mesh=mesh, pp_mesh=mesh["pp"])
    with pytest.raises(ValueError, match=r"it is cut over ranks .* of pp_mesh=") as clipped:
        sonde.clip_grad_norm_([p, q], 1.0, mesh=mesh, pp_mesh=mesh["pp"])
    return [str(planned.value), str(clipped.value)]


def test_shards_over_several_stages_are_refused_on_all_ranks(ranks4: Ranks) -> None:
    for messages in ranks4(_cut_over_stages):
        assert all("pass the mesh axis of the stages alone" in message for message in messages)


def _plan_that_learns() -> list[tuple[float, int]]:
    """The plan is made before any gradient exists, and used while gradients come, go and change their placement."""
    mesh, rank = mesh_of((2,)), dist.get_rank()
    p = placed(torch.ones(2), mesh, [Shard(0)], (4,))
    q = placed(torch.full((3,), 0.5 * (rank + 1)), mesh, [Partial()], (3,), [Replicate()])
    later, p.grad = p.grad, None
    partial, q.grad = q.grad, None
    plan = sonde.group_parameters_for_norm([p, q], mesh=mesh)
    norms_and_counts = []
    for step in range(4):
        p.grad = later if step else None
        q.grad = partial if step == 2 else None
        with CommDebugMode() as counted:
            norm = sonde.clip_grad_norm_distributed_(plan, None)
        norms_and_counts.append((float(norm), counted.get_total_counts()))
    return norms_and_counts


def test_a_plan_follows_gradients_that_come_and_go(ranks2: Ranks) -> None:
    for norms_and_counts in ranks2(_plan_that_learns):
        assert [norm for norm, _ in norms_and_counts] == pytest.approx([0, 2, math.sqrt(4 + 3 * 1.5**2), 2], rel=1e-6)
        # Once a gradient has been partial, this rank takes part with zeros when it is missing: its peers may have it.
        assert [n for _, n in norms_and_counts] == [1, 1, 2, 2]


def _planned_while_missing() -> list[float]:
    """When the plan is made, rank 1 has no gradient yet where rank 0 has a partial one."""
    mesh, rank = mesh_of((2,)), dist.get_rank()
    p = placed(torch.ones(3), mesh, [Partial()], (3,), [Replicate()])
    partial, p.grad = p.grad, p.grad if rank == 0 else None
    plan = sonde.group_parameters_for_norm([p], mesh=mesh)
    p.grad = partial
    return [float(sonde.clip_grad_norm_distributed_(plan, None))]


def test_a_partial_gradient_may_be_missing_on_a_rank_while_planning(ranks2: Ranks) -> None:
    assert ranks2(_planned_while_missing) == [[pytest.approx(math.sqrt(12))]] * 2


def _twice_a_step() -> list[float]:
    """The second clip finds the gradient summed; in the next step it is missing on one rank."""
    mesh, rank = mesh_of((2,)), dist.get_rank()
    p = placed(torch.ones(3), mesh, [Partial()], (3,), [Replicate()])
    partial, plan = p.grad, sonde.group_parameters_for_norm([p], mesh=mesh)
    norms = [float(sonde.clip_grad_norm_distributed_(plan, 100.0)) for _ in range(2)]
    p.grad = partial if rank == 0 else None
    return [*norms, float(sonde.clip_grad_norm_distributed_(plan, 100.0))]


def test_a_gradient_that_was_partial_once_may_be_partial_again(ranks2: Ranks) -> None:
    for norms in ranks2(_twice_a_step):
        assert norms == pytest.approx([math.sqrt(12), math.sqrt(12), math.sqrt(3)])


def _stages() -> tuple[list[float], list[str]]:
    mesh = mesh_of((2, 2), ("pp", "dp"))
    p = placed(torch.ones(2), mesh["dp"], [Shard(0)], (4,))  # each stage has its own
    plan = sonde.group_parameters_for_norm([p], mesh=mesh, pp_mesh=mesh["pp"])
    unnamed = mesh_of(
        (2, 2), ("stage", "data")
    )  # of a mesh with an axis "pp", the plan would ask for the stages at once
    late = sonde.group_parameters_for_norm([placed(torch.ones(2), unnamed["data"], [Shard(0)], (4,))])
    norms = [
        float(sonde.clip_grad_norm_distributed_(plan, None)),
        float(sonde.clip_grad_norm_distributed_(plan, None, 2.0, mesh["pp"])),
        float(sonde.clip_grad_norm_distributed_(late, None, 2.0, unnamed["stage"])),
    ]
    messages = []
    wrong: list[dict[str, Any]] = [
        {"mesh": mesh},
        {"mesh": mesh, "pp_mesh": mesh},
        {"mesh": mesh, "pp_mesh": mesh["dp"]},
        {"pp_mesh": mesh["dp"]},
        {"mesh": "world"},
    ]
    for options in wrong:
        try:
            messages.append(str(float(sonde.clip_grad_norm_([p], None, **options))))
        except ValueError as error:
            messages.append(str(error))
    try:
        messages.append(str(float(sonde.clip_grad_norm_distributed_(plan, None, 2.0, mesh["dp"]))))
    except ValueError as error:
        messages.append(str(error))
    return norms, messages


def test_pipeline_stages_are_remembered_and_wrong_ones_refused(ranks4: Ranks) -> None:
    for norms, messages in ranks4(_stages):
        assert norms == pytest.approx([math.sqrt(8)] * 3)
        assert "pass pp_mesh=mesh['pp']" in messages[0]
        assert "pp_mesh must have 1 axis, got 2" in messages[1]
        for message in messages[2:4]:
            assert "of pp_mesh=, whose ranks are pipeline stages" in message
        assert "mesh must be a DeviceMesh, got 'world'" in messages[4]
        assert "pp_mesh has other ranks than the plan's pp_mesh" in messages[5]


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


@pytest.mark.parametrize(
    "listed",
    [lambda model: model, nn.Module.parameters, nn.Module.named_parameters],
    ids=["module", "parameters()", "named_parameters()"],
)
def test_a_replaced_parameter_is_noticed(listed: Callable[[nn.Module], Any]) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    plan = sonde.group_parameters_for_norm(listed(with_gradients(model)))
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
    plan = sonde.group_parameters_for_norm(with_gradients(model).parameters())
    assert float(sonde.clip_grad_norm_distributed_(plan, None)) == 3.0
    change(model)
    with_gradients(model)
    with pytest.raises(ValueError, match=r" came into the module, or replaced .* make the plan again"):
        sonde.clip_grad_norm_distributed_(plan, 1.0)


def test_parameters_that_were_left_out_are_not_taken_for_replacements() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    model.register_parameter("scale", nn.Parameter(torch.ones(1)))
    with_gradients(model)
    begun = model.parameters()
    next(begun)
    plans = {
        "only its own": (model.parameters(recurse=False), 1.0),
        "already begun": (begun, 3.0),
        "a list": (list(model.parameters()), math.sqrt(10)),
        "chosen": ((p for p in model.parameters() if p.dim() == 2), math.sqrt(6)),
    }
    for name, (parameters, norm) in plans.items():
        plan = sonde.group_parameters_for_norm(parameters)
        assert float(sonde.clip_grad_norm_distributed_(plan, None)) == pytest.approx(norm), name


def _module_of_fsdp() -> float:
    """After an evaluation FSDP2 leaves other parameters in the outermost module: these have not replaced any."""
    model = fully_shard(nn.Linear(4, 2), mesh=mesh_of((2,)))
    plan = sonde.group_parameters_for_norm(model)
    model(torch.ones(2, 4)).sum().backward()
    with torch.no_grad():
        model(torch.ones(2, 4))
    return float(sonde.clip_grad_norm_distributed_(plan, None))


def test_gathered_parameters_of_fsdp_replace_none(ranks2: Ranks) -> None:
    assert ranks2(_module_of_fsdp) == [pytest.approx(math.sqrt(8 * 2**2 + 2 * 2**2))] * 2
