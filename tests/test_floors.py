"""An import only ever points down, and folders on one floor do not import each other."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

SOURCE = Path(__file__).parent.parent / "src" / "sonde"

FLOORS = {
    "version": 0,
    "wording": 0,
    "options": 0,
    "call_site": 0,
    "records": 1,
    "stats": 1,
    "measure": 2,
    "fold": 2.3,
    "clip": 2.5,  # stands on both
    "probes": 3,
    "runs": 3,
    "__init__": 3.5,  # the public names: below them nothing may import the package itself
    "integrations": 4,
    "demos": 4.5,  # they attach an integration as a user would
    "cli": 5,
    "__main__": 6,
}


def _part(path: Path) -> str:
    return path.relative_to(SOURCE).parts[0].removesuffix(".py")


def _imports(path: Path) -> set[str]:
    """Parts of sonde that a file imports, at its top or anywhere in it."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names = [f"{node.module}.{a.name}" if node.module == "sonde" else str(node.module) for a in node.names]
        for name in names:
            if name.split(".")[0] == "sonde":
                part = name.split(".")[1] if "." in name else "__init__"
                found.add(part if part in FLOORS else "__init__")
    return found


@pytest.mark.parametrize("path", sorted(SOURCE.rglob("*.py")), ids=lambda p: str(p.relative_to(SOURCE)))
def test_imports_point_down(path: Path) -> None:
    here = _part(path)
    assert here in FLOORS, f"{here} has no floor: give it one here"
    for part in _imports(path) - {here}:
        assert FLOORS[part] < FLOORS[here], f"{path.name} on floor {FLOORS[here]} imports sonde.{part}"


def test_the_check_sees_a_wrong_import(tmp_path: Path) -> None:
    bad = tmp_path / "bad.py"
    bad.write_text("def f():\n    from sonde.runs import report\n")
    assert _imports(bad) == {"runs"}


def test_import_pulls_in_no_extra() -> None:
    extras = [
        "bokeh",
        "tensorboard",
        "accelerate",
        "transformers",
        "lightning",
        "wandb",
        "numpy.testing",
        "rich",
        "tyro",
    ]
    code = f"import sys, sonde; print([m for m in {extras} if m in sys.modules])"
    # -W error: an import must not warn either. rich is a dependency, but only the command line needs it.
    out = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.strip() == "[]"


def test_import_takes_little_more_than_torchs() -> None:
    """No time is taken here (benchmarks/ does that); these are torch's parts that cost half a second to import."""
    slow = ["torch.distributed.tensor", "torch.distributed.fsdp", "torch._dynamo", "torch._inductor", "sympy"]
    code = (
        "import torch, sys; had = set(sys.modules); import sonde; "
        f"print([m for m in sys.modules.keys() - had if m in {slow}])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.strip() == "[]"


def test_public_names_are_there_and_documented() -> None:
    import sonde

    assert len(sonde.__all__) <= 25
    for name in sonde.__all__:
        assert getattr(sonde, name).__doc__, name
