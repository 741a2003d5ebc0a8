"""Runs that are being written, in the terminal: a few lines for each, or one line where they do not all fit."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from rich.console import Console, Group
from rich.padding import Padding
from rich.text import Text

from sonde.runs.names import names_apart, shorten_apart
from sonde.runs.report.verdicts import position_text
from sonde.runs.watch.follow import FollowedRun
from sonde.wording import duration, number, percent

_LEAST_NAME = 9
"""Characters that a name has in any case."""


def terminal_view(runs: Sequence[FollowedRun], console: Console) -> Group:
    """All runs as they are now: a line for each, and the alerts, if the terminal is not high enough for more."""
    names = names_apart([each.run for each in runs])
    panels = Group(*(line for name, each in zip(names, runs, strict=True) for line in _panel(name, each)))
    is_too_high = console.is_terminal and len(console.render_lines(panels)) >= console.height
    return Group(*_table(names, runs, console.width)) if is_too_high else panels


def _table(names: Sequence[str], runs: Sequence[FollowedRun], width: int) -> Iterator[Text]:
    """Names are shortened as far as they can still be told apart. Then lines are cut at their end."""
    rows = [("Verdict", "Loss", "Age", "Alerts", "Noise", "Step", "Batch"), *map(_cells, runs)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    short = ["Run", *shorten_apart(names, max(width - sum(widths) - 2 * len(widths), _LEAST_NAME))]
    widths = [max(map(len, short)), *widths]
    for name, cells in zip(short, rows, strict=True):
        padded = [f"{cell:<{n}}" for cell, n in zip([name, *cells], widths, strict=True)]
        yield Text("  ".join(padded).rstrip(), no_wrap=True, overflow="ellipsis")
    for name, each in zip(short[1:], runs, strict=True):
        for message in (*filter(None, [each.problem]), *(failed.message for failed in each.failing)):
            yield Text(f"! {name}: {message}", "yellow")


def _cells(followed: FollowedRun) -> tuple[str, ...]:
    run, n_alerts = followed.run, len(followed.failing) + bool(followed.problem)
    age = duration(followed.age) if run.ended is None else "ended"
    scale, _, batch = (tile.value for tile in followed.panels[0].tiles[:3]) if run.readings else "–––"
    alerts = f"! {n_alerts}" if n_alerts else "–"
    return followed.badges, followed.loss_text, age, alerts, scale, followed.step, batch


def _panel(name: str, followed: FollowedRun) -> Iterator[Text | Padding]:
    run = followed.run
    place = "no reading yet" if run.is_empty else position_text(run.last, run.probe("reading").unit)
    yield Text.assemble((name, "bold"), *(f" · {fact}" for fact in (place, followed.liveness, *run.remarks)))
    if followed.problem:
        yield _indented(Text(followed.problem, "yellow"))
    yield from map(_indented, _measured(followed))
    yield Text()


def _indented(text: Text) -> Padding:
    return Padding(text, (0, 0, 0, 2), expand=False)


def _measured(followed: FollowedRun) -> Iterator[Text]:
    for panel in followed.panels:  # of the batch size, the first tiles are its noise scales and the batch
        yield Text.assemble((f" {panel.badge} ", "reverse"), f" {panel.action.removeprefix(panel.badge + ': ')}")
        yield Text(" · ".join(f"{t.name} {t.value} {t.note}".strip() for t in panel.tiles[:3]))
    if beside := _beside(followed):
        yield Text(beside)
    for each in followed.failing:
        yield Text(f"! {each.message} ({each.when})", "yellow")


def _beside(followed: FollowedRun) -> str:
    """The last loss; the norm, the clip, the cost and the speed at the last reading, as far as they are known."""
    run, loss = followed.run, followed.loss
    known = run.readings[-1].metrics if run.readings else {}
    texts: dict[str, Callable[[float], str]] = {
        "grad/norm": lambda norm: f"Gradient norm {number(norm)}",
        "grad/clip_fraction": lambda share: f"{percent(share)} of the windows clipped",
        "cost/share": lambda share: f"measuring takes {percent(share)} of the time",
        "run/units_per_second": lambda speed: f"{number(speed)} {run.probe('reading').unit} a second",
    }
    said = [] if loss is None else [f"{loss.name} {followed.loss_text}"]
    said += [text(value) for name, text in texts.items() if (value := known.get(name)) is not None]
    return " · ".join(said)
