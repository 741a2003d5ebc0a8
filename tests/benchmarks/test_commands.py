"""Each benchmark is a command that says its options; those of the Makefile are there, and name a device that is."""

from __future__ import annotations

import re
import runpy
import sys
from pathlib import Path

import pytest

from benchmarks import budget, noise_scale, norm, scaling

ROOT = Path(__file__).parents[2]
COMMANDS = sorted(
    path.stem for path in (ROOT / "benchmarks").glob("*.py") if "argparse.ArgumentParser(" in path.read_text()
)


@pytest.mark.filterwarnings("ignore")  # TRL and what it imports cause various warnings
@pytest.mark.parametrize("name", COMMANDS)
def test_each_says_its_options(name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """In this process, which has imported what most of them need."""
    monkeypatch.setattr(sys, "argv", [name, "--help"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_module(f"benchmarks.{name}", run_name="__main__")
    assert ended.value.code in (0, None)
    assert "--help" in capsys.readouterr().out


def test_all_benchmarks_of_the_makefile_are_here() -> None:
    started = set(re.findall(r"-m benchmarks\.(\w+)", (ROOT / "Makefile").read_text()))
    assert started <= set(COMMANDS)


@pytest.mark.parametrize("benchmark", [noise_scale, norm, scaling, budget])
def test_a_device_that_is_not_there_is_refused(benchmark: object, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        benchmark.main(["--device", "hpu"])  # type: ignore[attr-defined]
    assert "there is no device 'hpu' on this machine" in " ".join(capsys.readouterr().err.split())
