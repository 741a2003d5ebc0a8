from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from sonde.runs.reader import read_run
from sonde.runs.report.write import write_report
from tests.runs.report.plausible_policy import policy_record
from tests.runs.report.plausible_run import header_record, reading_record, write_run


def _log(folder: Path, *lines: object, end: str = "\n") -> Path:
    path = folder / "records.jsonl"
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines) + end)
    return path


def _header(**changes: object) -> str:
    """A header as `JsonlSink` writes it."""
    return '{"kind":"header",' + json.dumps(header_record(**changes))[len('{"kind": "header", ') :]


HEADER = _header()
COMPARISON = {"kind": "comparison", "time": 1.0, "window": 1, "baseline": "a", "per": "token"}


def _with_value(loss: str) -> str:
    """A reading with a loss that JSON would write otherwise."""
    return json.dumps(reading_record(0, 1, metrics={"loss": 0.123})).replace("0.123", loss)


def test_the_file_itself_may_be_named(tmp_path: Path) -> None:
    write_run(tmp_path, 2)
    renamed = (tmp_path / "records.jsonl").rename(tmp_path / "kept.jsonl")
    assert (read_run(renamed).path, read_run(renamed).name) == (renamed, "small language model")
    unnamed = write_run(tmp_path / "tuesday", 1, header=header_record(run=""))
    assert read_run(unnamed).name == "tuesday"


def test_a_series_skips_what_is_not_known(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path, 30))
    windows, values = run.series("gns/b_simple")
    assert windows == [10 * (i + 1) for i in range(10, 30)]  # the first third is a lower bound
    assert values == [reading_record(i, 30)["metrics"]["gns/b_simple"] for i in range(10, 30)]
    assert run.series("no/such/metric") == ([], [])
    bound = run.readings[5]
    assert (bound.metrics["gns/b_simple_high"], bound.now.high, bound.groups["embed"].high) == (
        None,
        math.inf,
        math.inf,
    )


@pytest.mark.parametrize("end", ["", "\n"])
def test_a_torn_last_line_is_left_out_and_said(tmp_path: Path, end: str) -> None:
    whole = json.dumps(reading_record(1, 2))
    for length in (1, 20, len(whole) - 1):
        _log(tmp_path, HEADER, reading_record(0, 2), whole[:length], end=end)
        run = read_run(tmp_path)
        assert [reading.window for reading in run.readings] == [10]
        assert run.torn == "line 3, the last one, is cut off in the middle: the 2 before it were read"


def test_every_tear_is_said(tmp_path: Path) -> None:
    _log(tmp_path, HEADER, '{"kind":"rea', '{"kind":"header","ti', HEADER, reading_record(0, 1), '{"kin')
    run = read_run(tmp_path)
    assert (len(run.headers), len(run.readings)) == (2, 1)
    assert [part.split(" ")[1].rstrip(",") for part in run.torn.split("; ")] == ["2", "3", "6"]


def test_damage_in_the_middle_is_refused_with_its_line(tmp_path: Path) -> None:
    _log(tmp_path, HEADER, reading_record(0, 2), "Traceback (most recent call last):", reading_record(1, 2))
    with pytest.raises(ValueError, match=r"is damaged: line 3 is not a JSON object, got b'Traceback"):
        read_run(tmp_path)


