"""An error on one rank: the other ranks hear of it, none waits for ever, and gradients stay as they are."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

import sonde
from tests.gradient_norm.placed_gradients import placed
from tests.ranks import Ranks, mesh_of
from tests.sharded import fsdp


def _bad(what: str) -> tuple[str, list[float], list[float]]:
    """Something is wrong on rank 1 only, or on both; what is said, and a gradient before and after."""
    cut, rank = fsdp(), dist.get_rank()
    parameters: dict[str, Any] = dict(cut.parameters)
    options: dict[str, Any] = {"mesh": cut.mesh, "max_norm": 1.0}
    if what == "sparse" and rank == 1:
        parameters["stray"] = nn.Parameter(torch.zeros(3))
        parameters["stray"].grad = torch.zeros(3).to_sparse()
    elif what in ("plain on meta", "fp8") and rank == 1:
        like = {"device": "meta"} if what == "plain on meta" else {"dtype": torch.float8_e4m3fn}
        parameters["stray"] = nn.Parameter(torch.zeros(3, **like))  # type: ignore[arg-type]
        parameters["stray"].grad = torch.zeros(3, **like)  # type: ignore[arg-type]
    elif what == "options" and rank == 1:
        options["max_norm"] = math.nan
    elif what == "replicas" and rank == 1:
        options["replicas"] = {"typo": 1}
    elif what == "many replicas" and rank == 1:
        options["replicas"] = {"back.up.weight": 2}
    elif what == "placement" and rank == 1:
        parameters["stray"] = placed(torch.ones(2), cut.mesh, [Partial("max")], (2,), [Replicate()])
    elif what == "mesh":
        alone = (
            DeviceMesh("cpu", [0], _init_backend=False) if rank == 0 else DeviceMesh("cpu", [1], _init_backend=False)
        )
        options["mesh"] = alone
    elif what == "device" and rank == 1:
        local = DTensor.from_local(torch.ones(3, device="meta"), cut.mesh, [Replicate()], run_check=False)
        parameters["stray"] = nn.Parameter(local.detach())
        parameters["stray"].grad = local
    before = parameters["back.up.weight"].grad.to_local().flatten()[:3].tolist()
    max_norm = options.pop("max_norm")
    try:
        sonde.clip_grad_norm_(parameters.items(), max_norm, **options)
        said = "no error"
    except ValueError as error:
        said = str(error)
    return said, before, parameters["back.up.weight"].grad.to_local().flatten()[:3].tolist()


@pytest.mark.parametrize(
    ("what", "match"),
    [
        ("sparse", "gradient of stray: it is sparse"),
        ("placement", "gradient of stray: placement Partial(max) on mesh axis 0 is not supported"),
        ("device", "gradient of stray: it is on meta and its mesh on cpu"),
        ("plain on meta", "gradient of stray: it is on meta and its mesh on cpu"),
        ("fp8", "gradient of stray: its dtype is torch.float8_e4m3fn, and only fp16, bf16, fp32 and fp64"),
        ("options", "max_norm must be ≥ 0, got nan"),
        ("replicas", "replicas= has 'typo', which is not among the parameters"),
        ("many replicas", "gradient of back.up.weight: it is cut into 2 shards over 2 of 2 ranks"),
    ],
)
def test_what_is_wrong_on_one_rank_is_raised_on_all(ranks2: Ranks, what: str, match: str) -> None:
    (first, *before_and_after), (second, *of_second) = ranks2(_bad, what)
    assert "another rank found a gradient that cannot be counted" in first
    assert match in second
    for before, after in (before_and_after, of_second):
        assert before == after


def test_a_mesh_that_does_not_contain_the_gradients_is_refused(ranks2: Ranks) -> None:
    for said, before, after in ranks2(_bad, "mesh"):
        assert "it is on ranks 0, 1, which mesh= (" in said
        assert "pass the mesh of all ranks that hold the model" in said
        assert before == after


def _bad_two_hops_away() -> str:
    """Gradients over rows and over columns of a 2 × 2 mesh: the last rank shares no sum with the first."""
    mesh = mesh_of((2, 2), ("dp", "tp"))
    parameters = [placed(torch.ones(2), mesh[axis], [Shard(0)], (4,)) for axis in ("dp", "tp")]
    if dist.get_rank() == 0:
        stray = nn.Parameter(torch.ones(3))
        stray.grad = torch.ones(3).to_sparse()
        parameters.append(stray)
    try:
        sonde.clip_grad_norm_(parameters, 1.0, 7.0)
    except ValueError as error:
        return str(error)
    return ""


def test_above_the_sixth_order_nobody_waits_for_who_has_raised(ranks4: Ranks) -> None:
    first, *others = ranks4(_bad_two_hops_away)
    assert "it is sparse" in first
    assert all("another rank found a gradient that cannot be counted" in said for said in others)


def _bad_among_partial() -> str:
    mesh, rank = mesh_of((2,)), dist.get_rank()
    p = placed(torch.ones(3), mesh, [Partial()], (3,), [Replicate()])
    q = placed(torch.ones(5, device="meta" if rank else "cpu"), mesh, [Partial()], (5,), [Replicate()])
    try:
        return str(float(sonde.clip_grad_norm_([("p", p), ("q", q)], 1.0, mesh=mesh)))
    except ValueError as error:
        return str(error)


def test_a_bad_one_among_partial_gradients_leaves_no_rank_waiting(ranks2: Ranks) -> None:
    first, second = ranks2(_bad_among_partial)
    assert "another rank found a gradient that cannot be counted" in first
    assert "gradient of q: it is on meta" in second


def _one_rank_asks_wrongly() -> list[str]:
    """Things that are no parameters on one rank; a pp_mesh that is none on one; a rank without any."""
    mesh, rank = mesh_of((2,)), dist.get_rank()
    p = nn.Parameter(torch.zeros(3))
    p.grad = torch.ones(3)
    said = []
    calls: list[Any] = [
        lambda: sonde.clip_grad_norm_([p, 1.0] if rank else [p], 1.0, mesh=mesh),
        lambda: sonde.clip_grad_norm_([p], 1.0, mesh=mesh, pp_mesh="stages" if rank else None),  # type: ignore[arg-type]
        lambda: sonde.group_parameters_for_norm([] if rank else [p], mesh=mesh),
    ]
    for call in calls:
        try:
            call()
            said.append("")
        except ValueError as error:
            said.append(str(error))
    return [*said, str(p.grad.tolist())]


def test_what_one_rank_asks_wrongly_is_told_to_the_others(ranks2: Ranks) -> None:
    first, second = ranks2(_one_rank_asks_wrongly)
    assert ["another rank" in said for said in first[:3]] == [True, True, False]
    assert "parameters must be tensors" in second[0]
    assert "pp_mesh must be a DeviceMesh" in second[1]
    assert first[2] == second[2] == ""
    assert first[3] == second[3] == "[1.0, 1.0, 1.0]"


def _elsewhere() -> list[str]:
    """A parameter on ranks 0 and 1 only, and meshes of those ranks given on all four."""
    few, everyone = DeviceMesh("cpu", [0, 1]), mesh_of((4,))
    p = nn.Parameter(distribute_tensor(torch.ones(4), few, [Shard(0)]))
    p.grad = distribute_tensor(torch.ones(4), few, [Shard(0)])
    plan = sonde.group_parameters_for_norm([("p", p)], mesh=everyone, replicas={"p": 1})
    assert float(sonde.clip_grad_norm_distributed_(plan, None)) == 2.0
    said = []
    wrong: list[dict[str, Any]] = [{"mesh": everyone}, {"mesh": everyone, "replicas": {"p": 1}}]
    if dist.get_rank() > 1:
        wrong.append({"mesh": few})
    for options in wrong:
        try:
            said.append(str(float(sonde.clip_grad_norm_([("p", p)], None, **options))))
        except ValueError as error:
            said.append(str(error))
    return said


def test_a_parameter_on_other_ranks_has_to_be_declared(ranks4: Ranks) -> None:
    results = ranks4(_elsewhere)
    for said in results[:2]:
        assert "another rank found" in said[0]
    for said in results[2:]:
        assert "it is on ranks 0, 1, and this rank, which is not among them" in said[0]
        assert "mesh has ranks 0, 1, and this rank is not among them" in said[2]
    assert [said[1] for said in results] == ["2.0"] * 4


def _first_fsdp() -> str:
    model = FullyShardedDataParallel(nn.Linear(4, 4), device_id=torch.device("cpu"), use_orig_params=True)
    model(torch.ones(2, 4)).sum().backward()
    try:
        return str(float(sonde.clip_grad_norm_(model.named_parameters(), 1.0)))
    except ValueError as error:
        return str(error)


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
def test_fsdps_first_version_is_refused(ranks2: Ranks) -> None:
    for said in ranks2(_first_fsdp):
        assert "FSDP's first version does not tell how it cuts parameters" in said


def _unmaterialised_stage() -> str:
    """Plain parameters, of which one stage's were never materialised."""
    mesh, device = mesh_of((2,), ("pp",)), "meta" if dist.get_rank() else "cpu"
    p = nn.Parameter(torch.zeros(3, device=device))
    p.grad = torch.ones(3, device=device)
    try:
        return str(float(sonde.clip_grad_norm_([p], 1.0, pp_mesh=mesh)))
    except ValueError as error:
        return str(error)


def test_a_stage_on_the_meta_device_leaves_no_rank_waiting(ranks2: Ranks) -> None:
    first, second = ranks2(_unmaterialised_stage)
    assert "another rank found" in first
    assert "it is on the meta device" in second
