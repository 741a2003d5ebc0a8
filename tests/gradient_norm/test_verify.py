"""What is compared over the ranks of a mesh: which parameters they have, and on how many ranks each is."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import Shard

import sonde
from tests.gradient_norm.placed_gradients import placed
from tests.ranks import Ranks, mesh_of
from tests.sharded import experts


def _undeclared_experts() -> list[str]:
    cut = experts(as_dtensors=False)
    messages = []
    for replicas in (None, {"back.experts.w": 4}):
        try:
            sonde.group_parameters_for_norm(cut.parameters.items(), mesh=cut.mesh, replicas=replicas, verify=True)
            messages.append("no error")
        except ValueError as error:
            messages.append(str(error))
    return messages


def test_replicas_are_verified(ranks4: Ranks) -> None:
    for undeclared, wrong in ranks4(_undeclared_experts):
        for message in (undeclared, wrong):
            assert "back.experts.w of rank 0 has the same values on 2 of 4 ranks" in message
            assert "replicas={'back.experts.w': 2}" in message


def _tied_over_stages() -> tuple[float, list[float]]:
    """The first stage's embedding is the last stage's head: each has a copy, and the sum of both gradients."""
    mesh, rank = mesh_of((2,), ("pp",)), dist.get_rank()
    generator = torch.Generator().manual_seed(5)
    tied, *own = (torch.randn(4, 3, generator=generator) for _ in range(3))
    parameters = {("embed", "head")[rank]: nn.Parameter(tied), f"stages.{rank}": nn.Parameter(own[rank])}
    for p in parameters.values():
        p.grad = p.detach().clone()
    plan = sonde.group_parameters_for_norm(
        parameters.items(), mesh=mesh, pp_mesh=mesh, replicas={("embed", "head")[rank]: 2}, verify=True
    )
    norm = sonde.clip_grad_norm_distributed_(plan, None, 2.0, mesh)
    return float(norm), [float(t.square().sum()) for t in (tied, *own)]


def test_a_weight_tied_over_pipeline_stages_counts_once(ranks2: Ranks) -> None:
    for norm, squares in ranks2(_tied_over_stages):
        assert norm == pytest.approx(math.sqrt(sum(squares)), rel=1e-6)


def _experts_over_dp_alone() -> list[str]:
    """Experts fully sharded over dp, different on each rank of ep: DTensors of the same shape and name."""
    mesh = mesh_of((2, 2), ("dp", "ep"))
    mine = torch.randn(6, generator=torch.Generator().manual_seed(mesh.get_local_rank("ep")))
    at = 3 * mesh.get_local_rank("dp")
    p = placed(mine[at : at + 3].clone(), mesh["dp"], [Shard(0)], (6,))
    with torch.no_grad():
        p.data._local_tensor.copy_(mine[at : at + 3])  # type: ignore[attr-defined]
    messages = []
    for replicas in (None, {"w": 1}):
        try:
            plan = sonde.group_parameters_for_norm([("w", p)], mesh=mesh, replicas=replicas, verify=True)
            messages.append(f"{float(sonde.clip_grad_norm_distributed_(plan, None)):.6f}")
        except ValueError as error:
            messages.append(str(error))
    return messages


def test_dtensors_with_other_values_elsewhere_are_found_and_can_be_declared(ranks4: Ranks) -> None:
    both = [torch.randn(6, generator=torch.Generator().manual_seed(rank)) for rank in range(2)]
    for message, norm in ranks4(_experts_over_dp_alone):
        assert "has the same values on 1 of 4 ranks, and is counted as being on 2" in message
        assert float(norm) == pytest.approx(float(torch.cat(both).norm()), rel=1e-6)


def _planned_for_different_parameters() -> list[str]:
    """Stages of another name than "pp", a parameter on one rank only, a declared one, and the same on all ranks."""
    mesh, rank = mesh_of((2,), ("stage",)), dist.get_rank()
    p, q = nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(4 if rank else 5))
    messages = []
    calls: list[tuple[list[Any], dict[str, Any]]] = [
        ([q], {}),
        ([(f"layers.{rank}", p)], {}),
        ([p] if rank else [p, q], {}),
        ([q], {"pp_mesh": mesh}),
        ([("p", p), (f"expert.{rank}", q)], {"replicas": {f"expert.{rank}": 1}}),
        ([("p", p)], {}),
    ]
    for parameters, options in calls:
        try:
            sonde.group_parameters_for_norm(parameters, mesh=mesh, **options)
            messages.append("")
        except ValueError as error:
            messages.append(str(error))
    return messages


def test_ranks_with_different_parameters_are_refused_unless_the_call_explains_them(ranks2: Ranks) -> None:
    for messages in ranks2(_planned_for_different_parameters):
        for refused in messages[:3]:
            assert "ranks of mesh= have different parameters" in refused
            assert "pass pp_mesh= if they are pipeline stages" in refused
        assert messages[3:] == [""] * 3


def _same_beginnings() -> list[str]:
    """Four experts built under one seed, each on two of four ranks."""
    mesh = mesh_of((2, 2), ("dp", "ep"))
    torch.manual_seed(0)
    p, messages = nn.Parameter(torch.randn(5)), []
    for has_gradient in (False, True):
        if has_gradient:
            p.grad = torch.randn(5, generator=torch.Generator().manual_seed(mesh.get_local_rank("ep")))
        for declared in (2, 4):
            try:
                sonde.group_parameters_for_norm([("w", p)], mesh=mesh, replicas={"w": declared}, verify=True)
                messages.append("")
            except ValueError as error:
                messages.append(str(error))
    return messages


def test_experts_that_begin_alike_are_told_apart_by_their_gradients(ranks4: Ranks) -> None:
    for right_at_first, wrong_at_first, right, wrong in ranks4(_same_beginnings):
        assert right_at_first == wrong_at_first == right == ""
        assert "the same values on 2 of 4 ranks, and is counted as being on 4" in wrong
