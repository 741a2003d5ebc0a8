"""What measuring every window costs against parameter tensors and ranks: `python -m benchmarks.scaling`.

Each number comes from two models that train side by side in one process, one of them measured, in interleaved blocks:
see `timing.time_blocks`. The control compares training without a probe with itself.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from benchmarks import per_example
from benchmarks.contestants import ENTRIES, PLAIN, Entry
from benchmarks.device import add_option, count, stem
from benchmarks.gpt import GptShape, build
from benchmarks.launch import on_ranks
from benchmarks.machine import describe
from benchmarks.memory import peak_bytes
from benchmarks.timing import Cost, cost, time_blocks
from benchmarks.training import Setup

SHAPES = {
    75: GptShape(width=256, depth=6, heads=4, context=64),
    750: GptShape(width=80, depth=62, heads=4, context=64),
    7500: GptShape(width=24, depth=625, heads=4, context=64),
}
"""Models of about five million parameters each, by their number of tensors, roughly."""
QUICK_SHAPES = {75: GptShape(width=16, depth=6, heads=4, context=16), 150: GptShape(16, 12, 4, 16)}
RANKS = (1, 2, 4, 8)
OF_RANKS = GptShape(width=128, depth=4, heads=4, context=64)
CONTEXTS = (32, 128, 512)
"""Tokens in an example, for norms of each example."""
MEASURED = ("control", "sonde", "sonde-leaf")


@dataclass(frozen=True)
class Row:
    """One contestant in one set-up.

    Attributes:
        title: of the contestant.
        tensors: parameter tensors of the model.
        ranks: DDP processes; 1 trains without DDP.
        cost: time added to a window.
        extra_bytes: peak memory added to a process.
    """

    title: str
    tensors: int
    ranks: int
    cost: Cost
    extra_bytes: float


def timed(entry: Entry, setup: Setup, *, processes: int, blocks: int, start: Literal["spawn", "forkserver"]) -> Row:
    """One row: `processes` fresh ones, which have memory layouts of their own if they start by "spawn"."""
    rounds = [on_ranks(setup, _time, entry, blocks, k % 2 == 1, start=start)[0] for k in range(processes)]
    plain, with_it = (sum(on_ranks(setup, peak_bytes, e, 4)) for e in (PLAIN, entry))
    tensors = sum(1 for _ in build(setup.shape, torch.device("meta")).parameters())
    return Row(entry.title, tensors, setup.ranks, cost(rounds), (with_it - plain) / setup.ranks)


def _time(setup: Setup, entry: Entry, blocks: int, contestant_first: bool) -> list[tuple[float, float]]:
    return time_blocks(setup, entry, blocks, contestant_first=contestant_first)


def setups(device: str, *, quick: bool) -> Iterator[Setup]:
    """Against tensors in one process, then against ranks; as many ranks as there are devices, or processes on a CPU."""
    for shape in (QUICK_SHAPES if quick else SHAPES).values():
        yield Setup(ranks=1, threads=1, micro_batches=4, sequences=2, shape=shape, device=device)
    most = count(device) if device != "cpu" else 2 if quick else max(RANKS)
    for ranks in RANKS:
        if 1 < ranks <= most:
            shape = QUICK_SHAPES[75] if quick else OF_RANKS
            yield Setup(ranks=ranks, threads=1, micro_batches=2, sequences=2, shape=shape, device=device)


def measure(device: str, *, quick: bool) -> dict[str, list[Row]]:
    """Rows by the question that they answer."""
    effort: dict[str, Any] = {"processes": 3, "blocks": 6, "start": "spawn"}
    if quick:
        effort = {"processes": 1, "blocks": 1, "start": "forkserver"}
    rows: dict[str, list[Row]] = {"tensors": [], "ranks": []}
    for setup in setups(device, quick=quick):
        for name in MEASURED:
            entry = ENTRIES[name]
            if entry.ddp if setup.ranks > 1 else entry.alone:
                rows["ranks" if setup.ranks > 1 else "tensors"].append(timed(entry, setup, **effort))
    return rows


def examples(*, quick: bool) -> dict[int, Cost]:
    """What norms of each example add to a backward, by the tokens of an example; on the CPU."""
    contexts = CONTEXTS[:1] if quick else CONTEXTS
    small = {"width": 32, "depth": 1} if quick else {}
    return {c: per_example.run(per_example.Options(blocks=2 if quick else 20, context=c, **small))[1] for c in contexts}


def markdown(rows: dict[str, list[Row]], of_examples: dict[int, Cost], machine: dict[str, str], command: str) -> str:
    """The results as a page."""
    lines = ["# Cost of measuring every window, against tensors and ranks", ""]
    lines += [f"- {name}: {value}" for name, value in machine.items()] + [f"- command: `{command}`"]
    for question, answers in rows.items():
        lines += [
            "",
            f"## Against {question}",
            "",
            f"| {question} | contestant | time added to a window | peak memory |",
        ]
        lines += ["|---|---|---|---|"]
        for row in answers:
            n = row.tensors if question == "tensors" else row.ranks
            lines.append(f"| {n:,} | {row.title} | {_in_words(row.cost)} | {row.extra_bytes / 2**20:+.1f} MiB |")
    if of_examples:
        lines += [
            "",
            "## Norms of each example, in a window that reads them",
            "",
            "| tokens | time added to a backward |",
        ]
        lines += ["|---|---|", *(f"| {tokens} | {_in_words(c)} |" for tokens, c in of_examples.items())]
    return "\n".join(lines) + "\n"


def _in_words(cost: Cost) -> str:
    added = f"{1e3 * cost.seconds_added:+.2f} of {1e3 * cost.window_seconds:.1f} ms"
    return f"{cost.median:+.2%} [{cost.low:+.2%}, {cost.high:+.2%}], {added}"


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and write `scaling_<name of the device>.json` and `.md`."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scaling", description=__doc__)
    add_option(parser)
    parser.add_argument("--quick", action="store_true", help="a minute, to see that it works")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results", help="folder to write to")
    options = parser.parse_args(arguments)
    rows = measure(options.device, quick=options.quick)
    of_examples = examples(quick=options.quick) if options.device == "cpu" else {}
    machine = describe(options.device)
    command = f"python -m benchmarks.scaling --device {options.device}" + " --quick" * options.quick
    page = markdown(rows, of_examples, machine, command)
    options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / stem("scaling", options.device)
    as_json = {
        "machine": machine,
        "quick": options.quick,
        "rows": {question: [dataclasses.asdict(row) for row in answers] for question, answers in rows.items()},
        "examples": {tokens: dataclasses.asdict(c) for tokens, c in of_examples.items()},
    }
    path.with_suffix(".json").write_text(json.dumps(as_json, indent=1) + "\n")
    path.with_suffix(".md").write_text(page)
    print(page)


if __name__ == "__main__":
    main()
