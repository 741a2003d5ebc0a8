"""One process writes a log: no second one, no child; and what a full disk or a wrong folder leaves is a sentence."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import time
import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import pytest
from torch import nn

import sonde
from sonde.cli import main
from sonde.log import sinks
from sonde.log.sinks import JsonlSink
from sonde.runs.reader import read_run
from tests.batch_size.loops import windows_of_rows
from tests.new_process import Ended, Python
from tests.runs.report.plausible_run import header_record, reading_record, write_run

ROOT = Path(__file__).parents[2]

WRITER = """
import os, sys, time, pathlib
import sonde
from sonde.log.sinks import JsonlSink
from tests.runs.report.plausible_run import header_record, reading_record
sink = JsonlSink(pathlib.Path(sys.argv[1]))
sink.write(header_record())
sink.write(reading_record(0, 9))
{more}
print("ready", flush=True)
time.sleep(60)
"""


@contextlib.contextmanager
def _writer(folder: Path, more: str = "") -> Iterator[Python]:
    """A process that has written to the log in `folder` and holds it open."""
    with Python("-c", WRITER.replace("{more}", more), str(folder), folder=folder) as writer:
        give_up = time.monotonic() + 60
        while not writer.out().endswith("ready\n"):
            assert time.monotonic() < give_up, "the writer did not get ready"
            time.sleep(0.01)
        yield writer


def _run(code: str, folder: Path) -> Ended:
    """A script that ends well."""
    with Python("-c", code, folder=folder) as python:
        ended = python.wait()
    assert ended.status == 0, ended.err
    return ended


@pytest.fixture
def _no_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sinks, "SECONDS_TO_WAIT", 0.1)


@pytest.mark.usefixtures("_no_patience")
def test_a_second_process_is_refused_and_changes_nothing(tmp_path: Path) -> None:
    with _writer(tmp_path):
        before = (tmp_path / "records.jsonl").read_bytes()
        with pytest.raises(ValueError, match=r"records\.jsonl is open in another run, .* to another folder, or close"):
            sonde.attach(nn.Linear(3, 1), unit="sequences", log=sonde.RunLog(JsonlSink(tmp_path)), verbose=False)
        assert (tmp_path / "records.jsonl").read_bytes() == before
        assert len(read_run(tmp_path).readings) == 1  # reading is never refused


@pytest.mark.usefixtures("_no_patience")
def test_a_second_sink_of_the_same_process_is_refused_until_the_first_is_closed(tmp_path: Path) -> None:
    first, second = JsonlSink(tmp_path), JsonlSink(tmp_path)
    first.write(header_record())
    with pytest.raises(ValueError, match="is open in another run, or in a probe of this process that was not closed"):
        second.write(header_record())
    first.close()
    second.write(header_record())
    second.close()
    assert len(read_run(tmp_path).headers) == 2


@pytest.mark.usefixtures("_no_patience")
def test_a_child_that_outlives_a_crash_does_not_keep_the_restart_out(tmp_path: Path) -> None:
    """As a worker of a data loader does, for some seconds."""
    more = "child = os.fork()\nif child == 0:\n    time.sleep(60)\n    os._exit(0)\nprint(child, flush=True)"
    with _writer(tmp_path, more) as writer:
        child = int(writer.out().splitlines()[0])
        writer.kill()
        writer.wait(10)
        os.kill(child, 0)  # it lives
        write_run(tmp_path, 1)
        os.kill(child, 0)
    assert len(read_run(tmp_path).headers) == 2


def test_a_successor_waits_for_a_writer_that_is_ending(tmp_path: Path) -> None:
    with _writer(tmp_path, "import threading; threading.Timer(0.7, lambda: os._exit(0)).start()") as writer:
        write_run(tmp_path, 1)
        assert writer.wait(10).status == 0
    assert len(read_run(tmp_path).headers) == 2


def test_a_system_without_locks_is_pointed_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(sinks, "fcntl", None)  # as on Windows
    write_run(tmp_path, 1)
    assert "records.jsonl is not locked, as this system has no locks for files: two runs in one folder" in caplog.text


def test_forked_children_write_nothing_and_run_no_exit_handler(tmp_path: Path) -> None:
    """Children that write, close, exit by sys.exit() or are collected: the log holds what the parent wrote."""
    code = f"""
import os, sys
from torch import nn
import sonde
from tests.batch_size.loops import windows_of_rows
model = nn.Linear(3, 1)
class Other:
    def write(self, record): open({str(tmp_path / "other")!r}, "a").write(f"{{os.getpid()}} {{record['kind']}}\\n")
    def close(self): open({str(tmp_path / "other")!r}, "a").write(f"{{os.getpid()}} close\\n")
log = sonde.RunLog([sonde.JsonlSink({str(tmp_path)!r}), Other()], every=1)
probe = sonde.attach(model, unit="rows", log=log, verbose=False)
windows_of_rows(probe, model, 2)
for what in ("exit", "train", "close", "write"):
    if (child := os.fork()) == 0:
        if what == "train":
            windows_of_rows(probe, model, 1)
            probe.reading()
        if what == "close":
            probe.close("by a child")
        if what == "write":
            log.write("alert", window=1, name="child", message="by a child")
        sys.exit(0)  # runs the exit handlers
    assert os.waitpid(child, 0)[1] == 0, what
