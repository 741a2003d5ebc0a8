"""What one sink does wrong costs neither the others nor the run; a signal within a `write` leaves whole lines."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import sonde
from sonde.log.sinks import LockedFile
from tests.batch_size.loops import Recording


class Own:
    """A probe of one's own."""

    def step(self) -> None:
        pass

    def metrics(self) -> dict[str, float | None]:
        return {"mine": 1.0}

    def close(self) -> None:
        pass


@pytest.fixture
def install() -> Iterator[Callable[[Callable[[], object]], None]]:
    """Installs a handler of SIGTERM for one test."""
    before = signal.getsignal(signal.SIGTERM)

    def installed(handler: Callable[[], object]) -> None:
        signal.signal(signal.SIGTERM, lambda *_: handler())

    yield installed
    signal.signal(signal.SIGTERM, before)


@pytest.mark.parametrize("is_written", [False, True])
def test_a_signal_within_the_write_of_a_log_on_disk_leaves_whole_lines(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    install: Callable[[Callable[[], object]], None],
    is_written: bool,
) -> None:
    """A handler of the user's measures too: its record is on disk before or after the line that it interrupted."""
    install(lambda: log.measure(own, 7))
    append = LockedFile.append

    def interrupted(file: LockedFile, line: bytes) -> None:
        monkeypatch.setattr(LockedFile, "append", append)
        if is_written:
            append(file, line)
        signal.raise_signal(signal.SIGTERM)
        if not is_written:
            append(file, line)

    log, own = sonde.RunLog(sonde.JsonlSink(tmp_path)), Own()
    log.measure(own, 1)
    monkeypatch.setattr(LockedFile, "append", interrupted)
    for step in (2, 3):
        log.measure(own, step)
    log.end("done", window=3)
    run = sonde.read_run(tmp_path)
    assert [reading.window for reading in run.own] == ([1, 2, 7, 3] if is_written else [1, 7, 2, 3])
    assert (run.ended, run.torn) == ("done", None)


class Refuses(Recording):
    """Refuses the metrics of some windows, as a file does that was closed."""

    def __init__(self, windows: range) -> None:
        super().__init__()
        self.windows, self.n_calls = windows, 0

    def write(self, record: Any) -> None:
        self.n_calls += 1
        if record["kind"] == "metrics" and record["window"] in self.windows:
            raise ValueError("I/O operation on closed file")
        super().write(record)


def test_a_sink_that_refuses_everything_is_told_at_once_and_then_left_alone(caplog: pytest.LogCaptureFixture) -> None:
    sink, own = Refuses(range(1, 100)), Own()
    log = sonde.RunLog(sink)
    log.measure(own, 1)
    refused = "Refuses refused a 'metrics' record, which it lacks now: I/O operation on closed file"
    assert log.alerts == {"log_refused_Refuses": refused}
    for step in range(2, 20):
        log.measure(own, step)
    assert list(log.alerts) == ["log_refused_Refuses", "log_stopped_Refuses"]
    assert "writes no more: it refused 3 records in a row, the last one with: I/O" in log.alerts["log_stopped_Refuses"]
    assert (sink.n_calls, sink.closed, log.has_sinks) == (1 + 3, 1, False)
    assert len(caplog.records) == 2
    log.end("done", window=20)
    assert sink.closed == 1


def test_a_sink_that_refuses_now_and_then_goes_on() -> None:
    sink, own = Refuses(range(0, 100, 2)), Own()
    log = sonde.RunLog(sink)
    for step in range(1, 10):
        log.measure(own, step)
    log.end("done", window=9)
    assert [record["window"] for record in sink.of_kind("metrics")] == [1, 3, 5, 7, 9]
    assert list(log.alerts) == ["log_refused_Refuses"]
