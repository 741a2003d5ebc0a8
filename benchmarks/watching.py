"""What `sonde watch` costs, in seconds of one core, and how long after a reading was written the page shows it.

python -m benchmarks.watching --readings 11000             # the costs
python -m benchmarks.watching --readings 11000 --browser   # and the page in Chromium, where another process watches
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from tests.chromium import chromium
from tests.runs.report.plausible_run import reading_record, write_run

from sonde.log.lines import encode_line
from sonde.runs.watch.follow import FollowedRun
from sonde.runs.watch.serve import Site
from sonde.runs.watch.terminal import terminal_view


def _seconds(work: Callable[[], Any]) -> float:
    began = time.process_time()
    work()
    return time.process_time() - began


# The verdict names its window; the hover text of the figures ends with it.
_SHOWS = """
const [window, done] = arguments, found = {};
const isDrawn = () => [...(Bokeh.documents[0]?.roots() ?? [])].some(fig => [...fig.references()].some(
  model => model.type === "ColumnDataSource" && Object.values(model.data).some(texts => texts.at(-1) === window)));
const look = () => {
  if (document.querySelector(".facts")?.innerText.includes(`window ${window}`)) found.verdict ??= Date.now();
  if (Bokeh.documents[0]?.is_idle && isDrawn()) found.figures ??= Date.now();
  found.verdict && found.figures ? done([found.verdict, found.figures]) : setTimeout(look, 20);
};
look();
"""


def _until_shown(log: Path, n: int, appended: int) -> list[tuple[float, float]]:
    """Seconds from each append to the verdict and to the figures."""
    command = [sys.executable, "-m", "sonde", "watch", str(log), "--serve"]
    found = []
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as watch, chromium(log.parent / "it") as browser:
        assert watch.stdout is not None
        browser.set_script_timeout(120)
        browser.get(watch.stdout.readline().strip())
        browser.execute_async_script(_SHOWS, f"{10 * n:,}")
        for k in range(n, n + appended):
            time.sleep(2 + 0.4 * (k - n) / appended)
            with log.open("ab") as file:
                file.write(encode_line(reading_record(k, n + appended)))
            began = time.time()
            verdict, figures = browser.execute_async_script(_SHOWS, f"{10 * (k + 1):,}")
            found.append((verdict / 1e3 - began, figures / 1e3 - began))
        watch.kill()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--readings", type=int, default=11_000)
    parser.add_argument("--appended", type=int, default=20)
    parser.add_argument("--browser", action="store_true")
    options = parser.parse_args()
    n, log = options.readings, write_run(Path(tempfile.mkdtemp()), options.readings, end=False) / "records.jsonl"
    followed: list[FollowedRun] = []
    opened = _seconds(lambda: followed.append(FollowedRun(log)))
    print(f"a log of {n:,} readings, {log.stat().st_size / 1e6:.1f} MB, is opened in {opened:.2f} s")
    [run] = followed
    screen = Console(file=Path("/dev/null").open("w"), width=120)  # noqa: SIM115 - for the whole process
    unchanged, read, shown, said, figures = [], [], [], [], []
    page = Site([run])
    for k in range(options.appended):
        with log.open("ab") as file:
            file.write(encode_line(reading_record(n + k, n + options.appended)))
        read.append(_seconds(run.refresh))
        unchanged.append(_seconds(run.refresh))
        shown.append(_seconds(lambda: screen.print(terminal_view([run], screen))))
        said.append(_seconds(lambda: page.news("0", "")))
        figures.append(_seconds(lambda: page.figures("0")))
    print(f"a look at an unchanged log {1e3 * median(unchanged):.2f} ms")
    print(f"each further reading: read {1e3 * median(read):.1f} ms, in the terminal {1e3 * median(shown):.1f} ms")
    print(f"the page: what it says first {1e3 * median(said):.1f} ms, its figures {median(figures):.2f} s", end=", ")
    print(f"{len(json.dumps(page.figures('0'))) / 1e3:.0f} kB")
    if options.browser:
        of_verdict, of_figures = zip(*_until_shown(log, n + options.appended, options.appended), strict=True)
        for what, of in (("verdict", of_verdict), ("figures", of_figures)):
            print(f"in Chromium, the {what}: {median(of):.2f} s after a reading was written, at most {max(of):.2f} s")


if __name__ == "__main__":
    main()
