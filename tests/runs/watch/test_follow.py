"""A log that is followed while it is written holds what `read_run` reads of its whole lines, whatever happens to it."""

from __future__ import annotations

import os
import random
import shutil
from dataclasses import replace
from pathlib import Path

from sonde.log.sinks import JsonlSink
from sonde.runs.reader import read_run
from sonde.runs.watch.follow import FollowedRun
from tests.runs.report.plausible_policy import policy_header, policy_record
from tests.runs.report.plausible_run import (
    Record,
    alert_record,
    end_record,
    header_record,
    reading_record,
    write_run,
    written,
)

FRESH: Record = {"kind": "fresh"}


def _eventful_log(folder: Path) -> bytes:
    """Two probes, a restart after a torn line, an end, and two more runs in the same folder."""
    readings = [reading_record(i, 12) for i in range(12)]
    further = {key: value for key, value in policy_header(unit="prompts").items() if key != "schema"}
    written(folder, [header_record(), FRESH, {**further, "kind": "probe"}, *readings[:3], policy_record(1)])
    with (folder / "records.jsonl").open("ab") as log:
        log.write(b'{"kind":"reading","time":17')
    written(folder, [header_record(), *readings[2:6], alert_record(), end_record(60)])
    written(folder, [header_record(run="second"), FRESH, *readings[:4], {"kind": "window", "window": 41}])
    written(folder, [header_record(run="third"), *readings[:2], FRESH, *readings[2:5], end_record(50)])
    return (folder / "records.jsonl").read_bytes()


def test_it_holds_what_the_whole_lines_hold_wherever_it_is_looked_at(tmp_path: Path) -> None:
    log = _eventful_log(tmp_path / "whole")
    (tmp_path / "watched").mkdir()
    watched, prefix = tmp_path / "watched" / "records.jsonl", tmp_path / "records.jsonl"
    first = log.index(b"\n") + 1
    watched.write_bytes(log[:first])
    followed = FollowedRun(tmp_path / "watched")
    # Within lines, and at the end of each.
    ends = {k + 1 for k, byte in enumerate(log) if byte == ord("\n")}
    cuts = sorted({*random.Random(0).sample(range(first, len(log)), 60), *ends} - {first})
    seen = set()
    for begin, end in zip([first, *cuts], cuts, strict=False):
        with watched.open("ab") as file:
            file.write(log[begin:end])
        followed.refresh()
        prefix.write_bytes(log[: log.rindex(b"\n", 0, end) + 1])
        expected = read_run(prefix)
        cut_off = expected.torn if expected.torn and "the last one" in expected.torn else None
        assert replace(followed.run, path=prefix) == replace(expected, torn=None if cut_off else expected.torn)
        assert followed.problem == ""
        seen.add((followed.run.name, len(followed.run.headers), followed.run.earlier_runs, bool(followed.run.torn)))
    assert ("third", 1, 2, False) in seen  # the log is eventful
    assert ("small language model", 2, 0, True) in seen


def test_only_what_was_appended_is_read(tmp_path: Path) -> None:
    """What lies before it may become unreadable: nobody looks at it again."""
    write_run(tmp_path, 20, end=False)
    followed = FollowedRun(tmp_path)
    assert len(followed.run.readings) == 20
    path = tmp_path / "records.jsonl"
    log = path.read_bytes()
    header, _, rest = log.partition(b"\n")
    path.write_bytes(header + b"\n" + b"x" * (len(rest) - 1) + b"\n" + log.splitlines()[-1] + b"\n")
    followed.refresh()
    assert followed.problem == ""
    assert len(followed.run.readings) == 21
    version = followed.version
    followed.refresh()
    assert followed.version == version  # nothing new, nothing to draw


def test_a_folder_that_disappears_is_told_and_waited_for(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", 5, end=False)
    followed = FollowedRun(folder)
    before = followed.run
    folder.rename(tmp_path / "elsewhere")
    followed.refresh()
    assert followed.problem == f"{folder} holds no log any more: what it held is shown until the log is back"
    assert followed.run is before
    (tmp_path / "elsewhere").rename(folder)
    followed.refresh()
    assert (followed.problem, len(followed.run.readings)) == ("", 5)
    # Another run in its place, with a longer log, and perhaps the same inode.
    shutil.rmtree(folder)
    write_run(folder, 30, header=header_record(run="another", time=header_record()["time"] + 9), seed=1)
    followed.refresh()
    assert (followed.run.name, len(followed.run.readings)) == ("another", 30)


def test_a_log_that_cannot_be_read_is_told_until_it_changes(tmp_path: Path) -> None:
    write_run(tmp_path, 5, end=False)
    followed = FollowedRun(tmp_path)
    path = tmp_path / "records.jsonl"
    log = path.read_bytes()
    path.write_bytes(log + b"Traceback (most recent call last):\n" + log.splitlines()[1] + b"\n")
    for _ in range(2):
        followed.refresh()
        assert f"{path} is damaged: line 7 is not a JSON object" in followed.problem
        assert len(followed.run.readings) == 5
    path.write_bytes(log + log.splitlines()[1] + b"\n")  # the damaged line was taken out
    followed.refresh()
    assert (followed.problem, len(followed.run.readings)) == ("", 6)
    written(tmp_path, [header_record(), reading_record(5, 6, status="superb")])
    followed.refresh()
    assert "'superb' where one of resolved" in followed.problem


def test_a_log_that_may_not_be_read_is_told_until_it_may(tmp_path: Path) -> None:
    followed = FollowedRun(write_run(tmp_path / "run", 5, end=False))
    is_root = os.geteuid() == 0
    followed.path.chmod(0)
    if is_root:  # permissions do not bind root, so that it is the user `nobody` meanwhile
        os.seteuid(65534)
    followed.refresh()
    if is_root:
        os.seteuid(0)
    followed.path.chmod(0o755)
    expected = "cannot be read (Permission denied): what it held is shown until it can be read"
    assert followed.problem == f"{followed.path} {expected}"
    followed.refresh()
    assert followed.problem == ""


def test_the_run_is_not_touched(tmp_path: Path) -> None:
    """It is followed while its writer holds the log, and a writer can take the log while it is followed."""
    sink = JsonlSink(tmp_path)
    sink.write(header_record())
    followed = FollowedRun(tmp_path)
    sink.write(reading_record(0, 2))
    followed.refresh()
    assert len(followed.run.readings) == 1
    sink.close()
    log = (tmp_path / "records.jsonl").read_bytes()
    successor = JsonlSink(tmp_path)
    successor.lock(patience=0)
    followed.refresh()
    successor.close()
    assert [path.name for path in tmp_path.iterdir()] == ["records.jsonl"]
    assert (tmp_path / "records.jsonl").read_bytes() == log
