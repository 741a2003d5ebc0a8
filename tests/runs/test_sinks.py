from __future__ import annotations

import json
import math
import signal
import time
from pathlib import Path

import pytest
from torch import nn

import sonde
from sonde.log.sinks import JsonlSink
from sonde.runs.reader import read_run
from tests.new_process import Python
from tests.read_only import read_only_folder
from tests.runs.report.plausible_run import end_record, header_record, reading_record, written


@pytest.mark.parametrize("torn", [b'{"kind":"reading","win', b"{", b'{"kind":"header","sch', b"\0" * 100, b"\xff\xfe"])
def test_a_torn_line_does_not_merge_with_the_next_record(tmp_path: Path, torn: bytes) -> None:
    written(tmp_path, [header_record(), reading_record(0, 2)])
    with (tmp_path / "records.jsonl").open("ab") as file:
        file.write(torn)
    before = (tmp_path / "records.jsonl").read_bytes()
    written(tmp_path, [header_record(), reading_record(1, 2)])
    assert (tmp_path / "records.jsonl").read_bytes().startswith(before + b"\n")
    run = read_run(tmp_path)
    assert [reading.window for reading in run.readings] == [10, 20]
    assert run.torn == "line 3 was cut off when the run was interrupted: it was left out"


def test_a_header_torn_at_any_byte_is_survived(tmp_path: Path) -> None:
    whole = json.dumps(header_record(), separators=(",", ":")).encode()
    for length in (1, 8, 16, 17, len(whole) - 1):
        folder = tmp_path / str(length)
        folder.mkdir()
        (folder / "records.jsonl").write_bytes(whole[:length])
        written(folder, [header_record(), reading_record(0, 1)])
        run = read_run(folder)
        assert (len(run.headers), len(run.readings)) == (1, 1)
        assert run.torn is not None


def test_a_killed_writer_leaves_whole_lines(tmp_path: Path) -> None:
    code = (
        "import sys, pathlib\n"
        "from sonde.log.sinks import JsonlSink\n"
        "from tests.runs.report.plausible_run import header_record, reading_record\n"
        "groups = [f'layer {k}' for k in range(300)]\n"  # 40 kB a line: more than any buffer on the way
        "sink = JsonlSink(pathlib.Path(sys.argv[1]))\n"
        "sink.write(header_record())\n"
        "record = reading_record(5, 10, groups=groups)\n"
        "window = 0\n"
        "while True:\n"
        "    window += 1\n"
        "    sink.write(record | {'window': window})\n"
    )
    for life in range(2):
        with Python("-c", code, str(tmp_path), folder=tmp_path) as writer:
            _wait_for_bytes(tmp_path / "records.jsonl", beyond=2_000_000 * (life + 1))
            writer.kill()
            assert writer.wait(10).status == -signal.SIGKILL
        run = read_run(tmp_path)
        assert len(run.headers) == life + 1
        windows = [reading.window for reading in run.readings if reading.segment == life]
        assert windows == list(range(1, len(windows) + 1))  # none lost, none out of order
        assert len(windows) > 10
        assert run.ended is None


def _wait_for_bytes(path: Path, beyond: int) -> None:
    deadline = time.monotonic() + 20
    while not path.exists() or path.stat().st_size < beyond:
        assert time.monotonic() < deadline, "the writer did not write"
        time.sleep(0.005)


@pytest.mark.parametrize(
    "content", [b"epoch,loss\n1,2.3\n", b'{"kind":"reading"}\n', b'{"step": 1}\n', b"\n", b"\x89PNG"]
)
def test_a_foreign_file_is_refused_and_left_alone(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "records.jsonl").write_bytes(content)
    with pytest.raises(ValueError, match=r"is not a run's log: expected a header .* log to another folder"):
        JsonlSink(tmp_path)
    assert (tmp_path / "records.jsonl").read_bytes() == content


def test_a_log_that_nobody_could_read_afterwards_is_left_alone(tmp_path: Path) -> None:
    log, line = tmp_path / "records.jsonl", '{"kind":"header","schema":2,"unit":"rows"}'
    log.write_text(line + "\n")
    with pytest.raises(ValueError, match=r"a header of record schema 2, expected 4.* written; log to another folder"):
        JsonlSink(tmp_path)
    assert log.read_text() == line + "\n"


@pytest.mark.parametrize("value", [math.nan, math.inf, object(), {1, 2}, "x" * (17 * 2**20)], ids=lambda x: str(x)[:9])
def test_what_could_not_be_read_back_is_refused_and_nothing_is_written(tmp_path: Path, value: object) -> None:
    sink = JsonlSink(tmp_path)
    sink.write(header_record())
    before = sink.path.read_bytes()
    with pytest.raises(ValueError, match=r"a 'reading' record m(ust hold JSON values only|ay have 16 MiB, got 17 MiB)"):
        sink.write(reading_record(0, 1, reason=value))
    assert sink.path.read_bytes() == before
    sink.close()


def test_order_of_calls(tmp_path: Path) -> None:
    sink = JsonlSink(tmp_path)
    with pytest.raises(RuntimeError, match="a run starts with its header, got a 'reading' record"):
        sink.write(reading_record(0, 1))
    sink.write(header_record())
    sink.close()
    sink.close()
    with pytest.raises(RuntimeError, match="is closed, got a 'end' record"):
        sink.write(end_record(10))


def test_a_log_that_cannot_be_written_says_where_and_what_to_do() -> None:
    for mode, inside in ((0o555, "."), (0o555, "a/b"), (0o000, "a")):  # the last may not even be looked into
        with read_only_folder(mode) as folder, pytest.raises(PermissionError, match=r"log .*: '.*read-only"):
            sonde.attach(nn.Linear(2, 1), unit="rows", log=folder / inside, verbose=False)
