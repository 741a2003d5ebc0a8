"""The script for a GPU, on a CPU: its parts, their order, and what is left of a part that fails."""

from __future__ import annotations

import json
import re
from importlib.metadata import requires
from pathlib import Path
from typing import Any

import pytest
from benchmarks.gpt import TINY
from benchmarks.training import Setup
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from benchmarks import gpu_check
from sonde.version import DISTRIBUTION

ROOT = Path(__file__).parents[2]
ON_THE_MACHINE = {"torch", "transformers", "accelerate", "peft", "pytest", "hypothesis", "numpy"}


def lines_of(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "gpu_check.jsonl").read_text().splitlines()]


@pytest.mark.slow
def test_parts_run_on_a_cpu(tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="needs transformers: pip install '.[transformers]'")
    """Those that are not run elsewhere: `tests/test_gpu_bodies.py` runs the tests, `test_scaling.py` FSDP2."""
    some = ["accumulation", "examples", "clip", "entropy"]
    gpu_check.main(["--device", "cpu", "--tiny", "--parts", *some, "--out", str(tmp_path)])
    lines = lines_of(tmp_path)
    found = {(line["part"], line["what"]): line["found"] for line in lines}
    ended = [line["part"] for line in lines if line["what"] == "seconds"]
    assert ended == some
    assert "ended by an error" not in {what for _, what in found}, found
    same = {key: value for key, value in found.items() if "bit for bit" in key[1]}
    assert len(same) == 2 * 4 + 1
    for key, value in same.items():
        n_same, n_tensors = re.findall(r"\d+", value)
        assert n_same == n_tensors, key
    for part in ("accumulation", "examples"):
        assert "ms" in found[part, "one window in 1,000: added to a window"]
        assert "ms" in found[part, "every window: added to a window"]
        assert found[part, "every window: reading"].startswith("B_simple"), part
        assert "20 windows" in found[part, "every window: reading"]  # none was dropped
    assert found["entropy", "forecast"]["delta"] is not None, found["entropy", "forecast"]["reason"]
    page = (tmp_path / "gpu_check.md").read_text()
    assert page.count("\n## ") == 4
    assert "numbers: mean nothing" in page


def finds(setup: Setup, report: gpu_check.Report, seconds: float) -> None:
    report.say("seconds to spend", seconds)


def fails(*_: Any) -> None:
    raise ZeroDivisionError("of the test")


def test_after_a_part_that_fails_the_next_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    setup = Setup(1, 1, micro_batches=1, sequences=1, shape=TINY)
    given = {
        "clip": (30.0, setup, fails, 1.0),
        "entropy": (30.0, setup, finds, 2.0),
    }
    monkeypatch.setattr(gpu_check, "parts", lambda *_, **__: given)
    gpu_check.main(["--device", "cpu", "--tiny", "--out", str(tmp_path)])
    found = {(line["part"], line["what"]): line["found"] for line in lines_of(tmp_path)}
    assert "ZeroDivisionError: of the test" in found["clip", "ended by an error"]
    assert found["entropy", "seconds to spend"] == 2.0


def test_the_wheels_are_all_that_the_machine_lacks() -> None:
    """What sonde and the settings of pytest need, but for what torch and pytest are there with."""
    named = re.search(r"^GPU_WHEELS := (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert named
    needed: set[str] = set()
    missing = ["tyro", "rich", "typing-extensions", "pytest-timeout"]
    own = [Requirement(line) for line in requires(DISTRIBUTION) or ()]
    assert {r.name for r in own if r.marker is None} - ON_THE_MACHINE <= set(missing)
    while missing:
        name = canonicalize_name(missing.pop())
        if name in needed | ON_THE_MACHINE:
            continue
        needed.add(name)
        for line in requires(name) or ():
            other = Requirement(line)
            if other.marker is None or other.marker.evaluate({"extra": "", "python_version": "3.12"}):
                missing.append(other.name)
    assert {canonicalize_name(name) for name in named[1].split()} == needed
