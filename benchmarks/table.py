"""Results as Markdown."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from benchmarks.accuracy import Accuracy, Bias, Moments
from benchmarks.contestants import ENTRIES, PLAIN, Entry
from benchmarks.timing import Cost


@dataclass
class Row:
    """The measurements of one contestant in one set-up; None where a number was not measured.

    Attributes:
        title: of the contestant.
        setup: how windows were cut into pieces for the cost, and the model.
        pieces: how windows were cut into pieces.
        note: why the contestant did not run; empty when it ran.
        cost: time added.
        blocks: seconds per window without and with the contestant, [processes][blocks][2].
        extra_bytes: peak memory added, per process, for each repeat.
        extra_collectives: collectives added per window.
        synchronisations: host synchronisations per window; GPU only.
        accuracy: by name of the weights.
    """

    title: str
    setup: str
    pieces: str
    note: str = ""
    cost: Cost | None = None
    blocks: list[list[tuple[float, float]]] = field(default_factory=list)
    extra_bytes: list[float] = field(default_factory=list)
    extra_collectives: float | None = None
    synchronisations: float | None = None
    accuracy: dict[str, Accuracy] = field(default_factory=dict)


@dataclass(frozen=True)
class Results:
    """One run of the benchmark.

    Attributes:
        machine: the machine and versions, for people.
        command: the command that repeats the run.
        quick: whether the run was too short to quote.
        goal: the largest share of a window's time that the probe may add.
        windows: windows and runs behind each accuracy.
        exact: moments that accuracies are measured against, by name of the weights.
        rows: contestants in set-ups.
        import_seconds: seconds that `import sonde` takes beyond `import torch`.
    """

    machine: Mapping[str, str]
    command: str
    quick: bool
    goal: float
    windows: str
    exact: Mapping[str, Moments]
    rows: Sequence[Row]
    import_seconds: float


def markdown(results: Results) -> str:
    """The results as a page."""
    parts = [
        "# Cost and accuracy of the noise scale",
        *(["**A quick run that shows that the benchmark works: its numbers mean nothing.**"] if results.quick else []),
        "\n".join(f"- {name}: {value}" for name, value in results.machine.items())
        + f"\n- command: `{results.command}`",
        *([] if results.quick else [_verdict(results)]),
        "## Cost",
        _COST,
        _cost_table(results.rows),
        f"`import sonde` takes {results.import_seconds:.2f} s more than `import torch`.",
    ]
    if results.exact:
        parts += ["## Accuracy", _ACCURACY.format(windows=results.windows)]
        for name, exact in results.exact.items():
            parts += [
                f"**{name.capitalize()}**: exact B_simple {exact.b_simple:.1f} sequences, "
                f"tr Σ {exact.trace_cov:.4g}, |G|² {exact.grad_sq:.4g}",
                _accuracy_tables(results.rows, name),
            ]
    parts += ["## The rows", _notes(ENTRIES.values())]
    return "\n\n".join(parts) + "\n"


_COST = (
    "Time: two models train side by side in one process, one of them without a probe, in blocks of windows in the "
    "order plain–probe–probe–plain. The number is the median over blocks of the ratio of their times, with a 95 % "
    "bootstrap interval (processes are drawn first, then blocks). The control compares training without a probe with "
    "itself: it shows the differences that this machine cannot distinguish from 0. Memory: the peak of a new process "
    "above the peak of a plain process, after the same windows and imports; median and range of the repeats. "
    "Collectives: those that are added to DDP's own in each window."
)
_ACCURACY = (
    "A small GPT of the same architecture, at frozen weights. Windows are drawn with replacement from a finite "
    "population whose |G|² and tr Σ are known exactly, from every sequence's own gradient in float64. {windows}. The "
    "tables show the bias of each estimator at the end of a run, ± the Monte-Carlo standard error. All rows of a table "
    "see the same windows."
)


def _verdict(results: Results) -> str:
    lines = []
    for row in results.rows:
        if row.title == ENTRIES["sonde"].title and row.cost is not None:
            met = "met" if row.cost.high <= results.goal else "missed" if row.cost.low > results.goal else "not decided"
            lines.append(f"- {row.setup}: sonde adds {_cost(row.cost)}; goal ≤ {results.goal:.1%}: {met}")
    return "\n".join(lines)


def _cost_table(rows: Iterable[Row]) -> str:
    rows = [r for r in rows if r.cost is not None or r.note]
    on_gpu = any(r.synchronisations is not None for r in rows)
    head = ["contestant", "time added to a window", "peak memory added, MiB", "collectives added"]
    if on_gpu:
        head.append("host synchronisations")
    tables = []
    for setup in dict.fromkeys(r.setup for r in rows):
        setup_rows = [r for r in rows if r.setup == setup]
        cells = [
            [r.title, r.note or _cost(r.cost), _memory(r.extra_bytes), _number(r.extra_collectives)]
            + ([_number(r.synchronisations)] if on_gpu else [])
            for r in setup_rows
        ]
        plain = next((r.cost.window_seconds for r in setup_rows if r.cost is not None), None)
        window = f" A window takes {plain * 1000:.0f} ms without a probe." if plain is not None else ""
        tables.append(f"**{setup}.**{window}\n\n{_table(head, cells)}")
    return "\n\n".join(tables)


def _accuracy_tables(rows: Sequence[Row], weights: str) -> str:
    tables = []
    for pieces in dict.fromkeys(r.pieces for r in rows):
        head = [pieces, "bias of B_simple", "of tr Σ", "of \\|G\\|²"]
        cells = [
            [r.title, _bias(a.b_simple), _bias(a.trace_cov), _bias(a.grad_sq)]
            for r in rows
            if r.pieces == pieces and (a := r.accuracy.get(weights)) is not None
        ]
        tables.append(_table(head, cells))
    return "\n\n".join(tables)


def _table(head: Sequence[str], cells: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *cells]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _cost(cost: Cost | None) -> str:
    if cost is None:
        return "–"
    return f"{cost.median:+.2%} [{cost.low:+.2%}, {cost.high:+.2%}], {cost.seconds_added * 1000:+.1f} ms"


def _memory(extra: Sequence[float]) -> str:
    if not extra:
        return "–"
    mib = sorted(b / 2**20 for b in extra)
    return f"{mib[len(mib) // 2]:+.1f} [{mib[0]:+.1f}, {mib[-1]:+.1f}]"


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:g}"


def _bias(bias: Bias | None) -> str:
    return "no number" if bias is None else f"{bias.mean:+.1%} ± {bias.standard_error:.1%}"


def _notes(entries: Iterable[Entry]) -> str:
    rows = [e for e in entries if e.make is not PLAIN.make]
    return "\n".join(f"- **{e.title}**: {' '.join((inspect.getdoc(e.make) or '').split())}" for e in rows)
