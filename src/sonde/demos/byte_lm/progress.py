"""Progress of the training: a live panel in a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Self

from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from sonde.demos.byte_lm.options import Setup
from sonde.demos.console import PANEL_WIDTH
from sonde.wording import count, number, percent, plural

_SECONDS_BETWEEN_FRAMES = 0.25
_SECONDS_BETWEEN_LINES = 5.0
_TREND_WIDTH = 24
_BARS = "▁▂▃▄▅▆▇█"


class TrainingDisplay:
    """Shows the training on rank 0. It is a sink of the probe, so its numbers are those of the probe's records.

    Args:
        setup: the run.
        console: the console to write to; a quiet console on the other ranks.
    """

    def __init__(self, setup: Setup, console: Console) -> None:
        self._setup, self._console = setup, console
        self._is_live = console.is_terminal and not console.is_dumb_terminal and not console.quiet
        self._live = Live(console=console, auto_refresh=False)
        self._bar = Progress(
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TextColumn("steps,"),
            TimeRemainingColumn(compact=True),
            TextColumn("left"),
            console=console,
            expand=True,
        )
        self._task = self._bar.add_task("", total=setup.n_steps)
        self._title = "sonde demo"
        self._readings: list[Mapping[str, Any]] = []
        self._alerts: dict[str, str] = {}
        self._last_frame = self._last_line = time.monotonic()

    def __enter__(self) -> Self:
        if self._is_live:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._is_live:
            self._refresh()
            self._live.stop()

    def advance(self, step: int) -> None:
        """Show that optimizer step `step` is done. Steps count from 1."""
        self._bar.update(self._task, completed=step)
        if time.monotonic() - self._last_frame >= _SECONDS_BETWEEN_FRAMES:
            self._refresh()

    def write(self, record: Mapping[str, Any]) -> None:
        """Take a record of the probe."""
        match record["kind"]:
            case "header":
                self._title = _title(record["setup"])
            case "alert":
                self._alerts[record["name"]] = record["message"]
                self._print(f"alert: {record['message']}")
            case "reading":
                self._readings.append(record)
                self._alerts = dict(record["alerts"])
                due = time.monotonic() - self._last_line >= _SECONDS_BETWEEN_LINES
                if due or record["window"] == self._setup.n_steps:
                    self._print(_line(record, self._setup))
                    self._last_line = time.monotonic()

    def close(self) -> None:
        """No record follows. The last records stay on the screen."""

    def _print(self, line: str) -> None:
        if not self._is_live:
            self._console.print(line, soft_wrap=True, markup=False, highlight=False)

    def _refresh(self) -> None:
        if self._is_live:
            self._live.update(self._panel(), refresh=True)
            self._last_frame = time.monotonic()

    def _panel(self) -> Panel:
        alerts = (Text(f"! {message}", style="yellow") for message in self._alerts.values())
        return Panel(
            Group(self._bar, Text(), _table(self._readings, self._setup), *alerts),
            title=self._title,
            title_align="left",
            width=min(self._console.width, PANEL_WIDTH),
            padding=(1, 2),
        )


def describe_noise_scale(reading: Mapping[str, Any], unit: str = "sequences") -> str:
    """B_simple in words, from a reading record.

    Args:
        reading: the reading record.
        unit: plural name of the unit.

    Example:
        >>> metrics = {"gns/b_simple": 38.2, "gns/b_simple_low": 35.0, "gns/b_simple_high": 43.1}
        >>> describe_noise_scale({"status": "resolved", "metrics": metrics})
        '38.2 [35 – 43.1] sequences'
    """
    metrics = reading["metrics"]
    low, high = number(metrics["gns/b_simple_low"]), number(metrics["gns/b_simple_high"])
    match reading["status"]:
        case "resolved":
            return f"{number(metrics['gns/b_simple'])} [{low} – {high}] {unit}"
        case "lower_bound":
            return f"> {low} {unit} (lower bound)"
        case "upper_bound":
            return f"< {high} {unit} (upper bound)"
        case _:
            return f"not known yet: {reading['reason']}"


def trend(values: Sequence[float], width: int = _TREND_WIDTH) -> str:
    """A sequence of values as a row of bars. The lowest value has the lowest bar.

    Args:
        values: values in order of time. If there are more than `width`, they are thinned out.
        width: largest number of bars.

    Example:
        >>> trend([0.0, 1.0, 2.0, 7.0])
        '▁▂▃█'
    """
    n_bars = min(width, len(values))
    if n_bars == 0:
        return ""
    shown = [values[(i + 1) * len(values) // n_bars - 1] for i in range(n_bars)]
    low, span = min(shown), max(shown) - min(shown)
    return "".join(_BARS[round((value - low) / span * (len(_BARS) - 1)) if span else 0] for value in shown)


def _title(setup: Mapping[str, Any]) -> str:
    return (
        f"sonde demo: {count(setup['parameters'])} parameters, {plural(setup['ranks'], 'rank')} on "
        f"{str(setup['device']).partition(':')[0]}"
    )


def _table(readings: Sequence[Mapping[str, Any]], setup: Setup) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim")
    table.add_column(min_width=44)
    table.add_column(style="cyan")
    if not readings:
        table.add_row("B_simple", f"first reading at step {min(setup.log_every, setup.n_steps)}")
        return table
    metrics = readings[-1]["metrics"]
    losses = [r["metrics"]["loss"] for r in readings if r["metrics"]["loss"] is not None]
    scales = [r["metrics"]["gns/b_simple"] for r in readings if r["metrics"]["gns/b_simple"] is not None]
    table.add_row("loss", f"{number(metrics['loss'])} nats per byte", trend(losses))
    table.add_row("B_simple", Text(describe_noise_scale(readings[-1]), style="bold"), trend(scales))
    table.add_row("batch", f"{setup.batch} sequences of {setup.context} bytes")
    table.add_row("speed", f"{_tokens_per_second(metrics, setup)} tokens/s")
    table.add_row("probe", describe_cost(metrics))
    return table


def _line(reading: Mapping[str, Any], setup: Setup) -> str:
    metrics = reading["metrics"]
    return ", ".join(
        (
            f"step {reading['window']}/{setup.n_steps}",
            f"loss {number(metrics['loss'])}",
            f"B_simple {describe_noise_scale(reading)}",
            f"{_tokens_per_second(metrics, setup)} tokens/s",
            f"probe {percent(_cost(metrics))}{'' if _leaves_out(metrics) else ' (every window)'}",
        )
    )


def describe_cost(metrics: Mapping[str, float | None]) -> str:
    """The part of the step time that the probe takes, and of which windows."""
    which = f"one window in {number(metrics['cost/every'])}" if _leaves_out(metrics) else "while every window is"
    allowed = "" if _leaves_out(metrics) else "; by default, sonde keeps to 1 %"
    return f"{percent(_cost(metrics))} of the step time, {which} measured{allowed}"


def _leaves_out(metrics: Mapping[str, float | None]) -> bool:
    """Whether some windows are not measured."""
    every = metrics.get("cost/every")
    return every is not None and every > 1


def _cost(metrics: Mapping[str, float | None]) -> float | None:
    """At the present pace, where windows are left out: the interval of one reading may hold no measured window."""
    share = metrics.get("cost/share")
    return share if share is not None and _leaves_out(metrics) else metrics["cost/fraction"]


def _tokens_per_second(metrics: Mapping[str, Any], setup: Setup) -> str:
    """In this demo, a token is a byte."""
    sequences = metrics["run/units_per_second"]
    return count(None if sequences is None else sequences * setup.context)
