"""What sonde reads on the host while real ranks train: only what a CPU has at hand, where the device is a CPU.

A GPU is waited for by such reads. `test_host_reads.py` runs one process on a device that forbids them. Here each read
of a value is noted with the function of sonde that made it, over the set-ups that need several ranks.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import sonde
from tests.batch_size.cut_loops import attached, run_pieces
from tests.batch_size.cuts import OFFLOADED, made
from tests.batch_size.host_reads import AT_HAND, COPIES, OF_A_MESH, HostReads, nothing_at_hand
from tests.batch_size.set_ups import Loop
from tests.mutants import Mutant
from tests.ranks import Ranks

WATCHED = 2
"""Windows in which reads are noted; twice as many where not all windows are measured."""
WINDOWS_BEFORE = 15
"""There they come after these."""
METRICS = ("euclidean", "sign")  # the others need whole matrices or moments
EXAMPLES = {"per_example": "always"}

OF_TWO = {
    "DDP, leaf hooks": Loop("ddp"),
    "DDP, a hook of the user's": Loop("ddp", hook="bf16", clips=False),
    "DDP, a GradScaler": Loop("ddp", scaled=True),
    "DDP, further metrics": Loop("ddp", metric=(*METRICS, "adam", "spectral")),
    "DDP, one window in three": Loop("ddp", options={"every": 3}),
    "DDP, a budget": Loop("ddp", options={"every": None, "budget": 0.5}),
    "DDP, single examples": Loop("ddp", covered=True, options=EXAMPLES),
    "FSDP2": Loop(),
    "FSDP2, only windows": Loop(clips=False),
    "FSDP2, mixed precision": Loop(bf16="parameters"),
    "FSDP2, offloaded": Loop(fsdp=OFFLOADED),
    "FSDP2, further metrics": Loop(metric=METRICS),
    "FSDP2, one window in three": Loop(options={"every": 3}),
    "FSDP2, single examples": Loop(covered=True, options=EXAMPLES),
    "tensor parallelism": Loop("tp"),
    "sequence parallelism": Loop("sp", clips=False),
    "LoRA below FSDP2": Loop(adapters="hooks", head=False),
    "context parallelism under DDP": Loop("ddp over cp", clips=False),
    "a pipeline": Loop("pp"),
}
OF_FOUR = {
    "HSDP": Loop(mesh=(2, 2)),
    "HSDP, further metrics": Loop(mesh=(2, 2), clips=False, metric=METRICS),
    "FSDP2 over tensor parallelism": Loop("fsdp over tp"),
    "FSDP2 over sequence parallelism": Loop("fsdp over sp", clips=False),
    "FSDP2 over context parallelism": Loop("fsdp over cp", metric=METRICS, options={"staging_mib": 8.0}),
    "the same, in chunks": Loop("fsdp over cp"),
    "expert parallelism": Loop("ep fsdp"),
    "a pipeline over DDP": Loop("pp ddp", axes={"dp": 2}),
    "a pipeline over FSDP2": Loop("pp fsdp", axes={"dp": 2}),
}


def reads_of(name: str) -> set[str]:
    """Where sonde reads in a few windows of two pieces."""
    loop = (OF_TWO | OF_FOUR)[name]
    cut, reads = made(loop), HostReads()
    trained = [p for p in cut.model.parameters() if p.requires_grad]
    # It steps parameters of one kind in a few operators: each operator is looked at, and these are none of sonde's.
    are_alike = len({type(p) for p in trained}) == 1
    optimizer = torch.optim.AdamW(trained, lr=1e-2, foreach=are_alike)
    every = loop.options.get("every", 1)
    with attached(cut, optimizer, log=sonde.RunLog(every=2)) as probe:
        for window in watched(reads, every):
            run_pieces(cut, probe, window)
            cut.reduce()
            cut.scaler.unscale_(optimizer)
            probe.clip_grad_norm_(0.1) if loop.clips else probe.step()
            cut.scaler.step(optimizer)
            cut.scaler.update()
            optimizer.zero_grad()
        assert every is None or (probe.reading().windows == window + 1) == (every == 1)
    return reads.places


def watched(reads: HostReads, every: int | None) -> Iterator[int]:
    """Numbers of windows; in the last ones reads are noted."""
    before = 0 if every == 1 else WINDOWS_BEFORE
    yield from range(before)
    with reads:
        yield from range(before, before + (WATCHED if every == 1 else 2 * WATCHED))


def test_only_what_a_cpu_has_at_hand_is_read(ranks2: Ranks, ranks4: Ranks) -> None:
    seen: dict[str, str] = {}
    for ranks, names in ((ranks2, OF_TWO), (ranks4, OF_FOUR)):
        for name in names:
            seen |= dict.fromkeys(set().union(*ranks(reads_of, name)), name)
    assert {place: name for place, name in seen.items() if place not in AT_HAND} == {}
    assert sorted(AT_HAND - set(seen)) == []  # no place is allowed that is not needed


CLIPS = {
    2: [name for name in OF_TWO if name.endswith(("leaf hooks", "mixed precision", "tensor parallelism"))],
    4: ["HSDP", "FSDP2 over tensor parallelism", "a pipeline over FSDP2"],
}


def reads_of_a_gpu(name: str) -> set[str]:
    with nothing_at_hand():
        return reads_of(name)


@pytest.mark.parametrize(("n_ranks", "name"), [(n, name) for n, names in CLIPS.items() for name in names])
def test_a_clip_reads_nothing_of_a_gpu(request: pytest.FixtureRequest, n_ranks: int, name: str) -> None:
    for places in request.getfixturevalue(f"ranks{n_ranks}")(reads_of_a_gpu, name):
        assert places <= OF_A_MESH | COPIES


WAITS = Mutant(
    "reads the norm of a GPU", "sonde.gradient_norm.scaling:_coefficient", "if is_at_hand(exact.device):", "if True:"
)


def clip_that_waits() -> set[str]:
    with nothing_at_hand(), WAITS.applied():
        return reads_of("FSDP2")


def test_a_clip_that_waits_is_noticed(ranks2: Ranks) -> None:
    for places in ranks2(clip_that_waits):
        assert places - OF_A_MESH - COPIES == {"gradient_norm/scaling.py:_coefficient"}


READS = [
    Mutant(
        "a copy to the host",
        "sonde.batch_size.arrivals:Delivery.send",
        "start_copy_to_host(flat)",
        "start_copy_to_host(flat.cpu())",
    ),
    Mutant(
        "shards",
        "sonde.batch_size.taps.window_reader:FinalGradient.witness",
        "elements: dict[int, Tensor] = {}",
        "elements = {}; [g.to_local().any().item() for g in grads]",
    ),
    Mutant(
        "single examples",
        "sonde.batch_size.per_example.example_window:ExampleWindow.end_piece",
        "self._n_pieces += 1",
        "self._n_pieces += 1; float(self._sq_weight)",
    ),
    Mutant(
        "shared sequences",
        "sonde.batch_size.taps.shared_pieces:ContextPiece._sum_next",
        "self._next += 1",
        "self._next += 1; float(buffer.sum())",
    ),
    Mutant(
        "experts",
        "sonde.batch_size.taps.shared_pieces:ExpertPieces.add",
        "self._squares.append(squares)",
        "self._squares.append(squares); bool(squares.any())",
    ),
]
BROKEN = {
    "a copy to the host": "DDP, leaf hooks",
    "shards": "FSDP2",
    "single examples": "FSDP2, single examples",
    "shared sequences": "context parallelism under DDP",
    "experts": "expert parallelism",
}


def mutated(mutant: Mutant) -> set[str]:
    with mutant.applied():
        return reads_of(BROKEN[mutant.name])


@pytest.mark.parametrize("mutant", READS, ids=lambda mutant: mutant.name)
def test_a_read_is_noticed(request: pytest.FixtureRequest, mutant: Mutant) -> None:
    for places in request.getfixturevalue("ranks4" if mutant.name == "experts" else "ranks2")(mutated, mutant):
        assert not places <= AT_HAND
