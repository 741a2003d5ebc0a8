"""One window, whatever the set-up, the metric and the source: the numbers of one process, and training unchanged.

Each case trains a small model with a probe and without. Every window's tr Σ and |G|², of the whole model and of each
group, are those of the definitions in float64. Weights and norms are bit for bit those without a probe, and a window
takes as many collectives more as `cut_loops.more_collectives` says.
"""

from __future__ import annotations

import pytest

from tests.batch_size.cut_loops import check
from tests.batch_size.cuts import OFFLOADED
from tests.batch_size.set_ups import UNITS, Loop
from tests.ranks import Ranks

SIGN, SUMS, EVERY = ("euclidean", "sign"), ("euclidean", "adam"), ("euclidean", "adam", "sign", "spectral")
THREE = ("euclidean", "adam", "sign")
EXAMPLES = {"per_example": "always"}
VIEWS, SMALL = {"gradient_as_bucket_view": True}, {"bucket_cap_mb": 0.0001}
IN_LOOP, IN_V = ((0, 2), (1, 3)), ((0, 3), (1, 2))

CASES: dict[str, tuple[int, Loop]] = {
    # One process, in float64.
    "one process": (1, Loop("one process", exact=True, weighted=True, metric=EVERY, windows=3)),
    "one process, clipped by torch": (1, Loop("one process", exact=True, clips="torch", metric=EVERY, windows=3)),
    "one process, sign and Adam": (1, Loop("one process", exact=True, clips=False, metric=("sign", "adam"), windows=3)),
    "one process, a GradScaler": (1, Loop("one process", exact=True, scaled=True, metric=EVERY, windows=3)),
    "one process, examples, a GradScaler": (
        1,
        Loop("one process", exact=True, covered=True, scaled=True, options=EXAMPLES, n_pieces=1),
    ),
    "one process, examples": (1, Loop("one process", exact=True, covered=True, options=EXAMPLES, n_pieces=1)),
    "one process, examples, clipped by torch": (
        1,
        Loop("one process", exact=True, covered=True, weighted=True, clips="torch", options=EXAMPLES),
    ),
    # DDP.
    "DDP, exact": (2, Loop("ddp", exact=True, metric=EVERY, clips="torch", windows=3)),
    "DDP": (2, Loop("ddp", weighted=True, metric=EVERY, optimizer="two groups", windows=3)),
    "DDP, every piece reduces, no clip": (2, Loop("ddp", sync="every", clips=False)),
    "DDP, one piece": (2, Loop("ddp", n_pieces=1)),
    "DDP, summed": (2, Loop("ddp", summed=True, clips=False)),
    "DDP, bf16 hook": (2, Loop("ddp", hook="bf16", clips=False)),
    "DDP, views of buckets": (2, Loop("ddp", ddp=VIEWS)),
    "DDP, a static graph": (2, Loop("ddp", ddp={"static_graph": True}, sync="every", late=1)),
    "DDP, small buckets, 3 ranks": (3, Loop("ddp", ddp=SMALL)),
    "DDP, unused parameters": (2, Loop("ddp", ddp={"find_unused_parameters": True}, sync="every")),
    "DDP, Adam's metric alone": (2, Loop("ddp", metric=("adam",), optimizer="amsgrad", windows=3)),
    "DDP, attached late": (2, Loop("ddp", metric=EVERY, late=1)),
    "DDP, examples": (2, Loop("ddp", covered=True, options=EXAMPLES)),
    "DDP, examples, 3 ranks, no clip": (3, Loop("ddp", covered=True, clips=False, weighted=True, options=EXAMPLES)),
    # A plain model, whose gradients the loop reduces.
    "plain, examples, a rank without data": (3, Loop("plain", covered=True, idle=1, clips=False, options=EXAMPLES)),
    "plain, averaged by the loop": (2, Loop("plain", clips=False)),
    "plain, summed by the loop": (2, Loop("plain", summed=True, clips=False)),
    # FSDP2 and HSDP.
    "FSDP2, exact": (2, Loop(exact=True, metric=SIGN, weighted=True, sync="every")),
    "FSDP2, examples, exact": (2, Loop(exact=True, covered=True, clips=False, options=EXAMPLES)),
    "FSDP2": (2, Loop(metric=SIGN, weighted=True, clips=False)),
    "FSDP2, reshard after forward, every piece reduces": (
        2,
        Loop(metric=SIGN, fsdp={"reshard_after_forward": True}, sync="every", optimizer="fused"),
    ),
    "FSDP2, no reshard": (2, Loop(fsdp={"reshard_after_forward": False})),
    "FSDP2, sign alone, frozen": (2, Loop(metric=("sign",), frozen=True)),
    "FSDP2, bf16 parameters": (2, Loop(bf16="parameters")),
    "FSDP2, bf16 parameters, every piece reduces, no clip": (2, Loop(bf16="parameters", sync="every", clips=False)),
    "FSDP2, offloaded, checkpointed": (2, Loop(metric=SIGN, fsdp=OFFLOADED, checkpoints=True)),
    "FSDP2, offloaded, no clip": (2, Loop(fsdp=OFFLOADED, clips=False)),
    "FSDP2, tied": (2, Loop(tied=True)),
    "FSDP2, compiled blocks": (2, Loop(compiled=True)),
    "FSDP2, late, evaluated": (2, Loop(late=2, evaluates="before")),
    "FSDP2, several forwards": (2, Loop(metric=SIGN, forwards=2)),
    "FSDP2, a group for each parameter": (2, Loop(options={"groups": "parameters"})),
    "FSDP2, the head alone": (2, Loop(part="head")),
    "FSDP2, the head alone, evaluated": (2, Loop(part="head", evaluates="before")),
    "FSDP2, 3 ranks": (3, Loop(metric=SIGN, clips=False, sync="every")),
    "FSDP2, examples": (2, Loop(covered=True, options=EXAMPLES)),
    "FSDP2, examples, every piece reduces, weights": (
        2,
        Loop(
            covered=True,
            clips=False,
            sync="every",
            fsdp={"reshard_after_forward": True},
            weighted=True,
            options=EXAMPLES,
        ),
    ),
    "FSDP2, examples, tied, checkpointed, evaluated": (
        2,
        Loop(covered=True, checkpoints=True, tied=True, evaluates="before", options=EXAMPLES),
    ),
    "FSDP2, examples, offloaded, frozen, late": (
        2,
        Loop(covered=True, fsdp=OFFLOADED, frozen=True, late=2, options=EXAMPLES),
    ),
    "FSDP2, parts after a forward": (4, Loop(fsdp={"reshard_after_forward": 2}, evaluates="end")),
    "FSDP2, parts after a forward, no clip": (4, Loop(fsdp={"reshard_after_forward": 2}, sync="every", clips=False)),
    "HSDP": (4, Loop(mesh=(2, 2), metric=SIGN, clips=False)),
    "HSDP, bf16 parameters, every piece reduces": (4, Loop(mesh=(2, 2), bf16="parameters", sync="every")),
    "HSDP, examples": (4, Loop(mesh=(2, 2), covered=True, weighted=True, options=EXAMPLES)),
    # Random numbers of forward stay the same.
    "FSDP2, dropout": (2, Loop(dropout=True, windows=6)),
    "FSDP2, dropout, checkpointed, bf16": (2, Loop(dropout=True, windows=6, checkpoints=True, bf16="parameters")),
    # Tensor and sequence parallelism.
    "TP": (2, Loop("tp", metric=SUMS, optimizer="NAdam", clips=False, windows=3)),
    "TP, Adam's metric alone": (2, Loop("tp", metric=("adam",), weighted=True, optimizer="RAdam", windows=3)),
    "SP": (2, Loop("sp", metric=SUMS, windows=3)),
    "SP, no clip": (2, Loop("sp", clips=False, weighted=True)),
    "FSDP2 over TP": (4, Loop("fsdp over tp")),
    "FSDP2 over TP, no clip": (4, Loop("fsdp over tp", clips=False, weighted=True)),
    "FSDP2 over SP": (4, Loop("fsdp over sp")),
    "FSDP2 over SP, every piece reduces, no clip": (4, Loop("fsdp over sp", sync="every", clips=False, weighted=True)),
    # Low-rank adapters.
    "LoRA, sharded": (2, Loop(adapters="sharded")),
    "LoRA, HSDP, no clip": (4, Loop(adapters="sharded", mesh=(2, 2), clips=False, weighted=True)),
    "LoRA, hooks": (2, Loop(adapters="hooks", weighted=True, optimizer="one by one")),
    "LoRA, HSDP, hooks": (4, Loop(adapters="hooks", mesh=(2, 2), weighted=True, optimizer="one by one")),
    "LoRA, averaged by the loop": (
        2,
        Loop(adapters="loop", head=False, weighted=True, metric=("adam",), optimizer="one by one", windows=3),
    ),
    "LoRA alone, hooks": (
        2,
        Loop(adapters="hooks", head=False, clips=False, metric=SUMS, optimizer="one by one", windows=3),
    ),
    "LoRA alone, FSDP2 over TP": (
        4,
        Loop(
            "fsdp over tp", adapters="hooks", head=False, weighted=True, metric=SUMS, optimizer="one by one", windows=3
        ),
    ),
    # Context parallelism.
    "CP": (2, Loop("plain over cp", weighted=True, metric=THREE, windows=3)),
    "CP, plain over both halves of the data": (4, Loop("plain over cp", clips=False)),
    "DDP over CP": (4, Loop("ddp over cp", metric=THREE, windows=3)),
    "DDP over CP of all ranks, Adam's metric alone": (2, Loop("ddp over cp", clips=False, metric=("adam",), windows=3)),
    "FSDP2 over CP": (4, Loop("fsdp over cp", weighted=True, clips=False, metric=SIGN)),
    "FSDP2 over CP of all ranks, pieces not declared": (2, Loop("fsdp over cp", declared=False)),
    "HSDP over CP": (4, Loop("hsdp over cp", weighted=True)),
    # Expert parallelism.
    "EP": (4, Loop("ep fsdp")),
    "EP, weights, no clip": (4, Loop("ep fsdp", weighted=True, clips=False)),
    "EP, divided otherwise, pieces not declared": (4, Loop("ep fsdp", averaged=False, declared=False)),
    "EP over all ranks": (4, Loop("ep fsdp", n_feeding=4, weighted=True)),
    "EP over all ranks, divided otherwise, no clip": (4, Loop("ep fsdp", n_feeding=4, averaged=False, clips=False)),
    "EP beside FSDP2 over TP": (4, Loop("ep fsdp over tp", n_feeding=4, weighted=True)),
    "EP beside FSDP2 over TP, divided otherwise, no clip": (
        4,
        Loop("ep fsdp over tp", n_feeding=4, averaged=False, clips=False),
    ),
    "EP beside plain": (4, Loop("ep plain", averaged=False, clips=False, metric=SUMS, windows=3)),
    "EP over all ranks beside plain": (4, Loop("ep plain", n_feeding=4, weighted=True, metric=SUMS, windows=3)),
    "EP beside plain, Adam's metric alone": (4, Loop("ep plain", weighted=True, metric=("adam",), windows=3)),
    "experts on one rank": (4, Loop("ep fsdp", n_feeding=1, weighted=True)),
    "experts on one rank, plain": (4, Loop("ep plain", n_feeding=1, clips=False)),
    # Pipelines.
    "PP": (2, Loop("pp", schedule="ScheduleGPipe", weighted=True, metric=SUMS, windows=3)),
    "PP, 1F1B": (2, Loop("pp", clips=False)),
    "PP, interleaved": (2, Loop("pp", schedule="ScheduleInterleaved1F1B", looped=IN_LOOP, weighted=True)),
    "PP, looped": (2, Loop("pp", schedule="ScheduleLoopedBFS", looped=IN_LOOP, clips=False)),
    "PP, zero bubble": (
        2,
        Loop(
            "pp", schedule="ScheduleInterleavedZeroBubble", looped=IN_LOOP, weighted=True, metric=("adam",), windows=3
        ),
    ),
    "PP, zero bubble in a V": (
        2,
        Loop("pp", schedule="ScheduleZBVZeroBubble", looped=IN_V, clips=False, weighted=True),
    ),
    "PP, DualPipeV": (2, Loop("pp", schedule="ScheduleDualPipeV", looped=IN_V, weighted=True)),
    "PP with DDP": (4, Loop("pp ddp", axes={"dp": 2}, weighted=True, metric=SUMS, windows=3)),
    "PP with DDP, no clip": (4, Loop("pp ddp", axes={"dp": 2}, clips=False)),
    "PP with DDP, a rank without data": (4, Loop("pp ddp", axes={"dp": 2}, weighted=True, idle=1)),
    "PP with FSDP2, a rank without data": (4, Loop("pp fsdp", axes={"dp": 2}, weighted=True, idle=1, clips=False)),
    "PP with FSDP2": (4, Loop("pp fsdp", axes={"dp": 2}, weighted=True)),
    "PP with FSDP2, interleaved, no clip": (
        4,
        Loop("pp fsdp", schedule="ScheduleInterleaved1F1B", looped=IN_LOOP, axes={"dp": 2}, clips=False),
    ),
    "PP with TP": (4, Loop("pp tp", axes={"tp": 2}, clips=False, metric=SUMS, windows=3)),
    "PP with SP": (4, Loop("pp sp", axes={"tp": 2}, weighted=True, metric=SUMS, windows=3)),
    "PP with SP, no clip": (4, Loop("pp sp", axes={"tp": 2}, clips=False)),
    "PP with HSDP": (8, Loop("pp fsdp", axes={"dp": 4, "replicate": 2}, weighted=True)),
    "PP with FSDP2 over TP": (8, Loop("pp fsdp over tp", axes={"dp": 2, "tp": 2}, weighted=True)),
}
SHOWN = (
    *("one process", "one process, examples", "DDP", "DDP, examples", "FSDP2", "FSDP2, examples", "HSDP", "TP", "SP"),
    *("HSDP, examples", "FSDP2 over TP", "FSDP2 over SP", "LoRA, hooks", "LoRA alone, hooks", "CP", "DDP over CP"),
    *("FSDP2 over CP", "EP", "EP over all ranks beside plain", "PP", "PP with DDP", "PP with FSDP2", "PP with TP"),
    *("PP with SP", "PP with HSDP", "PP with FSDP2 over TP"),
)
"""Cases with a cell of their own in docs/where-it-works.md."""


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(
            "one process",
            marks=pytest.mark.shows(("noise scale", "adam metric", "sign metric", "spectral metric"), "one process"),
        ),
        pytest.param(
            "DDP", marks=pytest.mark.shows(("noise scale", "adam metric", "sign metric", "spectral metric"), "DDP")
        ),
        pytest.param("one process, examples", marks=pytest.mark.shows("single examples", "one process")),
        pytest.param("DDP, examples", marks=pytest.mark.shows("single examples", "DDP")),
        pytest.param("FSDP2", marks=pytest.mark.shows(("noise scale", "sign metric"), "FSDP2")),
        pytest.param("FSDP2, examples", marks=pytest.mark.shows("single examples", "FSDP2")),
        pytest.param("HSDP", marks=pytest.mark.shows(("noise scale", "sign metric"), "HSDP")),
        pytest.param("HSDP, examples", marks=pytest.mark.shows("single examples", "HSDP")),
        pytest.param("TP", marks=pytest.mark.shows(("noise scale", "adam metric"), "TP")),
        pytest.param("SP", marks=pytest.mark.shows(("noise scale", "adam metric"), "SP")),
        pytest.param("FSDP2 over TP", marks=pytest.mark.shows("noise scale", "FSDP2 over TP")),
        pytest.param("FSDP2 over SP", marks=pytest.mark.shows("noise scale", "FSDP2 over SP")),
        pytest.param("LoRA, hooks", marks=pytest.mark.shows("noise scale", "LoRA below FSDP2")),
        pytest.param("LoRA alone, hooks", marks=pytest.mark.shows("adam metric", "LoRA below FSDP2")),
        pytest.param("CP", marks=pytest.mark.shows(("noise scale", "adam metric", "sign metric"), "CP")),
        pytest.param(
            "DDP over CP", marks=pytest.mark.shows(("noise scale", "adam metric", "sign metric"), "DDP over CP")
        ),
        pytest.param("FSDP2 over CP", marks=pytest.mark.shows(("noise scale", "sign metric"), "FSDP2 over CP")),
        pytest.param("EP", marks=pytest.mark.shows("noise scale", "EP")),
        pytest.param("EP over all ranks beside plain", marks=pytest.mark.shows("adam metric", "EP")),
        pytest.param("PP", marks=pytest.mark.shows(("noise scale", "adam metric"), "PP")),
        pytest.param("PP with DDP", marks=pytest.mark.shows(("noise scale", "adam metric"), "PP with DDP")),
        pytest.param("PP with FSDP2", marks=pytest.mark.shows("noise scale", "PP with FSDP2")),
        pytest.param("PP with TP", marks=pytest.mark.shows(("noise scale", "adam metric"), "PP with TP")),
        pytest.param("PP with SP", marks=pytest.mark.shows(("noise scale", "adam metric"), "PP with SP")),
        pytest.param("PP with HSDP", marks=pytest.mark.shows("noise scale", "PP with HSDP")),
        pytest.param("PP with FSDP2 over TP", marks=pytest.mark.shows("noise scale", "PP with FSDP2 over TP")),
        *(name for name in CASES if name not in SHOWN),
    ],
)
def test_a_window_is_that_of_one_process_and_training_is_unchanged(request: pytest.FixtureRequest, name: str) -> None:
    n_ranks, loop = CASES[name]
    for result in check(request.getfixturevalue(f"ranks{n_ranks}") if n_ranks > 1 else None, loop):
        ranks_with_data = n_ranks // (2 * loop.axes.get("tp", 1)) if loop.has("pp") else n_ranks
        assert result["setup"]["ranks"] == ranks_with_data // (1 + loop.has("tp", "sp", "cp") * (not loop.has("pp")))
        assert ("experts over" in result["setup"]["wrapper"]) == (loop.has("ep") and loop.n_feeding > 1)
        assert ("over context parallelism" in result["setup"]["wrapper"]) == loop.has("cp")
        assert result["tap"].startswith("leaf hooks")
        if loop.options is EXAMPLES:
            assert result["reading"].u == 1.0
            of_ranks = [units for rank, units in enumerate(UNITS[:n_ranks]) if rank != loop.idle]
            sizes = [n for units in of_ranks for n in units[: loop.n_pieces]]
            n_effective = sum(sizes) if loop.weighted else len(sizes) ** 2 / sum(1 / n for n in sizes)
            assert result["reading"].effective_units == pytest.approx(n_effective)


