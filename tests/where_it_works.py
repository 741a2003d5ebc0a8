"""Runs the tests with the torch and Python that are installed, and writes the result into docs/where-it-works.md.

    make test-torch TORCH=2.9.1     # or: python -m tests.where_it_works [options of pytest]

The page has one row for each pair of torch and Python; a run replaces its own row.
"""

from __future__ import annotations

import datetime
import importlib.metadata
import platform
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

PAGE = Path(__file__).parent.parent / "docs" / "where-it-works.md"
# Benchmarks and pictures of the report do not depend on torch. The page's own tests need the rows of earlier runs.
SELECTED = ["-m", "not browser", "--ignore=tests/benchmarks", "--ignore=tests/test_where_it_works.py"]
SELECTED += ["--deselect=tests/test_house.py::test_nothing_has_grown"]  # calls are counted with CI's torch


@dataclass(frozen=True)
class Row:
    """One line of the page's table of runs."""

    torch: str
    python: str
    trl: str
    transformers: str
    date: str
    passed: int
    failed: int
    skipped: int

    def __str__(self) -> str:
        cells = (self.torch, self.python, self.trl, self.transformers, self.date)
        return f"| {' | '.join(cells)} | {self.passed:,} | {self.failed:,} | {self.skipped:,} |"

    @property
    def order(self) -> list[tuple[int, ...]]:
        """Sorts by torch, then by Python."""
        return [version_tuple(self.torch), version_tuple(self.python)]


def version_tuple(version: str) -> tuple[int, ...]:
    """`2.13.0+cpu` as (2, 13, 0)."""
    return tuple(int(part) for part in re.findall(r"\d+", version.split("+")[0]))


def rows(page: str) -> list[Row]:
    """The rows of the page's table."""
    found = []
    for line in page.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) == 8 and re.match(r"\d+\.\d+", cells[0]):
            passed, failed, skipped = (int(cell.replace(",", "")) for cell in cells[5:])
            found.append(Row(*cells[:5], passed, failed, skipped))
    return found


def with_row(page: str, new: Row) -> str:
    """The page with this row, in place of the row of the same torch and Python."""
    old = rows(page)
    kept = [row for row in old if (row.torch, row.python) != (new.torch, new.python)]
    table = "".join(f"{row}\n" for row in sorted([*kept, new], key=lambda row: row.order))
    head, rule, rest = page.partition("|---|---|---|---|---|---:|---:|---:|\n")
    if not rule:
        raise ValueError("the page has no table of runs: its rule is | five times ---, three times ---: |")
    return head + rule + table + rest[sum(len(f"{row}\n") for row in old) :]


class Outcomes:
    """A pytest plugin that counts how many tests passed, failed or were skipped."""

    passed = failed = skipped = 0

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        n_by_outcome = {name: len(reports) for name, reports in terminalreporter.stats.items()}
        self.passed = n_by_outcome.get("passed", 0)
        self.failed = n_by_outcome.get("failed", 0) + n_by_outcome.get("error", 0)
        self.skipped = n_by_outcome.get("skipped", 0)


def version_of(package: str) -> str:
    """The installed version; "none" if a package is missing."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "none"


def main(options: Sequence[str]) -> int:
    """Run pytest with these options, print the row, and write it unless the run was cut short."""
    outcomes = Outcomes()
    status = pytest.main([*SELECTED, *options], plugins=[outcomes])
    row = Row(
        version_of("torch").split("+")[0],
        platform.python_version(),
        version_of("trl"),
        version_of("transformers"),
        datetime.datetime.now(datetime.UTC).date().isoformat(),
        outcomes.passed,
        outcomes.failed,
        outcomes.skipped,
    )
    sys.stdout.write(f"{row}\n")
    if status in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
        PAGE.write_text(with_row(PAGE.read_text(), row))
    return int(status)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
