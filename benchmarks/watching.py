"""What `sonde watch` costs, in seconds of one core: to open a log, for each further reading, and to draw a page.

python -m benchmarks.watching --readings 11000
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from tests.runs.report.plausible_run import reading_record, write_run

from sonde.log.lines import encode_line
from sonde.runs.watch.follow import FollowedRun
from sonde.runs.watch.serve import Shown
from sonde.runs.watch.terminal import terminal_view


def _seconds(work: Callable[[], Any]) -> float:
    began = time.process_time()
    work()
    return time.process_time() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--readings", type=int, default=11_000)
    parser.add_argument("--appended", type=int, default=20)
    options = parser.parse_args()
    n, log = options.readings, write_run(Path(tempfile.mkdtemp()), options.readings, end=False) / "records.jsonl"
    followed: list[FollowedRun] = []
    opened = _seconds(lambda: followed.append(FollowedRun(log)))
    print(f"a log of {n:,} readings, {log.stat().st_size / 1e6:.1f} MB, is opened in {opened:.2f} s")
    [run] = followed
    screen = Console(file=Path("/dev/null").open("w"), width=120)  # noqa: SIM115 - for the whole process
    unchanged, read, shown, said = [], [], [], []
    page = Shown(run)
    for k in range(options.appended):
        with log.open("ab") as file:
            file.write(encode_line(reading_record(n + k, n + options.appended)))
        read.append(_seconds(run.refresh))
        unchanged.append(_seconds(run.refresh))
        shown.append(_seconds(lambda: screen.print(terminal_view([run]))))
        said.append(_seconds(page.first))
    figures = [_seconds(lambda: Shown(run).rest()) for _ in range(3)]
    print(f"a look at an unchanged log {1e3 * median(unchanged):.2f} ms")
    print(f"each further reading: read {1e3 * median(read):.1f} ms, in the terminal {1e3 * median(shown):.1f} ms")
    print(f"the page: what it says first {1e3 * median(said):.1f} ms, its figures {median(figures):.2f} s", end=", ")
    print(f"{len(json.dumps(page.rest())) / 1e3:.0f} kB")


if __name__ == "__main__":
    main()
