"""Runs that are being written, in the terminal: a few lines for each."""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Iterator, Sequence

from rich.console import Group
from rich.padding import Padding
from rich.text import Text

from sonde.runs.report.verdicts import failed_checks, position_text
from sonde.runs.run import Run
from sonde.runs.watch.follow import FollowedRun
from sonde.wording import duration, number, percent

_TILES = 3
"""Numbers shown of each verdict: of the batch size its noise scales and the batch."""
_WIDTH = 40
"""Largest width of the noise scale's line of bars, in characters."""
_BARS = "▁▂▃▄▅▆▇█"


def terminal_view(runs: Sequence[FollowedRun]) -> Group:
    """All runs as they are now."""
    return Group(*(line for each in runs for line in _lines(each)))


def liveness(followed: FollowedRun) -> str:
    """How long ago the run wrote to its log, or that it has ended."""
    ended = followed.run.ended
    if ended is not None:
        return "ended" if ended == "closed" else f"ended: {ended}"
    return f"last record {duration(max(time.time() - followed.written, 0))} ago"


def _lines(followed: FollowedRun) -> Iterator[Text | Padding]:
    run = followed.run
    place = "no reading yet" if run.is_empty else position_text(run.last, run.probe("reading").unit)
    yield Text.assemble((run.name, "bold"), f" · {place} · {liveness(followed)}")
    if followed.problem:
        yield _indented(Text(followed.problem, "yellow"))
    yield from map(_indented, _measured(followed, followed.version))
    yield Text()


def _indented(text: Text) -> Padding:
    return Padding(text, (0, 0, 0, 2), expand=False)


@functools.lru_cache(maxsize=64)
def _measured(followed: FollowedRun, version: int) -> list[Text]:
    """What changes with the log alone, made once for each of its versions."""
    run = followed.run
    lines = []
    for panel in followed.panels:
        lines.append(Text.assemble((f" {panel.badge} ", "reverse"), f" {panel.action}"))
        lines.append(Text(" · ".join(f"{t.name} {t.value} {t.note}".strip() for t in panel.tiles[:_TILES])))
    lines += [Text(line) for line in (_trend(run), _beside(run)) if line]
    lines += [Text(f"! {f.message} ({f.when})", "yellow") for f in failed_checks(run) if not f.is_over]
    return lines


def _trend(run: Run) -> str:
    """The noise scale of readings all over the run as a line of bars, on a log axis."""
    every = max(math.ceil(len(run.readings) / _WIDTH), 1)
    some = reversed(run.readings[::-every])  # the newest is among them
    known = [math.log(ratio) for reading in some if (ratio := reading.now.ratio)]
    if len(known) < 2:
        return ""
    low, high = min(known), max(known)
    bars = "".join(_BARS[round((value - low) / (high - low or 1.0) * (len(_BARS) - 1))] for value in known)
    return f"Noise scale over the run {bars} {number(math.exp(low))} to {number(math.exp(high))}"


def _beside(run: Run) -> str:
    """The norm, the clip, the cost and the speed at the last reading, as far as they are known."""
    if not run.readings:
        return ""
    texts: dict[str, Callable[[float], str]] = {
        "grad/norm": lambda norm: f"Gradient norm {number(norm)}",
        "grad/clip_fraction": lambda share: f"{percent(share)} of the windows clipped",
        "cost/share": lambda share: f"measuring takes {percent(share)} of the time",
        "run/units_per_second": lambda speed: f"{number(speed)} {run.probe('reading').unit} a second",
    }
    known = {name: run.readings[-1].metrics.get(name) for name in texts}
    return " · ".join(texts[name](value) for name, value in known.items() if value is not None)
