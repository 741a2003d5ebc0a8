"""Follows a log that is being written. Nothing is written to the run's folder, and nothing in it is locked."""

from __future__ import annotations

import time
from pathlib import Path

from sonde.log.lines import lines_of
from sonde.runs.losses import LastLoss, last_loss
from sonde.runs.reader import ADVICE, Contents, find_records
from sonde.runs.report.verdicts import Failed, VerdictPanel, failed_checks, verdict_panels
from sonde.runs.run import Run
from sonde.wording import count, duration, number


class FollowedRun:
    """The last run of a log that is being written.

    Each line is read once. To look at a log that has not grown takes one `stat`.

    Args:
        path: the run's folder, or the `.jsonl` file itself.

    Attributes:
        run: what the log holds. A last line without its line break is still being written, and is left out.
        panels: the verdicts on it.
        failing: the checks that fail now.
        loss: the last one that the user logged.
        version: counts the changes of `run`.
        written: when the log was last written to, in seconds since 1970.
        problem: why the log cannot be read now, in one sentence; empty if it can. `run` stays as it was read last.

    Raises:
        FileNotFoundError: when there is no such folder or no log in it.
        ValueError: when the file is not a run's log, was written by another version of sonde, or is damaged other than
            by a crash.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.run: Run
        self.panels: list[VerdictPanel] = []
        self.failing: list[Failed] = []
        self.loss: LastLoss | None = None
        self.version = 0
        self.written = 0.0
        self.problem = ""
        self._contents: Contents
        self._seen: tuple[int, ...] | None = None
        """What tells that the file has changed."""
        self._first_line = b""
        """It holds the time of the run's start, so it tells another log in the same place."""
        self._read_on()

    @property
    def liveness(self) -> str:
        """How long ago the run wrote to its log, or that it has ended."""
        if self.run.ended is not None:
            return "ended" if self.run.ended == "closed" else f"ended: {self.run.ended}"
        return f"last record {duration(self.age)} ago"

    @property
    def age(self) -> float:
        """Seconds since the last record."""
        return max(time.time() - self.written, 0)

    @property
    def badges(self) -> str:
        """The verdicts, in a few words."""
        return ", ".join(panel.badge for panel in self.panels) or "No reading yet"

    @property
    def step(self) -> str:
        """The last window that was read."""
        return "–" if self.run.is_empty else count(self.run.last.window)

    @property
    def loss_text(self) -> str:
        """The last loss, and its window if it is not the last one."""
        if self.loss is None:
            return "–"
        at = self.loss.reading.window
        return number(self.loss.value, 4) + (f" at {count(at)}" if at != self.run.last.window else "")

    def refresh(self) -> str:
        """Read what was appended. Whatever happens to the log, its folder and its disk is told as a `problem`.

        Returns:
            A sentence if a problem has begun or ended; empty otherwise.
        """
        before = self.problem
        try:
            self._read_on()
        except FileNotFoundError:
            self._seen = None
            self.problem = f"{self.path} holds no log any more: what it held is shown until the log is back"
        except OSError as error:
            self._seen = None
            self.problem = f"{self.path} cannot be read ({error.strerror}): what it held is shown until it can be read"
        except ValueError as error:
            self._first_line = b""  # once the file changes, it is read anew
            self.problem = str(error)
        return "" if self.problem == before else self.problem or f"{self.path} is read again"

    def _read_on(self) -> None:
        """Add the lines that were appended; all lines if this is another log, or if a new run has begun in it."""
        file = find_records(self.path)
        now = file.stat()
        seen = (now.st_ino, now.st_size, now.st_mtime_ns)
        if seen == self._seen:
            return
        self._seen = seen
        first_line = next(lines_of(file, advice=ADVICE))
        if first_line != self._first_line or now.st_size < self._contents.end:
            self._first_line, self._contents = first_line, Contents(file)
        self.run = self._contents.read_on(is_whole=False)
        while not self._contents.is_of_last_run:
            self._contents = Contents(file)
            self.run = self._contents.read_on(is_whole=False)
        self.panels = verdict_panels(self.run)
        self.failing = [each for each in failed_checks(self.run) if not each.is_over]
        self.loss = last_loss(self.run)
        self.version += 1
        self.written = now.st_mtime
        self.problem = ""
