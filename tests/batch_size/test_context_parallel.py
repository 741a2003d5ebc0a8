"""The noise scale under context parallelism: a piece's gradient is the mean over the ranks that share its sequences."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.experimental import context_parallel

import sonde
from tests.batch_size.context_loops import Loop, build, cut, train, whole_mesh
from tests.batch_size.cut_models import assert_same_values
from tests.batch_size.sharded_loops import Loop as OtherLoop
from tests.batch_size.sharded_loops import build as build_other
from tests.batch_size.sharded_loops import shard
from tests.ranks import Ranks, mesh_of

LOOPS = {
    "CP2 × DP2, FSDP2 over both": (4, Loop()),
    "CP2 × DP2, weights, no clip": (4, Loop(weighted=True, clips=False)),
    "CP2 below HSDP": (4, Loop(cut="hsdp", weighted=True)),
    "CP2 × DP2, DDP over both": (4, Loop(cut="ddp")),
    "CP2": (2, Loop()),
    "CP2, pieces not declared": (2, Loop(declared=False)),
    "CP2 under DDP, no clip": (2, Loop(cut="ddp", clips=False)),
    "CP2, plain": (2, Loop(cut="plain")),
    "CP2, plain, weights, no clip": (2, Loop(cut="plain", weighted=True, clips=False)),
    "CP2 × DP2, plain, weights": (4, Loop(cut="plain", weighted=True)),
}
CHUNK = 1024
"""Elements of a chunk, the least: these loops ask for no staging area."""


def _values(loop: Loop) -> dict[str, Any]:
    return train(loop, values=True)


def assert_as_by_hand(results: list[dict[str, Any]], first: int = 0) -> None:
    for result in results:
        for window, exact in list(zip(result["windows"], result["by hand"], strict=True))[first:]:
            assert window is not None, result["reading"].dropped
            assert_same_values(window, exact, result["reading"].effective_units)
    assert len({str(result["windows"]) for result in results}) == 1


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("CP2 × DP2, FSDP2 over both", marks=pytest.mark.shows("noise scale", "FSDP2 over CP")),
        pytest.param("CP2 × DP2, DDP over both", marks=pytest.mark.shows("noise scale", "DDP over CP")),
        pytest.param("CP2, plain", marks=pytest.mark.shows("noise scale", "CP")),
        *(name for name in LOOPS if "over both" not in name and name != "CP2, plain"),
    ],
)
def test_values_are_those_of_one_process(request: pytest.FixtureRequest, name: str) -> None:
    n_ranks, loop = LOOPS[name]
    results = request.getfixturevalue(f"ranks{n_ranks}")(_values, loop)
    assert_as_by_hand(results)
    for result in results:
        assert result["alerts"] == {}
        assert result["setup"]["ranks"] == n_ranks // 2
        assert "over context parallelism" in result["setup"]["wrapper"]
        assert ("plain" in result["setup"]["wrapper"]) == (loop.cut == "plain")


def test_large_layers_that_are_defined_in_another_order_need_a_larger_staging_area(ranks2: Ranks) -> None:
    for result in ranks2(_values, Loop(in_order=False)):
        assert result["reading"].windows == 0
        assert "raise staging_mib, or define layers in the order of forward" in result["alerts"]["other_order"]
    assert_as_by_hand(ranks2(_values, Loop(in_order=False, options={})))


def chunks_of(loop: Loop, size: int) -> int:
    """How many chunks of a size hold the gradients, the last first, if only those that are longer are cut."""
    numels = [p.numel() for p in reversed(list(build(loop).parameters()))]
    pieces = [min(size, n - start) for n in numels for start in range(0, n, size)]
    n_chunks = room = 0
    for numel in pieces:
        if numel > room:
            n_chunks, room = n_chunks + 1, size
        room -= numel
    return n_chunks


def _trained(loop: Loop, probed: bool) -> dict[str, Any]:
    return train(loop, probed=probed)


@pytest.mark.parametrize("name", LOOPS)
def test_training_is_unchanged(request: pytest.FixtureRequest, name: str) -> None:
    """Bit for bit. Each piece takes one all-reduce a chunk and one more."""
    n_ranks, loop = LOOPS[name]
    ranks: Ranks = request.getfixturevalue(f"ranks{n_ranks}")
    n_chunks = chunks_of(loop, CHUNK)
    for with_probe, without in zip(ranks(_trained, loop, True), ranks(_trained, loop, False), strict=True):
        assert all(map(torch.equal, with_probe["weights"], without["weights"]))
        assert with_probe["norms"] == without["norms"]
        assert with_probe["reading"].windows == loop.windows
        n_more = with_probe["collectives"] - without["collectives"]
        assert n_more == loop.windows * 2 * (n_chunks + 1) + loop.windows * (not loop.clips)


TOO, SIGN = ("euclidean", "adam", "sign"), ("euclidean", "sign")
IN_OTHER_METRICS = {
    "CP2 × DP2, FSDP2 over both": (4, Loop(clips=False, options={"metric": SIGN})),
    "CP2 × DP2, in chunks": (4, Loop(weighted=True, options={"metric": SIGN, "staging_mib": 0.0})),
    "CP2 × DP2, DDP over both": (4, Loop(cut="ddp", options={"metric": TOO, "staging_mib": 0.0})),
    "CP2 under DDP, Adam alone": (2, Loop(cut="ddp", clips=False, options={"metric": "adam"})),
    "CP2, plain": (2, Loop(cut="plain", weighted=True, options={"metric": TOO, "staging_mib": 0.0})),
    "CP2, plain, sign alone": (2, Loop(cut="plain", options={"metric": "sign"})),
}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("CP2 × DP2, FSDP2 over both", marks=pytest.mark.shows("sign metric", "FSDP2 over CP")),
        pytest.param(
            "CP2 × DP2, DDP over both",
            marks=[pytest.mark.shows("adam metric", "DDP over CP"), pytest.mark.shows("sign metric", "DDP over CP")],
        ),
        pytest.param(
            "CP2, plain", marks=[pytest.mark.shows("adam metric", "CP"), pytest.mark.shows("sign metric", "CP")]
        ),
        *(name for name in IN_OTHER_METRICS if "over both" not in name and name != "CP2, plain"),
    ],
)
def test_other_metrics(request: pytest.FixtureRequest, name: str) -> None:
    """Values as of one process, training bit for bit, and no collective more."""
    n_ranks, loop = IN_OTHER_METRICS[name]
    ranks: Ranks = request.getfixturevalue(f"ranks{n_ranks}")
    plain, probed = ranks(_trained, loop, False), ranks(_trained, loop, True)
    chunk = max(int(loop.options.get("staging_mib", 8.0) * 2**20) // 4, CHUNK)
    n_chunks = chunks_of(loop, chunk)
    for result, with_probe, without in zip(ranks(_values, loop), probed, plain, strict=True):
        assert result["alerts"] == {}
        assert "adam" in result["further by hand"][1] or "adam" not in loop.options["metric"]
        for window, exact in zip(result["further"], result["further by hand"], strict=True):
            for metric, values in exact.items():
                assert window[metric] is not None, result["reading"].dropped
                assert_same_values(window[metric], values, result["reading"].effective_units)
        assert all(map(torch.equal, result["weights"], without["weights"]))
        assert with_probe["norms"] == without["norms"]
        n_more = with_probe["collectives"] - without["collectives"]
        assert n_more == loop.windows * (2 * (n_chunks + 1) + (not loop.clips))


def test_a_piece_with_two_backwards_is_refused(ranks2: Ranks) -> None:
    for result in ranks2(_trained, Loop(twice=True), True):
        assert result["reading"].windows == 0
        assert "add the losses and call backward once" in result["alerts"]["too_large_to_sum"]


def _under_torchs() -> dict[str, str]:
    model = nn.Linear(4, 4)
    probe = sonde.attach(model, unit="rows", verbose=False, process_group=torch.distributed.group.WORLD)
    x = torch.randn(2, 4, 4)
    with context_parallel(mesh_of((2,)), buffers=[x], buffer_seq_dims=[1]):
        for _ in range(2):
            with probe.piece(units=2):
                model(x).square().sum().backward()
    probe.step()
    probe.reading()
    alerts = dict(probe.alerts)
    probe.close()
    return alerts


def test_torchs_context_parallelism_is_noticed(ranks2: Ranks) -> None:
    """Without cp_mesh=, each rank's part of a sequence would count as a piece."""
    for alerts in ranks2(_under_torchs):
        assert "pass cp_mesh=" in alerts["context_parallel"]


