"""A log that another program has written anew, with spaces or its names in another order, holds the same run."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sonde.log.lines import last_header
from sonde.runs.reader import read_run
from sonde.runs.watch.follow import FollowedRun
from tests.runs.report.plausible_policy import policy_header, policy_record
from tests.runs.report.plausible_run import STARTED, end_record, header_record, reading_record, written

Rewrite = Callable[[Any], str]
REWRITES: dict[str, Rewrite] = {
    "with spaces": json.dumps,
    "sorted": lambda record: json.dumps(record, sort_keys=True, separators=(",", ":")),
    "in ASCII": lambda record: json.dumps(record, ensure_ascii=True, separators=(", ", " : ")),
}
TORN = b'{"kind":"reading","time":17'


def two_runs(folder: Path) -> Path:
    """A run, a torn line, its restart, and another run in the same folder with windows and a policy."""
    readings = [reading_record(i, 12) for i in range(12)]
    fresh = {"kind": "fresh", "time": STARTED}
    written(folder, [header_record(run="first"), fresh, *readings[:4]])
    with (folder / "records.jsonl").open("ab") as log:
        log.write(TORN)
    probe = {key: value for key, value in policy_header().items() if key != "schema"} | {"kind": "probe"}
    window = {"kind": "window", "window": 1, "time": STARTED, "metrics": {"gns/trace_cov": 1.0}, "groups": {}}
    new = [header_record(run="second"), fresh, window, *readings[:3]]
    return written(folder, [header_record(run="first"), *readings[4:], *new, probe, policy_record(1), end_record(30)])


@pytest.fixture(params=REWRITES)
def logs(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, Path]:
    """The log of sonde, and the same log written anew."""
    ours = two_runs(tmp_path / "ours")
    lines = (ours / "records.jsonl").read_bytes().splitlines()
    rewrite = REWRITES[request.param]
    anew = [line if line == TORN else rewrite(json.loads(line)).encode() for line in lines]
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "records.jsonl").write_bytes(b"\n".join(anew) + b"\n")
    return ours, tmp_path / "theirs"


def test_it_is_read_as_the_same_run_which_goes_on_in_it(logs: tuple[Path, Path]) -> None:
    ours, theirs = logs
    expected = read_run(ours)
    assert (expected.name, expected.earlier_runs, len(expected.readings)) == ("second", 1, 3)
    assert replace(read_run(theirs), path=expected.path) == expected
    assert replace(FollowedRun(theirs).run, path=expected.path) == expected
    assert last_header(theirs / "records.jsonl") == last_header(ours / "records.jsonl")
    run = read_run(written(theirs, [header_record(run="second")]))
    assert (len(run.headers), run.ended) == (2, None)


def test_a_restart_after_a_torn_line_is_one(logs: tuple[Path, Path], tmp_path: Path) -> None:
    _, theirs = logs
    lines = (theirs / "records.jsonl").read_bytes().splitlines(keepends=True)
    (tmp_path / "first").mkdir()
    (tmp_path / "first" / "records.jsonl").write_bytes(b"".join(lines[:16]))
    run = read_run(tmp_path / "first")
    assert (run.name, len(run.headers), len(run.readings)) == ("first", 2, 12)
    assert run.torn == "line 7 was cut off when the run was interrupted: it was left out"
    shutil.copytree(tmp_path / "first", tmp_path / "damaged")
    (tmp_path / "damaged" / "records.jsonl").write_bytes(b"".join([*lines[:7], *lines[8:16]]))
    with pytest.raises(ValueError, match=r"line 7 is not a JSON object, .* and no restart follows it"):
        read_run(tmp_path / "damaged")


def test_a_word_in_a_record_makes_no_header(tmp_path: Path) -> None:
    """A record of another kind that holds the name of a kind."""
    metrics = {"loss": 1.0}
    readings = [
        reading_record(i, 3) | {"reason": '"header" "fresh"', "advice": "fresh", "metrics": metrics} for i in (1, 2)
    ]
    run = read_run(written(tmp_path, [header_record(metadata={"header": "fresh"}), *readings]))
    assert (len(run.headers), len(run.readings), run.earlier_runs) == (1, 2, 0)
