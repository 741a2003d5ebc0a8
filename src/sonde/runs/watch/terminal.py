"""Runs that are being written, in the terminal: a few lines for each, or one line where they do not all fit."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from rich.console import Console, Group
from rich.padding import Padding
from rich.text import Text

from sonde.runs.report.verdicts import position_text
from sonde.runs.run import Run
from sonde.runs.watch.follow import FollowedRun
from sonde.wording import count, duration, number, percent, shorten


def terminal_view(runs: Sequence[FollowedRun], console: Console) -> Group:
    """All runs as they are now: a line for each, and the alerts, if the terminal is not high enough for more."""
    panels = Group(*(line for each in runs for line in _panel(each)))
    is_too_high = console.is_terminal and len(console.render_lines(panels)) >= console.height
    return Group(*_table(runs, console.width)) if is_too_high else panels


def _table(runs: Sequence[FollowedRun], width: int) -> Iterator[Text]:
    """Names are shortened in the middle. Where that is not enough, lines are cut at their end."""
    rows = [("Run", "Verdict", "Age", "Alerts", "Noise", "Step", "Batch"), *map(_cells, runs)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    widths[0] = min(widths[0], max(width - sum(widths[1:]) - 2 * len(widths[1:]), 9))
    for name, *cells in rows:
        padded = [f"{cell:<{n}}" for cell, n in zip([shorten(name, widths[0]), *cells], widths, strict=True)]
        yield Text("  ".join(padded).rstrip(), no_wrap=True, overflow="ellipsis")
    for each in runs:
        for message in (*filter(None, [each.problem]), *(failed.message for failed in each.failing)):
            yield Text(f"! {shorten(each.run.name)}: {message}", "yellow")


def _cells(followed: FollowedRun) -> tuple[str, ...]:
    run, n_alerts = followed.run, len(followed.failing) + bool(followed.problem)
    age = duration(followed.age) if run.ended is None else "ended"
    scale, _, batch = (tile.value for tile in followed.panels[0].tiles[:3]) if run.readings else "–––"
    step = "–" if run.is_empty else count(run.last.window)
    return run.name, followed.badges, age, f"! {n_alerts}" if n_alerts else "–", scale, step, batch


def _panel(followed: FollowedRun) -> Iterator[Text | Padding]:
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
    for panel in followed.panels:  # of the batch size, the first tiles are its noise scales and the batch
        yield Text.assemble((f" {panel.badge} ", "reverse"), f" {panel.action}")
        yield Text(" · ".join(f"{t.name} {t.value} {t.note}".strip() for t in panel.tiles[:3]))
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
