"""What a fresh interpreter imports with sonde, and what works where torch is not installed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

import sonde
from tests.new_process import WITHOUT_TORCH
from tests.runs.report.plausible_policy import write_policy_run
from tests.runs.report.plausible_run import write_run

CODE = """
import json, sys
found = {}
import sonde
found["with sonde"] = sorted(sys.modules)
from sonde.cli import main
main(["report", "--help"])
found["with --help"] = sorted(sys.modules)
import torch
found["with torch"] = sorted(sys.modules)
for name in sonde.__all__:
    getattr(sonde, name)
found["with every name"] = sorted(sys.modules)
sys.modules["packaging"] = None  # as if it were not installed: the packages below bring it
for name in ("trl", "transformers", "lightning", "accelerate"):
    sys.modules[name] = None
    try:
        getattr(sonde.integrations, name)
    except ImportError as error:
        found["without " + name] = str(error)
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def found() -> dict[str, list[str]]:
    # -W error: an import must not warn either.
    command = [sys.executable, "-W", "error", "-c", CODE]
    out = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    modules: dict[str, list[str]] = json.loads(out.splitlines()[-1])
    return modules


def test_import_pulls_in_no_extra(found: dict[str, list[str]]) -> None:
    # rich and tyro are dependencies, but only the command line needs them.
    extras = {"bokeh", "tensorboard", "accelerate", "transformers", "trl", "lightning", "wandb", "numpy.testing"}
    assert not (extras | {"rich", "tyro"}) & set(found["with sonde"])


def test_import_imports_nothing_of_torch(found: dict[str, list[str]]) -> None:
    """Each public name is imported when it is first used. The command line uses none for a report."""
    assert not [name for name in found["with --help"] if name.split(".")[0] == "torch"]


def test_attach_takes_little_more_than_torchs_import(found: dict[str, list[str]]) -> None:
    """No time is taken here (benchmarks/ does that); these are torch's parts that cost half a second to import."""
    slow = {"torch.distributed.tensor", "torch.distributed.fsdp", "torch._dynamo", "torch._inductor", "sympy"}
    assert "sonde.batch_size.probe" in found["with every name"]
    assert not slow & (set(found["with every name"]) - set(found["with torch"]))


def test_what_reads_logs_needs_no_torch(tmp_path: Path) -> None:
    """As on a laptop to which logs were copied: importing torch is an error."""
    batch, policy, other = write_run(tmp_path / "batch", 12), tmp_path / "policy", write_run(tmp_path / "other", 12)
    write_policy_run(policy, 12)
    commands = [f"report {batch}", f"report {policy}", f"compare {batch} {other} --out {other / 'report.html'}"]
    commands += [f"advise {batch}", f"advise {policy}"]
    subprocess.run([sys.executable, "-W", "error", "-c", WITHOUT_TORCH, *commands], check=True)
    assert all((folder / "report.html").stat().st_size > 100_000 for folder in (batch, policy, other))


def test_every_public_name_is_there_and_an_unknown_one_is_not() -> None:
    assert set(sonde.__all__) <= set(dir(sonde))
    assert all(hasattr(sonde, name) for name in sonde.__all__)
    assert not hasattr(sonde, "attatch")


def test_help_starts_no_training_code(found: dict[str, list[str]]) -> None:
    heavy = ("torch.distributed.elastic", "trl", "transformers", "bokeh")
    assert "sonde.cli" in found["with --help"]
    assert not [name for name in found["with --help"] if name.startswith(heavy)]


@pytest.mark.parametrize("trainer", ["trl", "transformers", "lightning", "accelerate"])
def test_without_the_trainers_package_the_error_names_the_extra(trainer: str, found: dict[str, list[str]]) -> None:
    assert f"this needs {trainer}: pip install 'gradsonde[{trainer}]'" == found[f"without {trainer}"]