def _named() -> list[dict[str, str]]:
    """Alerts at attach of a model of FSDP2 over an axis that is named after context parallelism."""
    found = []
    mesh = mesh_of((1, 2), ("dp", "dp_cp"))
    for arguments in ({}, {"mesh": mesh, "cp_mesh": mesh["dp_cp"]}, {"cp_mesh": mesh["dp"]}):
        model = fully_shard(nn.Linear(4, 4), mesh=mesh["dp_cp"])
        with sonde.attach(model, unit="rows", verbose=False, **arguments) as probe:  # type: ignore[arg-type]
            found.append(dict(probe.alerts))
    return found


def test_an_axis_named_after_context_parallelism_raises_an_alert(ranks2: Ranks) -> None:
    """An axis of one rank says that there is none."""
    for without, with_axis, with_axis_of_one in ranks2(_named):
        assert "'dp_cp'" in without["context_axis"]
        assert with_axis == with_axis_of_one == {}


def _refused() -> list[str]:
    messages = []
    mesh = whole_mesh(Loop())

    def raised(model: nn.Module, **arguments: Any) -> None:
        with pytest.raises(ValueError, match=r".+") as error:
            sonde.attach(model, unit="rows", **arguments)
        messages.append(str(error.value))

    raised(cut(Loop())[0], cp_mesh=mesh["cp"])
    raised(cut(Loop())[0], mesh=mesh, cp_mesh=mesh)
    raised(cut(Loop(cut="ddp"))[0], cp_mesh=mesh["cp"])
    raised(cut(Loop(cut="ddp"))[0], mesh=mesh, cp_mesh=mesh["cp"], tap="comm_hook")
    other = OtherLoop(cut="fsdp over tp")
    raised(shard(build_other(other), other), cp_mesh=mesh_of((2, 2), ("dp", "tp"))["dp"])
    return messages


def test_refusals(ranks4: Ranks) -> None:
    expected = [
        "cp_mesh= is no axis of the mesh of all ranks: pass mesh=",
        "cp_mesh must have 1 axis, got 2",
        "DDP averages over other ranks than those of mesh=",
        "tap='comm_hook' reads DDP's buckets",
        "context parallelism is measured alone and below FSDP2 or DDP",
    ]
    for messages in ranks4(_refused):
        for message, start in zip(messages, expected, strict=True):
            assert message.startswith(start)
