"""Lines of readings that are read into arrays at once, beside the same lines read one by one."""

from __future__ import annotations

import json
import random
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from sonde.runs.reader import read_run, read_windows
from sonde.runs.reading_rows import read_rows
from sonde.runs.run import Run
from tests.runs.report.plausible_run import write_run

NUMBERS = [0, -1, 5e-324, -2.5e-07, 1.7976931348623157e308, 1234567.891, 1e22, 37564928, 0.1, None]


def line(values: list[Any], window: int = 1, **more: object) -> bytes:
    record = {"kind": "reading", "window": window, "time": 1790000053.125, "values": values, **more}
    return json.dumps(record, separators=(",", ":")).encode()


def test_numbers_are_those_of_the_json_parser_to_the_last_bit() -> None:
    rng = random.Random(0)
    rows = [[*NUMBERS, rng.uniform(-1, 1), rng.lognormvariate(0, 90)] for _ in range(2000)]
    read = read_rows([line(row, window=i) for i, row in enumerate(rows)], 12)
    assert read is not None
    assert (read.windows, set(read.times)) == ([*range(2000)], {1790000053.125})
    assert [[None if value != value else value for value in row] for row in read.values.tolist()] == rows


def test_what_stands_beside_the_numbers_is_read_and_groups_are_left_as_json() -> None:
    more: dict[str, Any] = {"status": "resolved", "alerts": {"a": 'values":[1],"groups":[ ]}'}}
    lines = [
        line([1.5]),
        line([2], groups=[["x", 1]]),
        line([3], reason="why [1,2]"),
        line([4], pieces={"tap": "t"}, groups=[]),
    ]
    read = read_rows(lines, 1)
    assert read is not None
    assert read.values[:, 0].tolist() == [1.5, 2, 3, 4]
    assert read.more == {1: {}, 2: {"reason": "why [1,2]"}, 3: {"pieces": {"tap": "t"}}}
    assert {i: json.loads(groups) for i, groups in read.groups.items()} == {1: [["x", 1]], 3: []}
    read = read_rows([line([1], **more)], 1)
    assert read is None or read.more == {0: more}


ODD = [
    line([True]), line(["1.5"]), line([[1]]), line([{}]), line([]), line([1, 2]),
    line([1]).replace(b"[1]", b"[1e999]"), line([1]).replace(b"[1]", b"[nan]"), line([1]).replace(b"[1]", b"[1.2.3]"),
    line([1]).replace(b"[1]", b"[--1]"), line([1]).replace(b"[1]", b"[nul]"), line([1]).replace(b"[1]", b"[]"),
    *(line([1]).replace(b"[1]", b"[%s]" % odd) for odd in (b"-null", b"+1", b"01", b".5", b"5.", b"1e", b"1-2", b"-")),
    line([1]).replace(b"[1]", b"[1" + b"0" * 400 + b"]"),
    line([1]).replace(b'"window":1', b'"window":1.0'), line([1]).replace(b'"window":1', b'"window":01'),
    line([1], window=-1), line([1], window=2**60), line([1]).replace(b'"window":1', b'"window":1.5'),
    line([1]).replace(b'"window":1', b'"window":true'), line([1]).replace(b"1790000053.125", b"-1"),
    line([1]).replace(b"1790000053.125", b"null"), line([1]).replace(b'"window":1', b'"window":null'),
    line([1])[:-1], line([1])[:-2], line([1], reason="r")[:-3], line([1], groups=[["x"]])[:-2], line([1]) + b"x",
    line([1])[:40] + line([1]), line([1], groups=[[1]])[:-5] + line([1], groups=[[1]]),
    line([1], more=1).replace(b'"more"', b'"values"'),
]  # fmt: skip


@pytest.mark.parametrize("odd", ODD, ids=lambda odd: odd.decode()[16:])
def test_a_line_that_is_odd_in_any_way_is_left_to_the_parser(odd: bytes) -> None:
    assert read_rows([line([1]), line([2])], 1) is not None
    assert read_rows([line([1]), odd, line([2])], 1) is None


def test_a_short_row_beside_a_long_row_is_odd_though_their_numbers_add_up() -> None:
    assert read_rows([line([1, 2]), line([1, 2])], 2) is not None
    assert read_rows([line([1]), line([1, 2, 3])], 2) is None


def _same(a: Run, b: Run) -> bool:
    both = [
        [(r.segment, r.window, r.time, r.status, r.reason, r.advice, dict(r.metrics), dict(r.dropped), dict(r.alerts))
         for r in run.readings] for run in (a, b)
    ]  # fmt: skip
    return both[0] == both[1] and a.readings[-1].groups == b.readings[-1].groups and a.ended == b.ended


def test_a_log_with_windows_restarts_and_tears_reads_the_same_in_both_ways(tmp_path: Path) -> None:
    for n in (40, 25):
        write_run(tmp_path, n)
    log = tmp_path / "records.jsonl"
    lines = log.read_bytes().splitlines()
    header = next(i for i, each in enumerate(lines) if i and each.startswith(b'{"kind":"header"'))
    lines.insert(header, lines[header - 2][:70])  # torn by the crash before the restart
    lines.insert(5, b'{"kind":"window","window":7,"time":1790000001.0,"values":[1,2]}')
    log.write_bytes(b"\n".join(lines) + b"\n")
    thinned, whole = read_run(tmp_path, thinned=True), read_run(tmp_path)
    assert _same(thinned, whole)
    assert thinned.torn == whole.torn
    assert f"line {header + 2} was cut off" in str(whole.torn)
    totals = asdict(whole.totals)
    assert totals.pop("sums") == pytest.approx(asdict(thinned.totals)["sums"])
    assert {key: value for key, value in asdict(thinned.totals).items() if key != "sums"} == totals


