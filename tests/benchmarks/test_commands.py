"""Each benchmark is a command of its own: it imports what it needs, and says its options."""

from __future__ import annotations

import re
from pathlib import Path

from tests.new_process import Python

ROOT = Path(__file__).parents[2]
COMMANDS = sorted(
    path.stem for path in (ROOT / "benchmarks").glob("*.py") if "argparse.ArgumentParser(" in path.read_text()
)


ASKED = """
import runpy, sys
for name in {}:
    sys.argv = [name, "--help"]
    try:
        runpy.run_module(f"benchmarks.{{name}}", run_name="__main__")
    except SystemExit as end:
        assert end.code in (0, None), (name, end.code)
    else:
        raise AssertionError(f"{{name}} went on after --help")
"""


def test_all_benchmarks_of_the_makefile_are_here() -> None:
    started = set(re.findall(r"-m benchmarks\.(\w+)", (ROOT / "Makefile").read_text()))
    assert started <= set(COMMANDS)
    assert len(started) > 5


def test_each_says_its_options() -> None:
    """In one new process, which imports torch and the other packages once."""
    with Python("-c", ASKED.format(COMMANDS), folder=ROOT) as python:
        ended = python.wait()
    assert ended.status == 0, ended.err
    assert ended.out.count("--help") == len(COMMANDS)
