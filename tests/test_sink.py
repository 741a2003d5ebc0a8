"""What one sink does wrong costs neither the others nor the run; a signal within a sink's `write` finds no way in."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import sonde
from sonde.runs.locked_file import LockedFile
from tests.batch_size.loops import Recording


class Own:
    """A probe of one's own."""

    def step(self) -> None:
        pass

    def metrics(self) -> dict[str, float | None]:
        return {"mine": 1.0}

    def close(self) -> None:
        pass


class Interrupted(Recording):
    """SIGTERM arrives while it writes the second measurement, as if within its lock: it must not be entered then."""

    is_inside = was_entered_twice = False

    def write(self, record: Any) -> None:
        self.was_entered_twice |= self.is_inside
        self.is_inside = True
        try:
            if record["kind"] == "metrics" and record["window"] == 2:
                signal.raise_signal(signal.SIGTERM)
            super().write(record)
        finally:
            self.is_inside = False

    def close(self) -> None:
        self.was_entered_twice |= self.is_inside
        super().close()

    def write_report(self) -> None:
        self.was_entered_twice |= self.is_inside
        self.records.append({"kind": "report"})


@pytest.fixture
def install() -> Iterator[Callable[[Callable[[], object]], None]]:
    """Installs a handler of SIGTERM for one test."""
    before = signal.getsignal(signal.SIGTERM)

    def installed(handler: Callable[[], object]) -> None:
        signal.signal(signal.SIGTERM, lambda *_: handler())

    yield installed
    signal.signal(signal.SIGTERM, before)


def kinds(sink: Recording) -> list[str]:
    return [record["kind"] for record in sink.records]


def test_a_sink_that_a_signal_interrupts_gets_the_handlers_records_afterwards(
    install: Callable[[Callable[[], object]], None],
) -> None:
    install(lambda: None)
    sink, other, own = Interrupted(), Recording(), Own()
    log = sonde.RunLog([sink, other])
    for step in (1, 2, 3):
        log.measure(own, step)
    log.end("done", window=3)
    assert not sink.was_entered_twice
    assert kinds(sink) == ["header", "metrics", "metrics", "end", "metrics", "end", "report"]
    assert kinds(other) == ["header", "metrics", "end", "metrics", "metrics", "end"]  # written while the first waited
    assert (sink.closed, other.closed) == (1, 1)


def test_a_handler_that_ends_the_log_and_raises_leaves_the_interrupted_sink_whole(
    install: Callable[[Callable[[], object]], None],
) -> None:
    def stop() -> None:
        log.end("stopped", window=2)
        raise KeyboardInterrupt

    install(stop)
    sink, other, own = Interrupted(), Recording(), Own()
    log = sonde.RunLog([sink, other])
    log.measure(own, 1)
    with pytest.raises(KeyboardInterrupt):
        log.measure(own, 2)
    assert not sink.was_entered_twice
    assert (kinds(sink), sink.closed) == (["header", "metrics", "end", "report"], 1)
    assert (kinds(other), other.closed) == (["header", "metrics", "end"], 1)


def test_an_error_of_a_handler_is_not_taken_for_the_sinks(install: Callable[[Callable[[], object]], None]) -> None:
    """As one that leaves the training loop. It is an ordinary exception, and arrives within `write`."""

    class Preempted(Exception):
        pass

    def stop() -> None:
        raise Preempted

    install(stop)
    sink, own = Interrupted(), Own()
    log = sonde.RunLog(sink)
    log.measure(own, 1)
    with pytest.raises(Preempted):
        log.measure(own, 2)
    assert (log.alerts, log.has_sinks) == ({}, True)
    log.end("done", window=2)
    assert kinds(sink) == ["header", "metrics", "end", "report"]


@pytest.mark.parametrize("is_written", [False, True])
def test_a_signal_within_the_write_of_a_log_on_disk_leaves_whole_lines(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    install: Callable[[Callable[[], object]], None],
    is_written: bool,
) -> None:
    """The handler's records reach the disk at once, before or after the line that the signal interrupted."""
    install(lambda: lines.append(records.read_text().splitlines()[-1]))
    append, records, lines = LockedFile.append, tmp_path / "records.jsonl", list[str]()

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
    assert len(lines) == 1
    assert lines[0].startswith('{"kind":"end"')
    run = sonde.read_run(tmp_path)
    assert [reading.window for reading in run.own] == [1, 2, 3]
    assert (run.ended, run.torn) == ("done, after the process was told to end (SIGTERM)", None)


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
