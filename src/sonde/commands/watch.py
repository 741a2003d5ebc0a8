"""`sonde watch RUN…`: runs while they are written, in the terminal and on a page. It needs no torch."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from rich.console import Console
from rich.live import Live
from rich.text import Text
from tyro.conf import FlagCreatePairsOff, Positional, arg

from sonde.commands.as_json import alone, print_json, run_as_json
from sonde.runs.names import names_apart
from sonde.runs.watch.follow import FollowedRun
from sonde.runs.watch.terminal import terminal_view

_SECONDS = 0.2
"""Between looks at the logs."""


@dataclass(frozen=True)
class WatchOptions:
    """Watch runs while they train: their last readings, verdicts and alerts. Ctrl-C ends it. Training is not touched.

    Attributes:
        runs: Folders of runs on this machine, or their records.jsonl.
        serve: Also serve the reports as a page on this machine, and print its address.
        port: Port of the page.
        json: Print the runs as they are now as JSON, and end.
    """

    runs: Annotated[Positional[tuple[Path, ...]], arg(metavar="RUN [RUN …]", help_behavior_hint="")]
    serve: Annotated[bool, FlagCreatePairsOff] = False
    port: Annotated[int, arg(help_behavior_hint="(default: a free one)")] = 0
    json: Annotated[bool, FlagCreatePairsOff] = False


def run_watch(options: WatchOptions) -> int:
    """Show the runs until Ctrl-C.

    Args:
        options: of the command line.

    Returns:
        The exit status.
    """
    if not options.runs:
        raise ValueError("expected at least one run to watch, got none: give the folder of a run")
    if options.port and not options.serve:
        raise ValueError(f"--port {options.port} is the port of the page: give --serve too")
    if options.json and options.serve:
        raise ValueError("--json prints the runs once and ends, and --serve goes on: leave out one of the two")
    runs = [FollowedRun(path) for path in options.runs]
    if options.json:
        print_json({"runs": [_as_json(*each) for each in zip(names_apart([r.run for r in runs]), runs, strict=True)]})
        return 0
    console = Console()
    with contextlib.suppress(KeyboardInterrupt), contextlib.ExitStack() as until_the_end:
        if options.serve:
            from sonde.runs.watch.serve import served

            site = until_the_end.enter_context(served(runs, options.port))
            console.print(site.address, soft_wrap=True, highlight=False)
        _show(runs, console)
    return 0


def _as_json(name: str, followed: FollowedRun) -> dict[str, Any]:
    """A run, and how long ago it wrote: a run that has not ended and has been silent for long was cut off."""
    return {**run_as_json(alone(followed.run, name), followed.run), "seconds_since_written": followed.age}


def _show(runs: Sequence[FollowedRun], console: Console) -> None:
    """Show the runs. What goes wrong with a log is printed above them, where it stays."""
    with Live(terminal_view(runs, console), console=console, auto_refresh=False) as live:
        while True:
            sentences = [each.refresh() for each in runs]
            live.update(terminal_view(runs, console), refresh=True)
            for sentence in filter(None, sentences):
                console.print(Text(sentence, "yellow"), soft_wrap=True)
            time.sleep(_SECONDS)


COMMAND = (WatchOptions, run_watch)
