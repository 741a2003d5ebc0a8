"""Study "cost": time that measuring every window adds, beside other estimators, by micro-batches, ranks and size.

Timings mean something on a quiet machine alone: `python -m evidence cost --jobs 1`, and nothing else meanwhile. By
default sonde measures so few windows that it adds 1 % or less; here it measures all, as the others do.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.contestants import ENTRIES, Entry
from benchmarks.gpt import GptShape
from benchmarks.launch import on_ranks
from benchmarks.machine import describe
from benchmarks.timing import Cost, cost, time_blocks
from benchmarks.training import Setup

from evidence.work import Arguments, Done, Study

SHAPES = {
    "0.1M": GptShape(width=64, depth=2, heads=4, context=64),
    "0.9M": GptShape(width=128, depth=4, heads=4, context=64),
    "4.9M": GptShape(width=256, depth=6, heads=4, context=64),
}
"""By their parameters."""
SEQUENCES = 2
"""Of 64 bytes, in a micro-batch: a hard case, since estimators do as much for a small one as for a large one."""
CUTS = [("0.9M", 1, 1), ("0.9M", 4, 1), ("0.9M", 16, 1), ("0.9M", 2, 2), ("0.9M", 2, 4), ("0.9M", 2, 8)]
CUTS += [("0.1M", 4, 1), ("4.9M", 4, 1)]
"""Shape, micro-batches of each rank, and ranks."""
CONTESTANTS = ("control", "sonde", "sonde-buckets", "sonde-examples", "snapshot", "fairscale", "adaptdl", "k-diffusion")
"""Of `benchmarks.contestants`. k-diffusion's is the classical communication hook."""


def run(
    contestant: str, shape: str, micro_batches: int, ranks: int, *, processes: int, blocks: int
) -> Mapping[str, Any]:
    """Time one contestant in one set-up, with one thread to a rank.

    Args:
        contestant: of `CONTESTANTS`.
        shape: of `SHAPES`.
        micro_batches: of each rank.
        ranks: of DDP; 1 for the plain model.
        processes: one after the other, each with its own memory layout.
        blocks: of four windows in each.

    Returns:
        Seconds of a window without and with the contestant, [processes, blocks, 2], and the machine; or the package
        that is missing.
    """
    entry = ENTRIES[contestant]
    if entry.missing:
        return {"missing": entry.package}
    setup = Setup(ranks, 1, micro_batches, SEQUENCES, SHAPES[shape])
    seconds = [on_ranks(setup, _time, entry, blocks, k % 2 == 1, start="spawn")[0] for k in range(processes)]
    return {"seconds": seconds, "cores": os.cpu_count(), "machine": describe("cpu")}


def _time(setup: Setup, entry: Entry, blocks: int, contestant_first: bool) -> list[tuple[float, float]]:
    return time_blocks(setup, entry, blocks, contestant_first=contestant_first)


def pieces(smoke: bool) -> Sequence[Arguments]:
    """Each contestant in each set-up in which it has something to measure."""
    cuts, names = ([("0.1M", 2, 2)], CONTESTANTS[:2]) if smoke else (CUTS, CONTESTANTS)
    return [
        {"contestant": name, "shape": shape, "micro_batches": micro_batches, "ranks": ranks}
        | ({"processes": 1, "blocks": 1} if smoke else {"processes": 3 if ranks == 1 else 1, "blocks": 8})
        for shape, micro_batches, ranks in cuts
        for name in names
        if _measures(name, micro_batches, ranks)
    ]


def _measures(name: str, micro_batches: int, ranks: int) -> bool:
    """By micro-batches or ranks, or where there is but one piece, by single examples."""
    if not (ENTRIES[name].ddp if ranks > 1 else ENTRIES[name].alone):
        return False
    has_pieces = micro_batches * ranks > 1
    return name == "control" or has_pieces != (name == "sonde-examples")


def costs(done: Sequence[Done]) -> dict[tuple[str, int, int], dict[str, Cost]]:
    """By set-up and contestant: the time added to a window."""
    found: dict[tuple[str, int, int], dict[str, Cost]] = {}
    for piece in done:
        name, shape, micro_batches, ranks = [*piece.arguments.values()][:4]
        if "missing" not in piece.result:
            found.setdefault((shape, micro_batches, ranks), {})[name] = cost(piece.result["seconds"])
    return found


def table(done: Sequence[Done]) -> str:
    """Per cent added to a window, with 95 % intervals; ranks that share cores are said to."""
    found, cores = costs(done), max((piece.result.get("cores", 0) for piece in done), default=0)
    names = [name for name in CONTESTANTS if any(name in row for row in found.values())]
    lines = ["| model, pieces | window | " + " | ".join(ENTRIES[name].title for name in names) + " |"]
    lines.append("|---" * (2 + len(names)) + "|")
    for (shape, micro_batches, ranks), row in found.items():
        shared = f" (share {cores} cores)" if ranks > cores else ""
        cells = [f"{shape}, {ranks} × {micro_batches}{shared}", f"{1e3 * row['control'].window_seconds:.0f} ms"]
        for name in names:
            each = row.get(name)
            cells.append(f"{each.median:+.1%} [{each.low:+.1%}, {each.high:+.1%}]" if each else "–")
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


STUDY = Study("cost", pieces, run)