@pytest.mark.parametrize("thinned", [False, True])
@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("true", "True where a finite number or null is expected"),
        ('"1.5"', "'1.5' where a finite number or null is expected"),
        ("1" + "0" * 400, "int too large to convert to float"),
        ("1e999", "inf where a finite number or null is expected"),
        ("1,2", " values for "),
        ("", " values for "),
    ],
)
def test_a_row_that_does_not_fit_its_columns_is_refused_with_file_and_line(
    tmp_path: Path, thinned: bool, value: str, message: str
) -> None:
    write_run(tmp_path, 30)
    log = tmp_path / "records.jsonl"
    lines = log.read_text().splitlines()
    at = 20
    assert lines[at].startswith('{"kind":"reading"')
    head, _, rest = lines[at].partition('"values":[')
    _, comma, others = rest.partition(",")
    lines[at] = f'{head}"values":[{value}{comma if value else ""}{others}'
    log.write_text("\n".join(lines) + "\n")
    with pytest.raises(ValueError, match=rf"line {at + 1} of .*records\.jsonl is not a record.*{message}"):
        read_run(tmp_path, thinned=thinned)


@pytest.mark.parametrize("thinned", [False, True])
@pytest.mark.parametrize("has_details", [False, True])
def test_damaged_groups_of_the_last_reading_are_refused_with_their_line(
    tmp_path: Path, thinned: bool, has_details: bool
) -> None:
    write_run(tmp_path, 30)
    log = tmp_path / "records.jsonl"
    lines = log.read_text().splitlines()
    if has_details:
        lines.append('{"kind":"details","window":300,"groups":[[1]]}')
        at = len(lines)
    else:
        at = max(i for i, each in enumerate(lines, 1) if '"groups":[[' in each)
        lines[at - 1] = lines[at - 1].partition('"groups":[[')[0] + '"groups":[[1]]}'
    log.write_text("\n".join(lines) + "\n")
    with pytest.raises(ValueError, match=rf"line {at} of .*1 groups for \d columns. Was it written by another program"):
        read_run(tmp_path, thinned=thinned)


@pytest.mark.parametrize("thinned", [False, True])
def test_a_crash_within_the_groups_of_the_last_line_is_read_as_a_crash(tmp_path: Path, thinned: bool) -> None:
    write_run(tmp_path, 20, end=False)
    log = tmp_path / "records.jsonl"
    lines = log.read_bytes().splitlines()
    assert b'"groups":[[' in lines[-1]
    log.write_bytes(b"\n".join([*lines[:-1], lines[-1].partition(b'"groups":[[')[0] + b'"groups":[["]}']))
    run = read_run(tmp_path, thinned=thinned)
    assert run.torn is not None
    assert len(run.readings) == 19


def test_names_that_stand_twice_and_windows_beyond_exact_numbers_are_refused(tmp_path: Path) -> None:
    for n, (damage, message) in enumerate(
        (
            ('{"kind":"columns","of":"reading","values":["a","a"]}', r"\('a', 'a'\) where each name is expected once"),
            ('{"kind":"metrics","window":9007199254740993,"time":1.0,"metrics":{}}', "993 where a count is expected"),
        )
    ):
        write_run(tmp_path / str(n), 2)
        with (tmp_path / str(n) / "records.jsonl").open("a") as log:
            log.write(damage + "\n")
        for thinned in (False, True):
            with pytest.raises(ValueError, match=rf"is not a record of schema 3: .*{message}"):
                read_run(tmp_path / str(n), thinned=thinned)


@pytest.mark.parametrize("value", ["-null", "+1", "01", ".5", "5.", "1e", "1.2.3"])
def test_what_is_no_json_number_is_refused_in_both_ways(tmp_path: Path, value: str) -> None:
    write_run(tmp_path, 30)
    log = tmp_path / "records.jsonl"
    lines = log.read_text().splitlines()
    head, _, rest = lines[20].partition('"values":[')
    lines[20] = f'{head}"values":[{value},{rest.partition(",")[2]}'
    log.write_text("\n".join(lines) + "\n")
    for thinned in (False, True):
        with pytest.raises(ValueError, match="is damaged: line 21 is not a JSON object"):
            read_run(tmp_path, thinned=thinned)


@pytest.mark.parametrize("values", ["[1]", "[1,2,3]", "[true,2]"])
def test_a_window_that_does_not_fit_its_columns_is_refused_with_file_and_line(tmp_path: Path, values: str) -> None:
    write_run(tmp_path, 2)
    with (tmp_path / "records.jsonl").open("a") as log:
        log.write('{"kind":"columns","of":"window","values":["gns/trace_cov","gns/grad_sq"]}\n')
        log.write(f'{{"kind":"window","window":1,"time":1790000001.0,"values":{values}}}\n')
    n = len((tmp_path / "records.jsonl").read_text().splitlines())
    with pytest.raises(ValueError, match=rf"line {n} of .*records\.jsonl is not a record"):
        list(read_windows(tmp_path))
