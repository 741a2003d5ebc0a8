"""The norm and the clip of a model that is cut over real ranks, beside those of one process."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode

import sonde
from tests.ranks import Ranks, mesh_of
from tests.sharded import ORDERS, WAYS, Cut, exact_gradients, experts, fsdp, norm_of, whole


def expected_gradients(way: str) -> dict[str, Tensor]:
    exact = exact_gradients(experts=way.startswith("EP"))
    return {n: g for n, g in exact.items() if way != "TP with sequence parallelism" or n != "front.scale"}


@pytest.fixture
def ranks_for(request: pytest.FixtureRequest) -> Any:
    return lambda way: request.getfixturevalue(f"ranks{WAYS[way][0]}")


def _norms(way: str, with_mesh: bool) -> dict[str, Any]:
    cut: Cut = WAYS[way][1]()
    options = {"mesh": cut.mesh, "replicas": cut.replicas} if with_mesh else {}
    found = []
    for order in ORDERS:
        with CommDebugMode() as counted:
            norm = sonde.clip_grad_norm_(cut.parameters.items(), None, order, pp_mesh=cut.pp_mesh, **options)
        found.append((float(norm), counted.get_total_counts()))
    return {"norms": found, "collectives": cut.collectives, "partial": cut.partial}


# Nothing but a mesh and a declaration tells that plain experts differ from rank to rank.
NEEDS_A_MESH = {"EP, plain experts"}


@pytest.mark.parametrize(
    ("way", "with_mesh"), [(way, mesh) for way in WAYS for mesh in (True, False) if mesh or way not in NEEDS_A_MESH]
)
def test_the_norm_is_that_of_one_process(ranks_for: Any, way: str, with_mesh: bool) -> None:
    results = ranks_for(way)(_norms, way, with_mesh)
    assert all(r["norms"] == results[0]["norms"] for r in results)  # to the last bit
    for order, (norm, collectives) in zip(ORDERS, results[0]["norms"], strict=True):
        assert norm == pytest.approx(norm_of(expected_gradients(way), order), rel=1e-6)
        assert collectives == (1 if with_mesh else results[0]["collectives"]) + results[0]["partial"]


def _clip(way: str, planned: bool) -> dict[str, Any]:
    cut: Cut = WAYS[way][1]()
    if planned:
        plan = sonde.group_parameters_for_norm(
            cut.parameters.items(), mesh=cut.mesh, pp_mesh=cut.pp_mesh, replicas=cut.replicas, verify=True
        )
        norm = sonde.clip_grad_norm_distributed_(plan, 0.05, 2.0, cut.pp_mesh)
        with CommDebugMode() as counted:
            again = sonde.clip_grad_norm_distributed_(plan, None, 2.0, cut.pp_mesh)
    else:
        options: dict[str, Any] = {"mesh": cut.mesh, "pp_mesh": cut.pp_mesh, "replicas": cut.replicas}
        norm = sonde.clip_grad_norm_(cut.parameters.items(), 0.05, **options)
        with CommDebugMode() as counted:  # partial gradients were written back: they are not reduced again
            again = sonde.clip_grad_norm_(cut.parameters.items(), None, **options)
    # full_tensor is a collective: the same parameters on all ranks of a stage, and those have them in one order.
    clipped = {n: whole(p.grad) for n, p in cut.parameters.items() if p.grad is not None}
    return {"norm": float(norm), "again": float(again), "clipped": clipped, "counts": counted.get_total_counts()}


@pytest.mark.parametrize("planned", [True, False])
@pytest.mark.parametrize("way", WAYS)
def test_the_clip_is_that_of_one_process(ranks_for: Any, way: str, planned: bool) -> None:
    exact = expected_gradients(way)
    total = norm_of(exact, 2.0)
    assert total > 0.2  # so that clipping changes something
    seen: set[str] = set()
    for rank, result in enumerate(ranks_for(way)(_clip, way, planned)):
        assert result["norm"] == pytest.approx(total, rel=1e-6)
        assert result["again"] == pytest.approx(0.05, rel=1e-4)  # torch's 1e-6 beside the norm is in it
        assert result["counts"] == 1
        for name, gradient in result["clipped"].items():
            reference = exact[name]
            if way == "EP, plain experts" and name == "back.experts.w":
                reference = reference[rank % 2 : rank % 2 + 1]  # this rank's expert alone
            torch.testing.assert_close(gradient.double(), reference * 0.05 / total, rtol=1e-4, atol=1e-8)
            seen.add(name)
    assert seen == set(exact)


# Gradients made by hand, where a model would not give them.


def placed(
    local: Tensor, mesh: DeviceMesh, placements: list[Any], shape: tuple[int, ...], like: list[Any] | None = None
) -> nn.Parameter:
    """A parameter with a gradient whose local part is given; the parameter lies as `like`, or as its gradient."""

    def dtensor(t: Tensor, where: list[Any]) -> DTensor:
        stride = torch.empty(shape).stride()
        return DTensor.from_local(t, mesh, where, run_check=False, shape=torch.Size(shape), stride=stride)

    parameter = nn.Parameter(dtensor(torch.zeros_like(local), like or placements))
    parameter.grad = dtensor(local, placements)
    return parameter


def _five_partial() -> tuple[float, list[int], list[str], list[list[float]]]:
    mesh, rank = mesh_of((2,)), dist.get_rank()
    norms = [placed(torch.full((3,), float(rank + k)), mesh, [Partial()], (3,), [Replicate()]) for k in range(5)]
    counts = []
    for _ in range(2):
        with CommDebugMode() as counted:
            norm = sonde.clip_grad_norm_(norms, math.inf, mesh=mesh)
        counts.append(counted.get_total_counts())
    grads = [p.grad for p in norms]
    assert all(isinstance(g, DTensor) for g in grads)
    return (
        float(norm),
        counts,
        [str(g.placements) for g in grads],  # type: ignore[union-attr]
        [g.to_local().tolist() for g in grads],  # type: ignore[union-attr]
    )


def test_partial_gradients_are_summed_once_and_written_back(ranks2: Ranks) -> None:
    """Five of them cost one all-reduce; the optimizer finds them summed, and a second clip does."""
    for norm, counts, placements, values in ranks2(_five_partial):
        assert norm == pytest.approx(math.sqrt(3 * sum((2 * k + 1) ** 2 for k in range(5))), rel=1e-7)
        assert counts == [2, 1]
        assert placements == ["(Replicate(),)"] * 5
        assert values == [[2.0 * k + 1] * 3 for k in range(5)]


def _partial_missing_on_one_rank() -> tuple[float, bool]:
    mesh, rank = mesh_of((2,)), dist.get_rank()
    p = placed(torch.ones(3), mesh, [Partial()], (3,), [Replicate()])
    plan = sonde.group_parameters_for_norm([p], mesh=mesh)
    if rank == 1:
        p.grad = None
    return float(sonde.clip_grad_norm_distributed_(plan, 1.0)), p.grad is None


def test_a_partial_gradient_that_is_missing_on_one_rank_counts_as_zeros(ranks2: Ranks) -> None:
    first, second = ranks2(_partial_missing_on_one_rank)
    assert first == (pytest.approx(math.sqrt(3)), False)
    assert second == (pytest.approx(math.sqrt(3)), True)


def _mixed() -> list[float]:
    """Meshes of different axes, one made twice, and plain tensors; a tied one twice; bf16 and fp64 among them."""
    mesh = mesh_of((2, 2), ("a", "b"))
    again = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    generator = torch.Generator().manual_seed(3)

    def parameter(shape: tuple[int, ...], on: DeviceMesh | None, where: list[Any], dtype: torch.dtype) -> nn.Parameter:
        gradient = torch.randn(shape, generator=generator).to(dtype)
        found.append(gradient)
        p = nn.Parameter(torch.zeros_like(gradient) if on is None else distribute_tensor(gradient, on, where))
        p.grad = gradient if on is None else distribute_tensor(gradient, on, where)
        return p

    found: list[Tensor] = []
    parameters = [
        parameter((5, 3), mesh, [Shard(0), Shard(1)], torch.float32),
        parameter((7,), again, [Shard(0), Replicate()], torch.float32),
        parameter((6,), mesh["a"], [Shard(0)], torch.bfloat16),
        parameter((4, 4), again["b"], [Shard(1)], torch.float64),
        parameter((1,), mesh["b"], [Shard(0)], torch.float32),
        parameter((0, 4), mesh["b"], [Shard(0)], torch.float32),
        parameter((3,), None, [], torch.float32),
        parameter((2, 2), mesh, [Replicate(), Replicate()], torch.float32),
    ]
    parameters.append(parameters[0])
    exact = {str(i): g for i, g in enumerate(found)}
    return [
        float(sonde.clip_grad_norm_(parameters, None, order, mesh=on)) / norm_of(exact, order)
        for order in ORDERS
        for on in (mesh, None)
    ]


def test_mixed_meshes_plain_tensors_ties_and_dtypes_in_one_call(ranks4: Ranks) -> None:
    results = ranks4(_mixed)
    assert all(r == results[0] for r in results)
    assert results[0] == pytest.approx([1.0] * 8, rel=1e-6)


def _extreme(value: float, dtype: torch.dtype, order: float) -> tuple[float, list[float]]:
    mesh, rank = mesh_of((2,)), dist.get_rank()
    local = torch.tensor([value if rank else 0.0, 0.0], dtype=dtype)
    p = placed(local, mesh, [Shard(0)], (4,))
    norm = sonde.clip_grad_norm_(p, 1.0, order, mesh=mesh)
    return float(norm), whole(p.grad).tolist()  # type: ignore[arg-type]


@pytest.mark.parametrize("order", [2.0, math.inf])
@pytest.mark.parametrize(("value", "dtype"), [(1e30, torch.float32), (6e4, torch.float16)])
def test_large_gradients_are_clipped_and_not_zeroed(
    ranks2: Ranks, value: float, dtype: torch.dtype, order: float
) -> None:
    """Their squares overflow, in fp32 and in fp16."""
    for norm, clipped in ranks2(_extreme, value, dtype, order):
        assert norm == pytest.approx(value, rel=1e-3)
        assert clipped == pytest.approx([0, 0, 1.0, 0], rel=1e-3)


@pytest.mark.parametrize("order", [2.0, math.inf])
def test_a_nan_on_one_rank_is_seen_by_all(ranks2: Ranks, order: float) -> None:
    for norm, clipped in ranks2(_extreme, math.nan, torch.float32, order):
        assert math.isnan(norm)
        assert all(map(math.isnan, clipped))


def _bf16() -> tuple[float, float]:
    cut = fsdp(dtype=torch.bfloat16)
    gradients = {n: whole(p.grad) for n, p in cut.parameters.items() if p.grad is not None}
    return float(sonde.clip_grad_norm_(cut.parameters.values(), None, mesh=cut.mesh)), norm_of(gradients, 2.0)


def test_bf16_is_squared_in_more(ranks2: Ranks) -> None:
    for norm, exact in ranks2(_bf16):
        assert norm == pytest.approx(exact, rel=1e-6)


def _nonfinite(nonfinite: str) -> tuple[str, list[float]]:
    cut = fsdp()
    if dist.get_rank() == 1:
        cut.parameters["back.up.weight"].grad.to_local()[0, 0] = math.inf  # type: ignore[union-attr]
    try:
        said = str(float(sonde.clip_grad_norm_(cut.parameters.items(), 1.0, mesh=cut.mesh, nonfinite=nonfinite)))
    except RuntimeError as error:
        said = str(error)
    head = cut.parameters["back.head.weight"].grad
    assert head is not None
    return said, whole(head).flatten()[:4].tolist()


def test_non_finite_gradients_are_named_on_the_rank_that_has_them(ranks2: Ranks) -> None:
    exact = exact_gradients()["back.head.weight"].flatten()[:4].tolist()
    (first, untouched), (second, _) = ranks2(_nonfinite, "raise")
    assert "not finite in back.up.weight" in second
    assert "another rank's are not" in first
    assert untouched == pytest.approx(exact, rel=1e-5)
    for said, _ in ranks2(_nonfinite, "assert_async"):
        assert "the gradient norm is not finite" in said


def test_non_finite_gradients_ignored_or_skipped(ranks2: Ranks) -> None:
    for said, head in ranks2(_nonfinite, "skip"):
        assert said == "inf"
        assert head == [0.0] * 4
    for said, head in ranks2(_nonfinite, "ignore"):
        assert said == "inf"
        assert head == [0.0] * 4  # as torch: everything times 1/inf


def _undeclared_experts() -> tuple[float, str, str]:
    cut = experts(as_dtensors=False)
    norm = float(sonde.clip_grad_norm_(cut.parameters.items(), None, mesh=cut.mesh))
    said = []
    for replicas in (None, {"back.experts.w": 4}):
        try:
            sonde.group_parameters_for_norm(cut.parameters.items(), mesh=cut.mesh, replicas=replicas, verify=True)
            said.append("no error")
        except ValueError as error:
            said.append(str(error))
    return norm, said[0], said[1]


def test_replicas_are_verified(ranks4: Ranks) -> None:
    for norm, undeclared, wrong in ranks4(_undeclared_experts):
        assert norm != pytest.approx(norm_of(exact_gradients(experts=True), 2.0), rel=1e-3)  # why it has to be said
        for said in (undeclared, wrong):
            assert "back.experts.w of rank 0 has the same values on 2 of 4 ranks" in said
            assert "replicas={'back.experts.w': 2}" in said


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


def test_a_mesh_that_does_not_contain_the_gradients_is_refused(ranks2: Ranks) -> None:
    for said, before, after in ranks2(_bad, "mesh"):
        assert "it is on ranks 0, 1, which mesh= (" in said
        assert "pass the mesh of all ranks that hold the model" in said
        assert before == after


def _plan_that_learns() -> list[tuple[float, int]]:
    """Planned before there is a gradient; used while gradients come, go missing, and lie otherwise."""
    mesh, rank = mesh_of((2,)), dist.get_rank()
    p = placed(torch.ones(2), mesh, [Shard(0)], (4,))
    q = placed(torch.full((3,), 0.5 * (rank + 1)), mesh, [Partial()], (3,), [Replicate()])
    later, p.grad = p.grad, None
    partial, q.grad = q.grad, None
    plan = sonde.group_parameters_for_norm([p, q], mesh=mesh)
    found = []
    for step in range(4):
        p.grad = later if step else None
        q.grad = partial if step == 2 else None
        with CommDebugMode() as counted:
            norm = sonde.clip_grad_norm_distributed_(plan, None)
        found.append((float(norm), counted.get_total_counts()))
    return found


def test_a_plan_follows_gradients_that_come_and_go(ranks2: Ranks) -> None:
    for found in ranks2(_plan_that_learns):
        assert [norm for norm, _ in found] == pytest.approx([0, 2, math.sqrt(4 + 3 * 1.5**2), 2], rel=1e-6)
        # Once it has been seen to be partial, a gradient that is missing takes part: its peers may have it.
        assert [n for _, n in found] == [1, 1, 2, 2]


def _twice_a_step() -> list[float]:
    """The second clip finds the gradient summed; in the next step it is missing on one rank."""
    mesh, rank = mesh_of((2,)), dist.get_rank()
    p = placed(torch.ones(3), mesh, [Partial()], (3,), [Replicate()])
    partial, plan = p.grad, sonde.group_parameters_for_norm([p], mesh=mesh)
    found = [float(sonde.clip_grad_norm_distributed_(plan, 100.0)) for _ in range(2)]
    p.grad = partial if rank == 0 else None
    return [*found, float(sonde.clip_grad_norm_distributed_(plan, 100.0))]


def test_what_was_partial_once_may_be_so_again(ranks2: Ranks) -> None:
    for found in ranks2(_twice_a_step):
        assert found == pytest.approx([math.sqrt(12), math.sqrt(12), math.sqrt(3)])


def _partial_of_a_sharded_parameter() -> float:
    mesh, rank = mesh_of((2,)), dist.get_rank()
    p = nn.Parameter(distribute_tensor(torch.zeros(4), mesh, [Shard(0)]))
    p.grad = DTensor.from_local(torch.ones(4), mesh, [Partial()], run_check=False)
    plan = sonde.group_parameters_for_norm([p], mesh=mesh)
    if rank == 1:
        p.grad = None
    return float(sonde.clip_grad_norm_distributed_(plan, None))


def test_zeros_for_a_missing_partial_gradient_are_of_its_own_shape(ranks2: Ranks) -> None:
    assert ranks2(_partial_of_a_sharded_parameter) == [2.0, 2.0]


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


def _summed_and_averaged() -> float:
    """Summed over one axis, averaged over the other."""
    mesh = mesh_of((2, 2), ("a", "b"))
    p = placed(torch.full((3,), 1.0 + dist.get_rank()), mesh, [Partial("avg"), Partial()], (3,), [Replicate()] * 2)
    return float(sonde.clip_grad_norm_([p], None, mesh=mesh))


def test_partial_sums_and_averages(ranks4: Ranks) -> None:
    # Ranks hold 1, 2 | 3, 4: sums 3 and 7, whose average is 5.
    assert ranks4(_summed_and_averaged) == pytest.approx([5 * math.sqrt(3)] * 4)


def _stages() -> tuple[list[float], list[str]]:
    mesh = mesh_of((2, 2), ("pp", "dp"))
    p = placed(torch.ones(2), mesh["dp"], [Shard(0)], (4,))  # each stage has one of its own
    plan = sonde.group_parameters_for_norm([p], mesh=mesh, pp_mesh=mesh["pp"])
    late = sonde.group_parameters_for_norm([p])
    norms = [
        float(sonde.clip_grad_norm_distributed_(plan, None)),
        float(sonde.clip_grad_norm_distributed_(plan, None, 2.0, mesh["pp"])),
        float(sonde.clip_grad_norm_distributed_(late, None, 2.0, mesh["pp"])),
    ]
    said = []
    wrong: list[dict[str, Any]] = [
        {"mesh": mesh},
        {"mesh": mesh, "pp_mesh": mesh},
        {"mesh": mesh, "pp_mesh": mesh["dp"]},
        {"pp_mesh": mesh["dp"]},
        {"mesh": "world"},
    ]
    for options in wrong:
        try:
            said.append(str(float(sonde.clip_grad_norm_([p], None, **options))))
        except ValueError as error:
            said.append(str(error))
    try:
        said.append(str(float(sonde.clip_grad_norm_distributed_(plan, None, 2.0, mesh["dp"]))))
    except ValueError as error:
        said.append(str(error))
    return norms, said


def test_pipeline_stages_are_remembered_and_wrong_ones_refused(ranks4: Ranks) -> None:
    for norms, said in ranks4(_stages):
        assert norms == pytest.approx([math.sqrt(8)] * 3)
        assert "pass pp_mesh=mesh['pp']" in said[0]
        assert "pp_mesh must have 1 axis, got 2" in said[1]
        for of_data in said[2:4]:
            assert "of pp_mesh=, whose ranks are pipeline stages" in of_data
        assert "mesh must be a DeviceMesh, got 'world'" in said[4]
        assert "pp_mesh has other ranks than the plan's pp_mesh" in said[5]


def _experts_over_dp_alone() -> list[str]:
    """Fully sharded over dp, and others on each rank of ep: DTensors of the same shape and name."""
    mesh = mesh_of((2, 2), ("dp", "ep"))
    mine = torch.randn(6, generator=torch.Generator().manual_seed(mesh.get_local_rank("ep")))
    at = 3 * mesh.get_local_rank("dp")
    p = placed(mine[at : at + 3].clone(), mesh["dp"], [Shard(0)], (6,))
    with torch.no_grad():
        p.data._local_tensor.copy_(mine[at : at + 3])  # type: ignore[attr-defined]
    said = []
    for replicas in (None, {"w": 1}):
        try:
            plan = sonde.group_parameters_for_norm([("w", p)], mesh=mesh, replicas=replicas, verify=True)
            said.append(f"{float(sonde.clip_grad_norm_distributed_(plan, None)):.6f}")
        except ValueError as error:
            said.append(str(error))
    return said


def test_dtensors_that_are_others_elsewhere_are_found_and_can_be_declared(ranks4: Ranks) -> None:
    both = [torch.randn(6, generator=torch.Generator().manual_seed(rank)) for rank in range(2)]
    for found, norm in ranks4(_experts_over_dp_alone):
        assert "has the same values on 1 of 4 ranks, and is counted as being on 2" in found
        assert float(norm) == pytest.approx(float(torch.cat(both).norm()), rel=1e-6)


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


def _order_of_events() -> list[str]:
    """Without a mesh: gradients cut over two sets of ranks."""
    from sonde.gradient_norm import global_norm as module

    mesh = mesh_of((2, 2), ("dp", "tp"))
    plan = sonde.group_parameters_for_norm(
        [placed(torch.ones(2), mesh[axis], [Shard(0)], (4,)) for axis in ("dp", "tp")]
    )
    events: list[str] = []
    read, reduce = module.power_sum, module.start_reduce

    class Waited:
        def __init__(self, work: Any) -> None:
            self._work = work

        def wait(self) -> None:
            events.append("wait")
            self._work.wait()

    def spied_read(*args: Any) -> Tensor:
        events.append("read")
        return read(*args)

    def spied_reduce(*args: Any) -> Any:
        work = reduce(*args)
        if work is None:
            return None
        events.append("begin")
        return Waited(work)

    module.power_sum, module.start_reduce = spied_read, spied_reduce  # type: ignore[assignment]
    try:
        sonde.clip_grad_norm_distributed_(plan, None)
    finally:
        module.power_sum, module.start_reduce = read, reduce
    return events


def test_sums_over_ranks_run_while_other_gradients_are_read(ranks4: Ranks) -> None:
    for events in ranks4(_order_of_events):
        assert events == ["read", "begin", "read", "begin", "wait", "wait"]


def _planned_for_different_parameters() -> list[str]:
    """Stages under another name than "pp", a parameter that one rank has only, one declared; and the same on all."""
    mesh, rank = mesh_of((2,), ("stage",)), dist.get_rank()
    p, q = nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(4 if rank else 5))
    said = []
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
            said.append("")
        except ValueError as error:
            said.append(str(error))
    return said


def test_stages_that_were_not_named_are_seen_by_their_parameters(ranks2: Ranks) -> None:
    for said in ranks2(_planned_for_different_parameters):
        for refused in said[:3]:
            assert "ranks of mesh= have different parameters" in refused
            assert "pass pp_mesh= if they are pipeline stages" in refused
        assert said[3:] == [""] * 3


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


def _one_stage_in_fp64() -> tuple[float, float]:
    mesh, rank = mesh_of((2,), ("pp",)), dist.get_rank()
    p = nn.Parameter(torch.zeros(50, dtype=torch.float64 if rank else torch.float32))
    p.grad = torch.rand(50, dtype=p.dtype, generator=torch.Generator().manual_seed(rank))
    before = p.grad.double().clone()
    norm = sonde.clip_grad_norm_([p], 0.1, pp_mesh=mesh)
    return float(norm), float((p.grad.double() / before).mean())


def test_stages_of_different_precision_are_clipped_alike(ranks2: Ranks) -> None:
    (norm, by), (exact, exactly_by) = ranks2(_one_stage_in_fp64)
    assert norm == torch.tensor(exact).float().item()
    assert by == pytest.approx(exactly_by, rel=1e-7)
    assert exactly_by == pytest.approx(0.1 / (exact + 1e-6), rel=1e-14)


def _same_beginnings() -> list[str]:
    """Four experts built under one seed, each on two of four ranks."""
    mesh = mesh_of((2, 2), ("dp", "ep"))
    torch.manual_seed(0)
    p, said = nn.Parameter(torch.randn(5)), []
    for has_gradient in (False, True):
        if has_gradient:
            p.grad = torch.randn(5, generator=torch.Generator().manual_seed(mesh.get_local_rank("ep")))
        for declared in (2, 4):
            try:
                sonde.group_parameters_for_norm([("w", p)], mesh=mesh, replicas={"w": declared}, verify=True)
                said.append("")
            except ValueError as error:
                said.append(str(error))
    return said


def test_experts_that_begin_alike_are_told_apart_by_their_gradients(ranks4: Ranks) -> None:
    for right_at_first, wrong_at_first, right, wrong in ranks4(_same_beginnings):
        assert right_at_first == wrong_at_first == right == ""
        assert "the same values on 2 of 4 ranks, and is counted as being on 4" in wrong


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


def _torchs_clip() -> dict[str, Any]:
    """What torch's function does with the same gradients: the reasons for this one."""
    clip = torch.nn.utils.clip_grad_norm_
    mesh = mesh_of((2, 1), ("a", "b"))
    rank = dist.get_rank()
    sharded = placed(torch.ones(2), mesh["a"], [Shard(0)], (4,))
    other = placed(torch.ones(2), mesh["b"], [Shard(0)], (2,))
    plain = nn.Parameter(torch.zeros(2))
    plain.grad = torch.ones(2)

    def outcome(parameters: list[nn.Parameter], norm_type: float = 2.0) -> Any:
        try:
            return float(whole(clip(parameters, math.inf, norm_type)))
        except (RuntimeError, NotImplementedError, ValueError) as error:
            return type(error).__name__

    partial = [placed(torch.ones(3), mesh["a"], [Partial()], (3,), [Replicate()]) for _ in range(5)]
    with CommDebugMode() as counted:
        outcome(partial)
    nan = placed(torch.tensor([math.nan if rank else 1.0]), mesh["a"], [Shard(0)], (2,))
    return {
        "meshes": outcome([sharded, other]),
        "plain": outcome([sharded, plain]),
        "tied": outcome([sharded, sharded]),
        "partial": counted.get_total_counts(),
        "nan": outcome([nan], math.inf),
        "ours": [float(sonde.clip_grad_norm_(p, None, mesh=mesh)) for p in ([sharded, other], [sharded, plain])],
    }


def test_what_torch_does_with_these_is_as_it_was(ranks2: Ranks) -> None:
    """Where this fails, torch has changed, and docs/gradient-norm.md says too much of it."""
    for found in ranks2(_torchs_clip):
        assert found["meshes"] == "RuntimeError"
        assert found["plain"] == "RuntimeError"
        assert found["tied"] == pytest.approx(math.sqrt(8))  # 2, if it counted once
        assert found["partial"] >= 5
        assert not math.isnan(found["nan"])
        assert found["ours"] == pytest.approx([math.sqrt(4 + 2), math.sqrt(4 + 2)])


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
