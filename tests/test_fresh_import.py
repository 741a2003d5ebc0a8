"""What a fresh interpreter imports with sonde: one new Python for all of it, as each imports torch for seconds."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

CODE = """
import json, sys
import torch
found = {"with torch": sorted(sys.modules)}
import sonde
found["with sonde"] = sorted(sys.modules)
from sonde.cli import main
main(["--help"])
found["with --help"] = sorted(sys.modules)
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


def test_import_takes_little_more_than_torchs(found: dict[str, list[str]]) -> None:
    """No time is taken here (benchmarks/ does that); these are torch's parts that cost half a second to import."""
    slow = {"torch.distributed.tensor", "torch.distributed.fsdp", "torch._dynamo", "torch._inductor", "sympy"}
    assert not slow & (set(found["with sonde"]) - set(found["with torch"]))


def test_help_starts_no_training_code(found: dict[str, list[str]]) -> None:
    heavy = ("torch.distributed.elastic", "trl", "transformers", "bokeh")
    assert "sonde.cli" in found["with --help"]
    assert not [name for name in found["with --help"] if name.startswith(heavy)]


@pytest.mark.parametrize("trainer", ["trl", "transformers", "lightning", "accelerate"])
def test_without_the_trainers_package_the_error_names_the_extra(trainer: str, found: dict[str, list[str]]) -> None:
    assert f"this needs {trainer}: pip install 'gradsonde[{trainer}]'" == found[f"without {trainer}"]
