"""Every block of Python in README.md and docs/ runs, and prints what it claims. Commands and options exist."""

from __future__ import annotations

import dataclasses
import importlib.util
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

import sonde
from sonde.cli import main, options_of
from tests import docs_trainer_scenes  # noqa: F401 (declares a scene)
from tests.docs_blocks import PAGES, ROOT, Block, Page, commands, pattern_of, python_blocks
from tests.docs_scenes import SCENES, plain
from tests.ranks import Ranks

WITH_BLOCKS = [page for page in PAGES if python_blocks(page)]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # pages use TRL and other packages, which warn of this and that
@pytest.mark.parametrize("path", WITH_BLOCKS, ids=lambda path: path.name)
def test_blocks_run_as_printed(path: Path, ranks2: Ranks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    # Which windows a budget leaves out depends on the clock.
    monkeypatch.setitem(sonde.attach.__kwdefaults__, "budget", None)
    page = Page(path, ranks2)
    SCENES.get(path.name, plain)(page)
    assert page.left == [], f"no scene runs line {page.left[0].line} of {path.name}"


def test_a_claim_that_is_not_printed_is_found() -> None:
    claim = "B_simple 38.2 sequences [34.9 – 43.1], …, 240 windows: the batch is about right"
    assert re.search(
        pattern_of(claim), "B_simple 6 sequences [4 – 1,000], batch 12, 20 windows: the batch is about right"
    )
    assert not re.search(pattern_of(claim), "B_simple > 6 sequences, batch 12, 20 windows: the batch is about right")
    with pytest.raises(AssertionError, match=r"README claims 'norm 1\.5'"):
        Block(Path("README"), 1, 1, 'print("n", 2)  # norm 1.5\n').run({})


def test_the_first_example_of_the_readme_takes_one_line() -> None:
    block, *_ = python_blocks(ROOT / "README.md")
    added = [line.strip().split("  #")[0] for line in block.code.splitlines() if re.search("sonde|probe", line)]
    assert added == ["import sonde", 'probe = sonde.attach(model, optimizer, unit="sequences", log="runs/my-run")']


def test_readings_are_printed_as_the_pages_show_them() -> None:
    known: dict[str, Any] = {field.name: None for field in dataclasses.fields(sonde.NoiseScaleReading)}
    known |= {"b_simple": 38.2, "low": 34.9, "high": 43.1, "status": "resolved", "reason": "", "advice": ""}
    known |= {"windows": 240, "units_per_window": 32.0, "every": 1.0}
    known |= {"unit": "sequences", "doubts": {}, "dropped": {}, "further_units": {}, "n_steps": 240, "first_step": 1}
    known |= {"warms_up": False}
    known |= {
        "average": sonde.RatioInterval("resolved", 22.0, 26.0, ratio=24.1),
        "optimizer": "Adam or AdamW (β = 0.9)",
    }
    reading = sonde.NoiseScaleReading(**known)
    shown = [
        line
        for path in PAGES
        for line in re.findall(r"^    (B_simple [\d>].*, batch .*)$", path.read_text(), flags=re.M)
    ]
    assert set(shown) == {str(reading)}


# Commands.


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_commands_exist(path: Path) -> None:
    for command in commands(path):
        check(command)


def check(command: list[str]) -> None:
    """Fail unless this command could be given in the repository."""
    match command:
        case ["pip", "install", what] if found := re.fullmatch(r"\.\[(.+)\]", what):
            extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
            assert set(found[1].split(",")) <= set(extras), command
        case ["make", target, *variables]:
            makefile = (ROOT / "Makefile").read_text()
            assert re.search(rf"^{re.escape(target)}:", makefile, flags=re.M), command
            for variable in variables:
                assert f"$({variable.split('=')[0]})" in makefile, command
        case ["python", "-m", module, *_] if module.startswith(("benchmarks", "tests", "docs")):
            assert importlib.util.find_spec(module) is not None, command
        case ["python" | "torchrun", *words]:
            scripts = [word for word in words if word.startswith("examples/")]
            assert all((ROOT / script).is_file() for script in scripts), command
        case ["sonde", name]:  # the command's name alone
            assert main([name, "--help"]) == 0, command
        case ["sonde", "run", *words] if "--" in words:  # and the script with its own options
            options_of(command[1:])
        case ["sonde", *words]:
            options_of(["anything" if word == "…" else word for word in words])
        case _:
            raise AssertionError(f"no rule for {command}")


def test_options_of_sonde_run_exist() -> None:
    rows = re.findall(r"^\| (`--.*?) \|", (ROOT / "docs" / "run.md").read_text(), flags=re.M)
    options = [option for row in rows for option in re.findall(r"`(--[^`]+)`", row)]
    assert len(options) > 8
    for option in options:
        options_of(["run", *option.split(), "--", "train.py"])
