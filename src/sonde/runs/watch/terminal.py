"""Runs that are being written, in the terminal: a few lines for each, or one line where they do not all fit."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.padding import Padding
from rich.text import Text

from sonde.runs.report.verdicts import position_text
from sonde.runs.run import Run, logged_batch
from sonde.runs.watch.follow import FollowedRun
from sonde.wording import count, duration, number, percent, shorten

_TILES = 3
"""Numbers shown of each verdict: of the batch size its noise scales and the batch."""
_SHORTEST_NAME = 10
"""Columns of the table are left out, from the batch on, where names would be shorter."""


@dataclass(frozen=True)
class TerminalView:
    """All runs as they are now: in lines that a terminal is high enough for.

    Args:
        runs: in order.
    """

    runs: Sequence[FollowedRun]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Panels if all of them fit, or there is no terminal that they must fit; a line for each run otherwise."""
        panels: list[RenderableType] = [line for each in self.runs for line in _panel(each)]
        height, options = console.height - 1, options.update(height=None)  # less the line of the cursor
        n_lines = sum(len(console.render_lines(line, options)) for line in panels)
        if not console.is_terminal or n_lines <= height:
            yield from panels
            return
        rows = _table(self.runs, options.max_width)
        if len(rows) > height:
            rows = [*rows[: height - 1], Text(f"… {len(rows) - height + 1} more runs: make the window higher")]
        yield from rows
        left = height - len(rows)
        for each in self.runs:
            for message in (each.problem, *(f"! {failed.message}" for failed in each.failing)):
                line = Text(f"{shorten(each.run.name)}: {message}", "yellow")
                left -= len(console.render_lines(line, options))
                if message and left >= 0:
                    yield line


def _table(runs: Sequence[FollowedRun], width: int) -> list[Text]:
    """The head and a line for each run. What has no room is left out; names are shortened in the middle."""
    head = ["Run", "Verdict", "Age", "Alerts", "Noise", "Step", "Batch"]
    rows = [head, *map(_cells, runs)]
    widths = [max(map(cell_len, column)) + 2 for column in zip(*rows, strict=True)]
    names = min(widths[0], _SHORTEST_NAME)
    while len(widths) > 2 and names + sum(widths[1:]) > width:
        widths.pop()
    widths[0] = max(min(widths[0], width - sum(widths[1:])), 4)
    lines = []
    for row in rows:
        cells = [shorten(row[0], widths[0] - 2), *row[1:]]
        text = "".join(cell + " " * (n - cell_len(cell)) for cell, n in zip(cells, widths, strict=False))
        lines.append(Text(text.rstrip(), "bold" if row is head else "", no_wrap=True, overflow="ellipsis"))
    return lines


def _cells(followed: FollowedRun) -> list[str]:
    run = followed.run
    n_alerts = len(followed.failing) + bool(followed.problem)
    scale, batch = "–", None
    if run.readings:
        scale = followed.panels[0].tiles[0].value
        batch, _ = logged_batch(run.readings[-1].metrics, "")
    step = "–" if run.is_empty else count(run.last.window)
    age = duration(followed.age) if run.ended is None else "ended"
    alerts, units = f"! {n_alerts}" if n_alerts else "–", number(batch, 4) if batch else "–"
    return [run.name, followed.badges, age, alerts, scale, step, units]


def _panel(followed: FollowedRun) -> Iterator[RenderableType]:
    run = followed.run
    place = "no reading yet" if run.is_empty else position_text(run.last, run.probe("reading").unit)
    yield Text.assemble((run.name, "bold"), *(f" · {fact}" for fact in (place, followed.liveness, *run.remarks)))
    if followed.problem:
        yield _indented(Text(followed.problem, "yellow"))
    yield from map(_indented, _measured(followed))
    yield Text()


def _indented(text: Text) -> Padding:
    return Padding(text, (0, 0, 0, 2), expand=False)


def _measured(followed: FollowedRun) -> Iterator[Text]:
    for panel in followed.panels:
        yield Text.assemble((f" {panel.badge} ", "reverse"), f" {panel.action}")
        yield Text(" · ".join(f"{t.name} {t.value} {t.note}".strip() for t in panel.tiles[:_TILES]))
    if beside := _beside(followed.run):
        yield Text(beside)
    for each in followed.failing:
        yield Text(f"! {each.message} ({each.when})", "yellow")


def _beside(run: Run) -> str:
    """The norm, the clip, the cost and the speed at the last reading, as far as they are known."""
    known = run.readings[-1].metrics if run.readings else {}
    texts: dict[str, Callable[[float], str]] = {
        "grad/norm": lambda norm: f"Gradient norm {number(norm)}",
        "grad/clip_fraction": lambda share: f"{percent(share)} of the windows clipped",
        "cost/share": lambda share: f"measuring takes {percent(share)} of the time",
        "run/units_per_second": lambda speed: f"{number(speed)} {run.probe('reading').unit} a second",
    }
    return " · ".join(text(value) for name, text in texts.items() if (value := known.get(name)) is not None)
