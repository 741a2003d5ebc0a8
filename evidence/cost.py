"""Study "cost": time that measuring every window adds, beside other estimators, by micro-batches, ranks and size.

Timings mean something on a quiet machine alone: `python -m evidence cost`, and nothing else meanwhile. By default sonde
measures so few windows that it adds 1 % or less; here it measures all, as the others do.
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

from evidence.work import Arguments, Done, Store, Study

SHAPES = {
    "0.1M": GptShape(width=64, depth=2, heads=4, context=64),
    "0.9M": GptShape(width=128, depth=4, heads=4, context=64),
    "4.9M": GptShape(width=256, depth=6, heads=4, context=64),
}
"""By their parameters."""
MIDDLE = "0.9M"
SEQUENCES = 2
"""Of 64 bytes, in a micro-batch: a hard case, since estimators do as much for a small one as for a large one."""
CUTS = [(MIDDLE, 1, 1), (MIDDLE, 4, 1), (MIDDLE, 16, 1), (MIDDLE, 2, 2), (MIDDLE, 2, 4), (MIDDLE, 2, 8)]
CUTS += [("0.1M", 4, 1), ("4.9M", 4, 1)]
"""Shape, micro-batches of each rank, and ranks."""
CONTESTANTS = ("control", "sonde", "sonde-examples", "snapshot", "fairscale", "adaptdl", "k-diffusion")
"""Of `benchmarks.contestants`. k-diffusion's is the classical communication hook."""
COLORS = ("#777777", "#d55e00", "#e69f00", "#cc79a7", "#0072b2", "#009e73", "#56b4e9", "#000000")


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
    cuts, names = ([("0.1M", 2, 1)], CONTESTANTS[1:2]) if smoke else (CUTS, CONTESTANTS)
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


def added_time(store: Store) -> list[list[str]]:
    """Part of a window's time that is added, with 95 % intervals; it is said where ranks share cores."""
    done = store.read("cost")
    found, cores = costs(done), max((piece.result.get("cores", 0) for piece in done), default=0)
    names = [name for name in CONTESTANTS if any(name in row for row in found.values())]
    rows = [["model, ranks × micro-batches", "a window", *(ENTRIES[name].title for name in names)]]
    for (shape, micro_batches, ranks), row in found.items():
        shared = f", on {cores} cores" if ranks > cores else ""
        known = [row.get(name) for name in names]
        cells = [f"{each.median:+.1%} [{each.low:+.1%}, {each.high:+.1%}]" if each else "–" for each in known]
        window = f"{1e3 * next(iter(row.values())).window_seconds:.0f} ms"
        rows.append([f"{shape}, {ranks} × {micro_batches}{shared}", window, *cells])
    return rows


def plot(store: Store) -> Any:
    """Time of a window over that without a probe, by set-up, with 95 % intervals."""
    from bokeh.models import FactorRange
    from bokeh.plotting import figure
    from bokeh.transform import dodge

    found = costs(store.read("cost"))
    places = {setup: _place(*setup) for setup in found}
    plot = figure(
        title="Time of a window over that without a probe",
        x_range=FactorRange(factors=sorted(set(places.values()))),
        y_axis_type="log",
        width=1100,
        height=420,
        toolbar_location=None,
    )
    names = [name for name in CONTESTANTS if any(name in row for row in found.values())]
    for k, name in enumerate(names):
        known = {places[setup]: row[name] for setup, row in found.items() if name in row}
        source = {
            "x": [*known],
            "middle": [1 + each.median for each in known.values()],
            "low": [1 + each.low for each in known.values()],
            "high": [1 + each.high for each in known.values()],
        }
        x = dodge("x", 0.8 * ((k + 0.5) / len(names) - 0.5), range=plot.x_range)
        plot.segment(x, "low", x, "high", source=source, color=COLORS[k], line_width=2)
        plot.scatter(x, "middle", source=source, color=COLORS[k], size=7, legend_label=ENTRIES[name].title)
    plot.add_layout(plot.legend[0], "right")
    return plot


def _place(shape: str, micro_batches: int, ranks: int) -> tuple[str, str]:
    if ranks > 1:
        return "by ranks, of 2 micro-batches", str(ranks)
    return ("by micro-batches", f"{micro_batches:2}") if shape == MIDDLE else ("by parameters, 4 micro-batches", shape)


STUDY = Study("cost", pieces, run, is_timed=True)
