"""Each benchmark is a command of its own: it imports what it needs, and says its options."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.new_process import Python

ROOT = Path(__file__).parents[2]
COMMANDS = sorted(
    path.stem for path in (ROOT / "benchmarks").glob("*.py") if "argparse.ArgumentParser(" in path.read_text()
)


def test_all_benchmarks_of_the_makefile_are_here() -> None:
    started = set(re.findall(r"-m benchmarks\.(\w+)", (ROOT / "Makefile").read_text()))
    assert started <= set(COMMANDS)
    assert len(started) > 5


@pytest.mark.parametrize("name", COMMANDS)
def test_help(name: str) -> None:
    with Python("-m", f"benchmarks.{name}", "--help", folder=ROOT) as python:
        ended = python.wait()
    assert ended.status == 0, ended.err
    assert "--help" in ended.out
