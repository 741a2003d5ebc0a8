"""An import only ever points down one list, and what stands on one floor does not import each other."""

from __future__ import annotations

import ast
import functools
import inspect
import re
from pathlib import Path

import pytest

from tests.closure import ENTRIES, closure

SOURCE = Path(__file__).parent.parent / "src" / "sonde"
TESTS = Path(__file__).parent
FILES = sorted(SOURCE.rglob("*.py"))

# From the ground up, as CONTRIBUTING.md draws it.
HOUSE = [
    ["version", "wording", "console", "probe"],
    ["stats", "parallel", "sink", "record_values"],
    ["log"],
    ["records"],
    ["decision"],
    ["gradient_norm"],
    ["batch_size"],
    ["policy"],
    ["evidence"],
    ["schedule"],
    ["runs", "contrib"],
    ["__init__"],  # the public names: below it nothing may import the package itself
    ["integrations"],
    ["demos", "commands"],  # they attach an integration as a user would
    ["cli"],
    ["__main__"],
]
UPWARD = {"__init__.py": {"integrations"}}
"""An import that points up, by importlib: `sonde.integrations` without an import."""
FLOORS = {part: floor for floor, parts in enumerate(HOUSE) for part in parts}


def _part(path: Path) -> str:
    return path.relative_to(SOURCE).parts[0].removesuffix(".py")


@functools.cache
def _names(path: Path) -> set[str]:
    """Full names of what a file imports from sonde, at its top or anywhere in it: `sonde.stats.intervals.Status`."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Call) and "import_module" in ast.unparse(node.func):
            found |= {arg.value for arg in node.args if isinstance(arg, ast.Constant)}
    return {name for name in found if name.split(".")[0] == "sonde"}


def _imports(path: Path) -> set[str]:
    """Parts of sonde that a file imports."""
    parts = [[*name.split("."), "__init__"][1] for name in _names(path)]
    return {part if part in FLOORS else "__init__" for part in parts}


def test_every_part_has_a_floor() -> None:
    assert {_part(path) for path in FILES} == set(FLOORS)


def test_imports_point_down() -> None:
    up = [
        f"{path.relative_to(SOURCE)} imports sonde.{part}"
        for path in FILES
        for part in _imports(path) - {_part(path)} - UPWARD.get(path.relative_to(SOURCE).as_posix(), set())
        if FLOORS[part] >= FLOORS[_part(path)]
    ]
    assert up == []


def test_equations_import_only_equations() -> None:
    for path in SOURCE.rglob("stats/*.py"):
        for name in _names(path):
            is_equation = "stats" in name.split(".") or name.startswith(("sonde.wording.", "sonde.decision."))
            assert is_equation, f"{path} imports {name}"


def test_private_names_stay_in_their_file() -> None:
    for path in FILES:
        for name in _names(path):
            assert not any(part.startswith("_") and part != "__version__" for part in name.split(".")), (
                f"{path}: {name}"
            )


def test_no_test_imports_another_test() -> None:
    for path in sorted(TESTS.rglob("*.py")):
        nodes = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ImportFrom)]
        modules = {str(node.module) for node in nodes} | {f"{n.module}.{a.name}" for n in nodes for a in n.names}
        tests_imported = [module for module in modules if re.match(r"tests\.([\w.]+\.)?test_", module)]
        assert not tests_imported, path


def test_test_files_are_short_enough_to_read() -> None:
    assert {str(path): n for path in TESTS.rglob("*.py") if (n := len(path.read_text().splitlines())) > 400} == {}


def test_contributing_has_the_closures_as_they_are() -> None:
    text = (TESTS.parent / "CONTRIBUTING.md").read_text()
    for name, module in ENTRIES.items():
        lines = closure(module)
        found = re.search(rf"one\s{name}\s(?:you\smay\sneed\s)?(\d+)\sfiles\s\(([\d,]+)\slines\)", text)
        assert found, f"CONTRIBUTING.md does not say what one {name} closes over"
        n_files, n_lines = found.groups()
        assert int(n_files) == len(lines), name
        assert int(n_lines.replace(",", "")) == pytest.approx(sum(lines.values()), rel=0.05), name


def test_the_checks_see_imports_anywhere(tmp_path: Path) -> None:
    bad = tmp_path / "bad.py"
    bad.write_text(
        "import sonde\ndef f():\n    from sonde.runs import report\n    from sonde.stats.intervals import _x\n"
        "    importlib.import_module('sonde.policy.log')\n"
    )
    assert _imports(bad) == {"runs", "stats", "policy", "__init__"}
    assert _names(bad) == {"sonde", "sonde.runs.report", "sonde.stats.intervals._x", "sonde.policy.log"}


def test_public_names_are_there_and_documented() -> None:
    import sonde

    for name in sonde.__all__:
        assert getattr(sonde, name).__doc__, name
        if isinstance(kind := getattr(sonde, name), type):
            # A dataclass without a docstring gets one that only repeats its fields.
            assert not str(vars(kind)["__doc__"]).startswith((f"{name}(", "None")), name


def test_public_signatures_name_all_they_take() -> None:
    """So Python itself refuses a keyword with a mistake."""
    import sonde

    of_no_signature = ("NotCoveredError", "Probe", "RolloutProbe", "Sink", "TokenStatistics")
    for name in set(sonde.__all__).difference(of_no_signature):
        if callable(public := getattr(sonde, name)):
            kinds = {parameter.kind for parameter in inspect.signature(public).parameters.values()}
            assert inspect.Parameter.VAR_KEYWORD not in kinds, name
    with pytest.raises(AttributeError, match="no attribute 'PolicyLogs'"):
        _ = sonde.PolicyLogs