@pytest.mark.parametrize(
    ("second_line", "message"),
    [
        ({"time": 1.0}, "line 2 .* is not a record of schema 4: it lacks 'kind'"),
        ({"kind": "reading", "window": 1}, "line 2 .*: it lacks 'time'. Was it written by another"),
        (reading_record(0, 1, status="superb"), "line 2 .*: 'superb' where one of resolved"),
        (reading_record(0, 1) | {"groups": [1]}, r"line 2 .*: \[1\] where an object is expected"),
        (header_record(schema=2), "record schema 2, expected 4: read it with the version of sonde that wrote it"),
        (_with_value("true"), "line 2 .*: True where a finite number or null is expected"),
        (_with_value('"1.5"'), "line 2 .*: '1.5' where a finite number or null is expected"),
        (_with_value("1" + "0" * 400), "line 2 .*: int too large to convert to float"),
        (_with_value("1e999"), "line 2 .*: inf where a finite number or null is expected"),
        (_with_value("NaN"), "line 2 .*: nan where a finite number or null is expected"),
        (reading_record(0, 1) | {"window": 2**53}, "line 2 .*: 9007199254740992 where a count is expected"),
        (reading_record(0, 1) | {"groups": {"head": {"status": "resolved"}}}, "line 2 .*: it lacks 'b_simple'"),
        ({"kind": "metrics", "window": 2**53, "time": 1.0, "metrics": {}}, "line 2 .*992 where a count is expected"),
        (_header(metrics={"mine": {"meaning": "m"}}), "line 2 .* is not a record of schema 4: it lacks 'unit'"),
        (_header(metrics={"mine": 3}), "line 2 .*: 3 where an object is expected"),
        (policy_record(0) | {"metrics": []}, r"line 2 .*: \[\] where an object is expected"),
        (policy_record(0) | {"shares": {}}, "line 2 .*: {} where an array is expected"),
        (policy_record(0) | {"causes": 1}, "line 2 .*: 1 where an object is expected"),
        (policy_record(0) | {"window": -1}, "line 2 .*: -1 where a count is expected"),
        (COMPARISON | {"options": [{"name": 3}]}, "line 2 .*: 3 where a text is expected"),
    ],
)
def test_records_that_are_not_ours_are_refused(tmp_path: Path, second_line: object, message: str) -> None:
    _log(tmp_path, HEADER, second_line)
    with pytest.raises(ValueError, match=message):
        read_run(tmp_path)


def test_what_is_not_a_run(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"no run at .*nowhere: give the folder"):
        read_run(tmp_path / "nowhere")
    with pytest.raises(FileNotFoundError, match=r"no records\.jsonl in the folder"):
        read_run(tmp_path)
    write_run(tmp_path / "several" / "first", 1)
    with pytest.raises(
        FileNotFoundError, match=r"in the folder .*several, which holds 1 run: give .*, such as .*first$"
    ):
        read_run(tmp_path / "several")
    (tmp_path / "train.py").write_text("print()")
    with pytest.raises(ValueError, match=r"expected a run's folder .* got the file .*train\.py"):
        read_run(tmp_path / "train.py")
    (tmp_path / "records.jsonl").touch()
    with pytest.raises(ValueError, match=r"expected a header record first, got an empty file"):
        read_run(tmp_path)
    _log(tmp_path, '{"step": 1, "loss": 2.0}')
    with pytest.raises(ValueError, match=r"is not a run's log: expected a header record first, got b'{"):
        read_run(tmp_path)
    _log(tmp_path, HEADER[:30], end="")
    with pytest.raises(ValueError, match="holds no whole record yet"):
        read_run(tmp_path)


def _mutations() -> list[tuple[str, str, object]]:
    odd: list[object] = [[], "x", -1, None, 10**400, {"a": []}]
    return [
        (kind, key, value)
        for kind, keys in (
            ("header", ("time", "versions", "setup", "metrics", "metadata", "schema")),
            ("reading", ("time", "window", "status", "metrics", "groups", "dropped", "pieces")),
        )
        for key in keys
        for value in odd
    ]


def _is_refused(folder: Path, reported: set[str]) -> bool:
    """Whether the log gives a clear error rather than a report; any other exception fails the test."""
    try:
        if (read := repr(read_run(folder))) not in reported:  # what reads the same makes the same report
            write_report(folder)
            reported.add(read)
    except ValueError as error:
        return str(folder) in str(error)
    return False


def test_a_hostile_log_is_refused_or_reported_without_a_traceback(tmp_path: Path) -> None:
    """Every field of every record replaced by something odd: a report, or a ValueError that names the line."""
    refused, reported = 0, set[str]()
    for kind, key, value in (mutations := _mutations()):
        records: list[dict[str, object]] = [header_record(), reading_record(0, 2), reading_record(1, 2)]
        next(r for r in records if r["kind"] == kind)[key] = value
        (tmp_path / "records.jsonl").write_text("".join(json.dumps(r, separators=(",", ":")) + "\n" for r in records))
        refused += _is_refused(tmp_path, reported)
    assert 30 < refused < len(mutations)
