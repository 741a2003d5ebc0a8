"""What measuring every window costs against tensors, ranks, cuts, metrics and the length of an example.

    python -m benchmarks.scaling [--device cuda] [--quick]

Each number comes from two models that train side by side in one process, one of them measured, in interleaved blocks:
see `timing.time_blocks`. The control compares training without a probe with itself.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import torch

from benchmarks.contestants import ENTRIES, PLAIN, Entry, Sonde
from benchmarks.device import add_option, count, stem
from benchmarks.gpt import GptShape, build
from benchmarks.launch import on_ranks
from benchmarks.machine import describe
from benchmarks.memory import peak_bytes
from benchmarks.timing import Cost, cost, in_words, time_blocks
from benchmarks.training import Cut, Setup

SHAPES = {
    75: GptShape(width=256, depth=6, heads=4, context=64),
    750: GptShape(width=80, depth=62, heads=4, context=64),
    7500: GptShape(width=24, depth=625, heads=4, context=64),
}
"""Models of about five million parameters each, by their number of tensors, roughly."""
QUICK_SHAPES = {28: GptShape(width=16, depth=2, heads=4, context=16), 52: GptShape(16, 4, 4, 16)}
RANKS = (1, 2, 4, 8)
OF_RANKS = GptShape(width=128, depth=4, heads=4, context=64)
OF_METRICS = GptShape(width=256, depth=4, heads=4, context=128)
METRICS: tuple[tuple[str, ...], ...] = (
    ("euclidean",),
    ("adam",),
    ("euclidean", "adam"),
    ("euclidean", "sign"),
    ("euclidean", "spectral"),
    ("euclidean", "adam", "sign", "spectral"),
)
CUTS_OF_TWO: tuple[Cut, ...] = ("FSDP2", "TP", "CP", "PP")
CONTEXTS = (32, 128, 512)
"""Tokens in an example, of windows that are one piece and read by single examples."""
MEASURED = ("control", "sonde", "sonde-examples")


@dataclass(frozen=True)
class Row:
    """One contestant in one set-up.

    Attributes:
        title: of the contestant.
        tensors: parameter tensors of the model.
        ranks: processes; 1 trains the plain model.
        tokens: in an example.
        cut: of the model over ranks.
        metric: of the noise scale, or several; the plain one is "euclidean".
        cost: time added to a window.
        extra_bytes: peak memory added to a process.
    """

    title: str
    tensors: int
    ranks: int
    tokens: int
    cut: str
    metric: str
    cost: Cost
    extra_bytes: float


def timed(entry: Entry, setup: Setup, *, processes: int, blocks: int, start: Literal["spawn", "forkserver"]) -> Row:
    """One row: `processes` fresh ones, each with its own memory layout if it is spawned."""
    rounds = [on_ranks(setup, _time, entry, blocks, k % 2 == 1, start=start)[0] for k in range(processes)]
    plain, with_it = (_peak_bytes(setup, e) for e in (PLAIN, entry))
    tensors = sum(1 for _ in build(setup.shape, torch.device("cpu")).parameters())
    added = (with_it - plain) / setup.ranks
    metric = _metrics_of(entry)
    return Row(entry.title, tensors, setup.ranks, setup.shape.context, setup.cut, metric, cost(rounds), added)


def _metrics_of(entry: Entry) -> str:
    return (
        ", ".join(entry.make.keywords.get("metric", METRICS[0])) if isinstance(entry.make, partial) else METRICS[0][0]
    )


@functools.cache
def _peak_bytes(setup: Setup, entry: Entry) -> int:
    """Of all ranks together. Without a probe it is measured once for each set-up: such peaks repeat to 0.1 MiB."""
    return sum(on_ranks(setup, peak_bytes, entry, 4))


def _time(setup: Setup, entry: Entry, blocks: int, contestant_first: bool) -> list[tuple[float, float]]:
    return time_blocks(setup, entry, blocks, contestant_first=contestant_first)


def questions(device: str, *, quick: bool) -> Iterator[tuple[str, Setup, Entry]]:
    """What is measured, by the question that it answers; as many ranks as there are devices, or processes on a CPU.

    Args:
        device: its type.
        quick: tiny models, and the control once.
    """

    def alone(shape: GptShape, micro_batches: int, sequences: int) -> Setup:
        return Setup(1, 1, micro_batches=micro_batches, sequences=sequences, shape=shape, device=device)

    measured = [ENTRIES[name] for name in (MEASURED[1:] if quick else MEASURED)]
    by_pieces = measured[: 1 if quick else 2]
    most = count(device) if device != "cpu" else 2 if quick else max(RANKS)
    shape = QUICK_SHAPES[28] if quick else OF_RANKS
    over = [Setup(n, 1, micro_batches=2, sequences=2, shape=shape, device=device) for n in RANKS if n <= most]
    for setup in over:
        yield from (("ranks", setup, entry) for entry in measured if (entry.ddp if setup.ranks > 1 else entry.alone))
    for setup in over[1:2]:
        for cut in CUTS_OF_TWO:
            yield from (("cut", dataclasses.replace(setup, cut=cut), entry) for entry in by_pieces)
    for setup in over[2:3]:
        yield from (("cut", dataclasses.replace(setup, cut="HSDP"), entry) for entry in by_pieces)
    setup = alone(QUICK_SHAPES[28] if quick else OF_METRICS, 4, 4)
    yield "metric", setup, ENTRIES["control"]
    for metric in METRICS[-1:] if quick else METRICS:
        yield "metric", setup, Entry("sonde", partial(Sonde, metric=metric, staging_mib=64.0))
    for context in CONTEXTS[:1] if quick else CONTEXTS:
        shape = dataclasses.replace(QUICK_SHAPES[28] if quick else OF_METRICS, context=context)
        yield from (("tokens", alone(shape, 1, 8), ENTRIES[name]) for name in ("control", "sonde-examples"))
    for shape in (QUICK_SHAPES if quick else SHAPES).values():
        yield from (
            ("tensors", alone(shape, 4, 2), entry) for entry in (by_pieces if quick else measured) if entry.alone
        )


def measure(device: str, *, quick: bool) -> Iterator[dict[str, list[Row]]]:
    """All rows so far by the question that they answer, after each row."""
    rows: dict[str, list[Row]] = {}
    for question, setup, entry in questions(device, quick=quick):
        sys.stderr.write(f"{entry.title}: {setup}\n")
        if quick:
            row = timed(entry, setup, processes=1, blocks=1, start="forkserver")
        else:
            row = timed(entry, setup, processes=3, blocks=6, start="spawn")
        rows.setdefault(question, []).append(row)
        yield rows


def markdown(rows: dict[str, list[Row]], machine: dict[str, str], command: str) -> str:
    """The results as a page."""
    lines = ["# Cost of measuring every window", ""]
    lines += [f"- {name}: {value}" for name, value in machine.items()] + [f"- command: `{command}`"]
    for question, answers in rows.items():
        lines += [
            "",
            f"## Against {question}",
            "",
            f"| {question} | contestant | time added to a window | peak memory |",
            "|---|---|---|---|",
        ]
        for row in answers:
            value = getattr(row, question)
            against = f"{value:,}" if isinstance(value, int) else value
            against += f" over {row.ranks} ranks" * (question == "cut")
            memory = f"{row.extra_bytes / 2**20:+.1f} MiB"
            lines.append(f"| {against} | {row.title} | {in_words(row.cost)} | {memory} |")
    return "\n".join(lines) + "\n"


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and write `scaling_<name of the device>.json` and `.md`."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scaling", description=__doc__)
    add_option(parser)
    parser.add_argument("--quick", action="store_true", help="a minute, to see that it works")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results", help="folder to write to")
    options = parser.parse_args(arguments)
    machine = describe(options.device)
    command = f"python -m benchmarks.scaling --device {options.device}" + " --quick" * options.quick
    options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / stem("scaling", options.device)
    page = ""
    for rows in measure(options.device, quick=options.quick):  # written after each row: an interrupted run leaves these
        page = markdown(rows, machine, command)
        as_json = {
            "machine": machine,
            "quick": options.quick,
            "rows": {question: [dataclasses.asdict(row) for row in answers] for question, answers in rows.items()},
        }
        path.with_suffix(".json").write_text(json.dumps(as_json, indent=1) + "\n")
        path.with_suffix(".md").write_text(page)
    print(page)


if __name__ == "__main__":
    main()
