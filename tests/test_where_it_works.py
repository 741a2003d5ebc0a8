"""The table of docs/where-it-works.md: how a run is written into it, and what it must say."""

from __future__ import annotations

import dataclasses
import re
import tomllib

import pytest

from sonde.version import TESTED
from tests.where_it_works import PAGE, Row, rows, version_tuple, with_row

ROW = Row("2.9.1", "3.11.7", "1.16.0", "5.23.0", "2026-11-22", 1800, 0, 12)
TABLE = """before
| torch | Python | TRL | transformers | date | passed | failed | skipped |
|---|---|---|---|---|---:|---:|---:|
{}
after
"""


def test_a_run_replaces_the_row_of_its_torch_and_python_and_no_other() -> None:
    newer, other_python = dataclasses.replace(ROW, torch="2.14.1"), dataclasses.replace(ROW, python="3.13.0")
    page = TABLE.format(f"{ROW}\n{newer}")
    again = dataclasses.replace(ROW, passed=1801, failed=2)
    assert with_row(page, again) == TABLE.format(f"{again}\n{newer}")
    assert with_row(page, other_python) == TABLE.format(f"{ROW}\n{other_python}\n{newer}")
    assert rows(with_row(page, other_python)) == [ROW, other_python, newer]


def test_a_first_run_begins_the_table() -> None:
    empty = TABLE.replace("{}\n", "")
    assert with_row(empty, ROW) == TABLE.format(ROW)
    with pytest.raises(ValueError, match="the page has no table of runs"):
        with_row("before\nafter\n", ROW)


def test_the_oldest_torch_and_python_that_are_promised_have_run() -> None:
    project = tomllib.loads((PAGE.parent.parent / "pyproject.toml").read_text())["project"]
    (torch,) = (name.removeprefix("torch>=") for name in project["dependencies"] if name.startswith("torch>="))
    python = project["requires-python"].removeprefix(">=")
    runs = rows(PAGE.read_text())
    assert all(row.failed == 0 and row.passed > 1000 for row in runs)
    declared = set(re.findall(r"Python :: (\d\.\d+)", "\n".join(project["classifiers"])))
    assert {row.python.rpartition(".")[0] for row in runs} == declared
    assert version_tuple(torch) == min(version_tuple(row.torch)[:2] for row in runs)
    assert version_tuple(python) == min(version_tuple(row.python)[:2] for row in runs)
    assert f"sonde needs torch {torch} or later and Python {python} or later." in PAGE.read_text()
    assert f"(Python {python} or later, torch {torch} or later)" in (PAGE.parent.parent / "README.md").read_text()


def test_the_tested_range_that_messages_name_is_the_page_s() -> None:
    """What the page says has run, in its table and below it."""
    versions = PAGE.read_text().partition("## Versions")[2].partition("Not run")[0]
    ran = {
        "torch": re.findall(r"(?:^\| |torch )(2\.\d+)\.\d", versions, re.M),
        "Python": re.findall(r"(?:\| |Python )(3\.1\d)\b", versions),
    }
    for name, found in ran.items():
        first, beyond = map(version_tuple, TESTED[name])
        assert (min(map(version_tuple, found)), max(map(version_tuple, found))) == (first, (beyond[0], beyond[1] - 1))
