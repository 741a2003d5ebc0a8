"""The norm and the clip of a model that is cut over real ranks, beside those of one process."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.debug import CommDebugMode

import sonde
from sonde.parallel.placements import is_dtensor
from tests.gradient_norm.placed_gradients import placed
from tests.ranks import Ranks, mesh_of
from tests.sharded import ORDERS, WAYS, Cut, exact_gradients, fsdp, norm_of, whole


def expected_gradients(way: str) -> dict[str, Tensor]:
    exact = exact_gradients(experts=way.startswith("EP"))
    return {n: g for n, g in exact.items() if way != "TP with sequence parallelism" or n != "front.scale"}


@pytest.fixture
def ranks_for(request: pytest.FixtureRequest) -> Any:
    return lambda way: request.getfixturevalue(f"ranks{WAYS[way][0]}")


# Plain experts differ from rank to rank. Only a mesh and a declaration can tell.
NEEDS_A_MESH = {"EP, plain experts"}


def _measured(way: str, planned: bool) -> dict[str, Any]:
    """Norms of every order, and then a clip: by a plan with a mesh, or by the drop-in and norms without one."""
    cut: Cut = WAYS[way][1]()
    options: dict[str, Any] = {"mesh": cut.mesh, "replicas": cut.replicas}
    of_norms = options if planned or way in NEEDS_A_MESH else {}
    norms, counts = [], set()
    for order in ORDERS:
        with CommDebugMode() as counted:
            norms.append(sonde.clip_grad_norm_(cut.parameters.items(), None, order, pp_mesh=cut.pp_mesh, **of_norms))
        counts.add(counted.get_total_counts() - cut.partial)
    if planned:
        plan = sonde.group_parameters_for_norm(cut.parameters.items(), pp_mesh=cut.pp_mesh, **options)
        norm = sonde.clip_grad_norm_distributed_(plan, 0.05, 2.0, cut.pp_mesh)
        with CommDebugMode() as counted:
            again = sonde.clip_grad_norm_distributed_(plan, None, 2.0, cut.pp_mesh)
    else:
        norm = sonde.clip_grad_norm_(cut.parameters.items(), 0.05, pp_mesh=cut.pp_mesh, **options)
        with CommDebugMode() as counted:  # partial gradients were written back: they are not reduced again
            again = sonde.clip_grad_norm_(cut.parameters.items(), None, pp_mesh=cut.pp_mesh, **options)
    # full_tensor is a collective. All ranks of a stage have the same parameters in the same order.
    clipped = {n: whole(p.grad) for n, p in cut.parameters.items() if p.grad is not None}
    is_cut = any(is_dtensor(p.grad) for p in cut.parameters.values())
    return {
        "norms": [float(norm) for norm in norms],
        "counts of norms": (counts, {1 if of_norms else cut.collectives}),
        "norm": float(norm),
        # What loops call on the norm that torch's function returns.
        "whole": float(norm.full_tensor()) if is_cut else float(norm),  # type: ignore[attr-defined]
        "again": float(again),
        "clipped": clipped,
        "counts": counted.get_total_counts(),
    }


@pytest.mark.parametrize("planned", [True, False])
@pytest.mark.parametrize(
    "way",
    [
        pytest.param("DDP", marks=pytest.mark.shows("norm and clip", "DDP")),
        pytest.param("FSDP2", marks=pytest.mark.shows("norm and clip", "FSDP2")),
        pytest.param("HSDP", marks=pytest.mark.shows("norm and clip", "HSDP")),
        pytest.param("FSDP2 over context parallelism", marks=pytest.mark.shows("norm and clip", "FSDP2 over CP")),
        pytest.param("TP, row-wise embedding", marks=pytest.mark.shows("norm and clip", "TP")),
        pytest.param("TP with sequence parallelism", marks=pytest.mark.shows("norm and clip", "SP")),
        pytest.param("FSDP2 over TP", marks=pytest.mark.shows("norm and clip", "FSDP2 over TP")),
        pytest.param("EP, experts as DTensors", marks=pytest.mark.shows("norm and clip", "EP")),
        pytest.param("PP", marks=pytest.mark.shows("norm and clip", "PP")),
        pytest.param("PP × FSDP2", marks=pytest.mark.shows("norm and clip", "PP with FSDP2")),
        pytest.param("PP × TP", marks=pytest.mark.shows("norm and clip", "PP with TP")),
        pytest.param("PP × FSDP2 × TP", marks=pytest.mark.shows("norm and clip", "PP with FSDP2 over TP")),
        *("FSDP2 on 4 ranks", "FSDP2, offloaded", "TP, column-wise embedding", "EP, plain experts"),
    ],
)
def test_norm_and_clip_are_those_of_one_process(ranks_for: Any, way: str, planned: bool) -> None:
    exact = expected_gradients(way)
    total = norm_of(exact, 2.0)
    assert total > 0.2  # so that clipping changes something
    seen: set[str] = set()
    results = ranks_for(way)(_measured, way, planned)
    for rank, result in enumerate(results):
        assert result["norms"] == results[0]["norms"]  # to the last bit
        assert result["norms"] == pytest.approx([norm_of(exact, order) for order in ORDERS], rel=1e-6)
        assert result["counts of norms"][0] == result["counts of norms"][1]
        assert result["norm"] == result["whole"] == pytest.approx(total, rel=1e-6)
        assert result["again"] == pytest.approx(0.05, rel=1e-4)  # torch adds 1e-6 to the norm, and so does sonde
        assert result["counts"] == 1
        for name, gradient in result["clipped"].items():
            reference = exact[name]
            if way == "EP, plain experts" and name == "back.experts.w":
                reference = reference[rank % 2 : rank % 2 + 1]  # this rank's expert alone
            torch.testing.assert_close(gradient.double(), reference * 0.05 / total, rtol=1e-4, atol=1e-8)
            seen.add(name)
    assert seen == set(exact)


def test_every_way_is_clipped() -> None:
    """The list above names each way, so a new one could be forgotten there."""
    marks = test_norm_and_clip_are_those_of_one_process.pytestmark  # type: ignore[attr-defined]
    (cases,) = (mark.args[1] for mark in marks if mark.args[0] == "way")
    assert {case if isinstance(case, str) else case.values[0] for case in cases} == set(WAYS)


def _extreme(value: float, dtype: torch.dtype, order: float) -> tuple[float, list[float]]:
    mesh, rank = mesh_of((2,)), dist.get_rank()
    local = torch.tensor([value if rank else 0.0, 0.0], dtype=dtype)
    p = placed(local, mesh, [Shard(0)], (4,))
    norm = sonde.clip_grad_norm_(p, 1.0, order, mesh=mesh)
    return float(norm), whole(p.grad).tolist()  # type: ignore[arg-type]


@pytest.mark.parametrize("order", [2.0, math.inf])
def test_a_nan_on_one_rank_is_seen_by_all(ranks2: Ranks, order: float) -> None:
    for norm, clipped in ranks2(_extreme, math.nan, torch.float32, order):
        assert math.isnan(norm)
        assert all(map(math.isnan, clipped))


def _nonfinite(nonfinite: str) -> tuple[str, list[float]]:
    cut = fsdp()
    if dist.get_rank() == 1:
        cut.parameters["back.up.weight"].grad.to_local()[0, 0] = math.inf  # type: ignore[union-attr]
    try:
        result = str(float(sonde.clip_grad_norm_(cut.parameters.items(), 1.0, mesh=cut.mesh, nonfinite=nonfinite)))
    except RuntimeError as error:
        result = str(error)
    head = cut.parameters["back.head.weight"].grad
    assert head is not None
    return result, whole(head).flatten()[:4].tolist()


def test_non_finite_gradients_are_named_on_the_rank_that_has_them(ranks2: Ranks) -> None:
    exact = exact_gradients()["back.head.weight"].flatten()[:4].tolist()
    (first, untouched), (second, _) = ranks2(_nonfinite, "raise")
    assert "not finite in back.up.weight" in second
    assert "gradients of another rank are not" in first
    assert untouched == pytest.approx(exact, rel=1e-5)


def test_non_finite_gradients_ignored_or_skipped(ranks2: Ranks) -> None:
    for result, head in ranks2(_nonfinite, "skip"):
        assert result == "inf"
        assert head == [0.0] * 4
    for result, head in ranks2(_nonfinite, "ignore"):
        assert result == "inf"
        assert head == [0.0] * 4  # as torch: everything times 1/inf


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


def _torchs_clip() -> dict[str, Any]:
    """What torch's clip does with such gradients: the reasons for sonde's."""
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


def test_guard_what_torchs_clip_does(ranks2: Ranks) -> None:
    """If this fails, torch has changed: correct the docstrings and docs/gradient-norm.md."""
    for outcomes in ranks2(_torchs_clip):
        assert outcomes["meshes"] == "RuntimeError"
        assert outcomes["plain"] == "RuntimeError"
        assert outcomes["tied"] == pytest.approx(math.sqrt(8))  # 2, if it counted once
        assert outcomes["partial"] >= 5
        assert not math.isnan(outcomes["nan"])
        assert outcomes["ours"] == pytest.approx([math.sqrt(4 + 2), math.sqrt(4 + 2)])
