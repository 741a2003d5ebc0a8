"""Private names of other packages are listed on one page, and each row names a test that fails if its name changes."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator, Set
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "tests" / "private_names.md"
SOURCES = sorted(path for path in (ROOT / "src" / "sonde").rglob("*.py"))
OF_PYTHON = {"_getframe", "_exit"}
"""Public in spite of their underscore: Python documents `sys._getframe` and `os._exit`."""


OF_ITS_OWN_CLASS = {
    "batch_size/step_watch.py": {"_before_any_step", "_before_given_step", "_before_step"},
    "policy/entropy_change.py": {"_forecast"},
}
"""Names that a file defines, and takes from another object of the same class, not from `self`."""


def is_private(name: object) -> bool:
    return isinstance(name, str) and name.isidentifier() and re.match(r"_[^\W_]", name) is not None


def mentioned(tree: ast.AST) -> Iterator[str]:
    """Private names that a file takes from somewhere: attributes, imports, keywords of a call, and strings as in
    `getattr(x, "_spec")`."""
    ends = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values[1:]}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            yield node.attr
        elif id(node) in ends:  # the end of a name, as in f"{name}_low"
            continue
        elif isinstance(node, ast.ImportFrom):
            yield from (node.module or "").split(".")
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (part for alias in node.names for part in alias.name.split("."))
        elif isinstance(node, ast.keyword) and node.arg is not None:
            yield node.arg
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def defined(tree: ast.AST) -> Iterator[str]:
    """Names that a file makes itself: functions, classes, variables and attributes of `self`."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and ast.unparse(node.value) == "self":
            yield node.attr


def taken_from_others(tree: ast.AST) -> Iterator[str]:
    """Names of attributes that a file takes from another object than `self` or `cls`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) not in ("self", "cls"):
            yield node.attr


def foreign_private_names(source: str, own: Set[str] = frozenset()) -> set[str]:
    """Private names that a file takes from other packages. sonde's own never leave their file; test_floors.py checks.

    A name that the file defines is its own on `self`, and foreign on another object unless `own` has it.
    """
    tree = ast.parse(source)
    foreign = (set(mentioned(tree)) - set(defined(tree))) | (set(taken_from_others(tree)) - own)
    return {name for name in foreign if is_private(name)} - OF_PYTHON


@functools.cache
def rows() -> list[tuple[set[str], set[str], str]]:
    """The page's table: the private parts of each name, the files that use it, and its guard."""
    found = re.findall(r"^\| (`[^|]*_[^|]*`) \| (`[^|]*`) \| [^|]+ \| `(tests/[^|]*)` \|$", PAGE.read_text(), re.M)
    return [
        (
            {part for name in re.findall(r"`([^`]+)`", names) for part in name.split(".") if is_private(part)},
            set(re.findall(r"`([^`]+)`", files)),
            guard,
        )
        for names, files, guard in found
    ]


def test_the_page_lists_the_private_names_of_each_file() -> None:
    for path in SOURCES:
        here = path.relative_to(ROOT / "src" / "sonde").as_posix()
        listed = set().union(*(names for names, files, _ in rows() if here in files))
        used = foreign_private_names(path.read_text(), OF_ITS_OWN_CLASS.get(here, frozenset()))
        assert used - listed == set(), f"{PAGE.name} does not list these private names of {here}: add a row and a guard"
        assert listed - used == set(), f"{PAGE.name} lists these private names, and {here} does not use them any more"


def test_each_row_names_a_file_and_a_guard_that_exist() -> None:
    assert len(rows()) > 15
    for names, files, guard in rows():
        assert names, guard
        for file in files:
            assert (ROOT / "src" / "sonde" / file).is_file(), f"{sorted(names)}: no file {file}"
        path, _, test = guard.partition("::")
        assert f"def {test}(" in (ROOT / path).read_text(), f"{sorted(names)}: no test {guard}"


def test_private_names_are_seen_in_every_form() -> None:
    """A name that a file defines itself is foreign on another object, unless that is of the same class."""
    source = """
from torch._a import _b, c
import torch._c
class Probe:
    def f(self, x):
        self._own = getattr(x, "_d")
        self._metrics = self._trainer._metrics
        return x._e._f, self._own, x.__dict__, "_not a name", x._
"""
    expected = {"_a", "_b", "_c", "_d", "_e", "_f", "_metrics", "_trainer"}
    assert foreign_private_names(source) == expected
    assert foreign_private_names(source, {"_metrics"}) == expected - {"_metrics"}
    for file, names in OF_ITS_OWN_CLASS.items():
        tree = ast.parse((ROOT / "src" / "sonde" / file).read_text())
        assert names <= set(taken_from_others(tree)) & set(defined(tree)), file
