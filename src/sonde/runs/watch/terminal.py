"""Runs that are being written, in the terminal: a few lines for each."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from rich.console import Group
from rich.padding import Padding
from rich.text import Text

from sonde.runs.report.verdicts import position_text
from sonde.runs.run import Run
from sonde.runs.watch.follow import FollowedRun
from sonde.wording import number, percent

_TILES = 3
"""Numbers shown of each verdict: of the batch size its noise scales and the batch."""


def terminal_view(runs: Sequence[FollowedRun]) -> Group:
    """All runs as they are now."""
    return Group(*(line for each in runs for line in _lines(each)))


def _lines(followed: FollowedRun) -> Iterator[Text | Padding]:
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