windows_of_rows(probe, model, 1)
print(os.getpid())
"""
    done = _run(code, tmp_path)
    run = read_run(tmp_path)
    assert [reading.window for reading in run.readings] == [1, 2, 3]
    assert (run.ended, run.alerts, len(run.headers)) == ("the process ended without probe.close()", (), 1)
    writers_of_other_sinks = {line.split()[0] for line in (tmp_path / "other").read_text().splitlines()}
    assert writers_of_other_sinks == {done.out.strip()}


# A full disk.


def test_a_full_disk_is_told_by_the_probe_and_leaves_whole_lines(tmp_path: Path) -> None:
    """The limit of a file's size: as on a full disk, the last write takes a part of the line and then fails."""
    code = f"""
import resource, signal
from torch import nn
import sonde
from tests.batch_size.loops import windows_of_rows
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (30000, 30000))
model = nn.Linear(3, 1)
log = sonde.RunLog(sonde.JsonlSink({str(tmp_path)!r}), every=1)
probe = sonde.attach(model, unit="rows", log=log, every=1, verbose=False)
windows_of_rows(probe, model, 40)
print(probe.reading().windows, dict(probe.alerts))
probe.close()
"""
    done = _run(code, tmp_path)
    assert done.out.startswith("40 {'log_stopped_JsonlSink': ")
    assert "JsonlSink writes no more: [Errno 27] File too large: " in done.out
    assert "Training goes on without that log." in done.out
    assert done.err.count("JsonlSink writes no more") == 1
    run = read_run(tmp_path)
    windows = [reading.window for reading in run.readings]
    assert windows == list(range(1, len(windows) + 1))
    assert 5 < len(windows) < 40
    assert run.torn is None or "is cut off in the middle" in run.torn
    assert (tmp_path / "records.jsonl").stat().st_size <= 30000


def test_a_disk_that_is_full_from_the_start_is_said_before_training(tmp_path: Path) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("this system has no /dev/full")
    os.symlink("/dev/full", tmp_path / "records.jsonl")
    with pytest.raises(OSError, match=r"No space left on device: '.*records\.jsonl'"):
        sonde.attach(nn.Linear(3, 1), unit="rows", log=sonde.RunLog(JsonlSink(tmp_path)), verbose=False)


@pytest.mark.parametrize("replaced", [False, True])
def test_a_log_that_is_removed_below_its_run_is_told_once(
    tmp_path: Path, replaced: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """By rm -r, or by somebody who then starts another run in the same place. The other log goes on."""
    model = nn.Linear(3, 1)
    sinks = [JsonlSink(tmp_path / "removed"), JsonlSink(tmp_path / "kept")]
    with sonde.attach(model, unit="rows", log=sonde.RunLog(sinks, every=1), verbose=False) as probe:
        windows_of_rows(probe, model, 2)
        shutil.rmtree(tmp_path / "removed")
        if replaced:
            write_run(tmp_path / "removed", 1)
        windows_of_rows(probe, model, 3)
        probe.reading()
        assert list(probe.alerts) == ["log_stopped_JsonlSink"]
    assert "was removed, or another file has taken its place" in probe.alerts["log_stopped_JsonlSink"]
    assert sum("writes no more" in record.message for record in caplog.records) == 1
    assert len(read_run(tmp_path / "kept").readings) == 5
    assert (tmp_path / "removed").exists() == replaced


def test_a_log_that_is_moved_goes_on_where_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its records are not lost; nor are they if the run changes its own folder."""
    monkeypatch.chdir(tmp_path)
    sink = JsonlSink("before")
    sink.write(header_record())
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    (tmp_path / "elsewhere" / "before").mkdir()
    (tmp_path / "elsewhere" / "before" / "records.jsonl").touch()
    sink.write(reading_record(0, 2))
    (tmp_path / "before").rename(tmp_path / "after")
    sink.write(reading_record(1, 2))
    sink.close()
    assert len(read_run(tmp_path / "after").readings) == 2


# Folders and files of another kind.


def test_a_folder_that_is_a_file_is_refused_by_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "notes.txt").write_text("precious")
    for folder in (tmp_path / "notes.txt", tmp_path / "notes.txt" / "run"):
        with pytest.raises(ValueError, match=r"a run is logged to a folder, got .*notes\.txt is a file: give another"):
            JsonlSink(folder)
        assert main(["report", str(folder)]) == 2
    (tmp_path / "records.jsonl").mkdir()
    with pytest.raises(ValueError, match=r"a run is logged to a file, but .*records\.jsonl is a folder"):
        JsonlSink(tmp_path)
    assert main(["report", str(tmp_path)]) == 2
    assert "Traceback" not in capsys.readouterr().err
    assert (tmp_path / "notes.txt").read_text() == "precious"


@pytest.mark.parametrize(
    ("beginning", "message"),
    [
        (b"", "is not a run's log: expected a header record first"),
        (b'{"kind":"header","x":"', "line 1 of .* is longer than 16 MiB"),
    ],
)
def test_a_file_without_line_breaks_is_refused_in_little_memory(
    tmp_path: Path, beginning: bytes, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with (tmp_path / "records.jsonl").open("wb") as file:
        file.write(beginning)
        file.truncate(3 * 2**30)  # 3 GB of zeros that take no place on the disk
    tracemalloc.start()
    try:
        assert main(["report", str(tmp_path)]) == 2
        with pytest.raises(ValueError, match=message):
            JsonlSink(tmp_path)
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert re.search(message, capsys.readouterr().err)
    assert most < 200 * 2**20