PEFT: dict[str, tuple[int, Loop]] = {
    "LoRA": (1, Loop("one process", adapters="whole", peft=True, metric=SUMS, windows=3)),
    "LoRA, Adam's metric alone": (
        1,
        Loop(
            "one process",
            adapters="whole",
            peft=True,
            head=False,
            clips=False,
            weighted=True,
            metric=("adam",),
            windows=3,
        ),
    ),
    "LoRA below DDP": (2, Loop("ddp", adapters="whole", peft=True, weighted=True, metric=SUMS, windows=3)),
    "LoRA below FSDP2": (2, Loop(adapters="sharded", peft=True, head=False, clips=False)),
    "LoRA made after sharding": (
        2,
        Loop(adapters="hooks", peft=True, head=False, weighted=True, metric=SUMS, optimizer="one by one", windows=3),
    ),
}


@pytest.mark.slow  # importing PEFT takes seconds on every rank
@pytest.mark.parametrize(
    "name",
    [
        pytest.param("LoRA", marks=pytest.mark.shows(("noise scale", "adam metric"), "LoRA")),
        pytest.param("LoRA below DDP", marks=pytest.mark.shows(("noise scale", "adam metric"), "LoRA below DDP")),
        *(name for name in PEFT if name not in ("LoRA", "LoRA below DDP")),
    ],
)
def test_adapters_of_peft(request: pytest.FixtureRequest, name: str) -> None:
    n_ranks, loop = PEFT[name]
    ranks: Ranks | None = request.getfixturevalue(f"ranks{n_ranks}") if n_ranks > 1 else None
    check(ranks, loop)
