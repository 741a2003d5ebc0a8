"""Readings as TensorBoard scalars, so that sonde's curves stand beside the ones a team already looks at."""

from __future__ import annotations

import html
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, cast

from sonde.log.known_metrics import known_metrics
from sonde.version import install_hint

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter


class TensorBoardSink:
    """Writes readings as scalars at step = window, headers and alerts as text.

    A metric that is not known (null) has no point: the curve has a gap. A group's B_simple is written under
    `gns_by_group/NAME`. TensorBoard is a view: the log that a report is made from is `JsonlSink`'s.

    Args:
        log_dir: the folder TensorBoard is pointed at; or a writer of yours, which is flushed at the end, not closed.
        flush_secs: seconds between two flushes to disk, done by a thread of TensorBoard's own.
        step: gives your own number of a step from the number of a window, from 1; by default they are the same.

    Raises:
        ImportError: without the `tensorboard` package.
    """

    def __init__(
        self, log_dir: str | Path | SummaryWriter, *, flush_secs: int = 10, step: Callable[[int], int] | None = None
    ) -> None:
        self._step_of = step or (lambda window: window)
        self._opened: SummaryWriter | None = None
        self._is_own = isinstance(log_dir, str | Path)
        if not isinstance(log_dir, str | Path):
            self._opened = log_dir
            return
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ImportError(f"TensorBoardSink needs tensorboard: {install_hint('tensorboard')}") from error
        # Made with the first record: a writer makes a file at once, and every rank may make a sink.
        self._open = lambda: SummaryWriter(str(log_dir), flush_secs=flush_secs)

    @property
    def _writer(self) -> SummaryWriter:
        if self._opened is None:
            self._opened = self._open()  # type: ignore[no-untyped-call]
        return self._opened

    def write(self, record: Mapping[str, object]) -> None:
        """Take one record; kinds that TensorBoard has no place for are left out."""
        match record["kind"]:
            case "header" | "probe":
                self._add_text("sonde/run", json.dumps(record, indent=2, ensure_ascii=False), record)
            case "alert":
                self._add_text(f"sonde/alert/{record['name']}", str(record["message"]), record)
            case "reading" | "policy" | "metrics":
                self._add_reading(record)

    def close(self) -> None:
        """Write out what is pending and close the file."""
        if self._opened is not None:
            (self._opened.close if self._is_own else self._opened.flush)()

    def _add_reading(self, record: Mapping[str, object]) -> None:
        for tag, value in known_metrics(record).items():
            step = self._step_of(cast(int, record["window"]))
            self._writer.add_scalar(tag, value, global_step=step, walltime=record["time"])

    def _add_text(self, tag: str, text: str, record: Mapping[str, object]) -> None:
        # TensorBoard renders text as Markdown with HTML in it: escaped and in <pre>, it shows as it was written.
        window = cast(int, record.get("window", 0))
        step = self._step_of(window) if window else 0
        self._writer.add_text(tag, f"<pre>{html.escape(text)}</pre>", global_step=step, walltime=record["time"])
