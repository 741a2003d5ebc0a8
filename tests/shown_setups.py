"""Writes the table of set-ups into docs/where-it-works.md, from the tests that say what they show.

    python -m tests.shown_setups

A test says so by `@pytest.mark.shows("noise scale", "FSDP2", "HSDP")`: it compares that quantity with one process, or
with a definition, under each of these set-ups. A tuple names several quantities. `@pytest.mark.refuses(...)` says
likewise that the quantity is refused.
Where one of several cases shows a set-up, that case has it, so that the cell goes when the case goes:
`pytest.param(..., marks=pytest.mark.shows(...))`. So a marker of a whole test names one set-up, unless the set-ups are
refused: such a test makes those that its own markers name.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from pathlib import Path

TESTS = Path(__file__).parent
PAGE = TESTS.parent / "docs" / "where-it-works.md"

QUANTITIES = {
    "noise scale": "noise scale",
    "adam metric": "Adam's metric",
    "sign metric": "sign metric",
    "spectral metric": "spectral metric",
    "single examples": "single examples",
    "prompts": "in prompts",
    "measure": "`sonde.measure`",
    "norm and clip": "norm and clip",
    "entropy change": "entropy change",
    "policy entropy": "policy entropy",
}
"""The columns."""
SETUPS = (
    "one process",
    "torch.compile",
    "DDP",
    "FSDP2",
    "HSDP",
    "LoRA",
    "LoRA below DDP",
    "LoRA below FSDP2",
    "TP",
    "SP",
    "FSDP2 over TP",
    "FSDP2 over SP",
    "PP",
    "PP with DDP",
    "PP with FSDP2",
    "PP with HSDP",
    "PP with TP",
    "PP with SP",
    "PP with FSDP2 over TP",
    "CP",
    "DDP over CP",
    "FSDP2 over CP",
    "EP",
)
"""The rows. TP, SP, CP, PP and EP are tensor, sequence, context, pipeline and expert parallelism."""
SHOWN, REFUSED, NOT_TRIED = "✓", "✗", "·"
"""Signs of a cell: a test compares, a test shows that it is refused, and no test says anything."""
_LEAVE_OUT = {
    *("pytest.mark.skip", "pytest.mark.skipif", "pytest.mark.xfail"),
    *("pytest.skip", "pytest.xfail", "pytest.importorskip"),
}
_HEAD = "| set-up | " + " | ".join(QUANTITIES.values()) + " |\n"


def shown(kind: str = "shows") -> Iterator[tuple[str, str, str]]:
    """Each marker of a kind, "shows" or "refuses": the test as `path::name`, the quantity, and a set-up.

    Raises:
        ValueError: for a marker of something that is no test or may not run, or with a name that is no quantity or
            set-up; and for a test that says of all its cases together that they show several set-ups.
    """
    for path in sorted(TESTS.rglob("test_*.py")):
        text = path.read_text()
        if f"pytest.mark.{kind}" not in text:
            continue
        module = ast.parse(text)
        of_all = [line for line in module.body if not isinstance(line, ast.FunctionDef | ast.ClassDef)]
        for node in ast.walk(module):
            for call in _marks(node, kind):
                name = f"{path.relative_to(TESTS.parent)}::{getattr(node, 'name', '')}"
                values = [ast.literal_eval(argument) for argument in call.args]
                quantities = values[0] if values and isinstance(values[0], tuple) else tuple(values[:1])
                if not isinstance(node, ast.FunctionDef) or not node.name.startswith("test_"):
                    raise ValueError(f"{name} is no test: mark the test function itself")
                if len(values) < 2 or not set(quantities) <= set(QUANTITIES) or not set(values[1:]) <= set(SETUPS):
                    raise ValueError(f"{name} is marked with {values}, expected a quantity and set-ups of {__name__}")
                if _may_be_left_out([node, *of_all]):
                    raise ValueError(f"{name} may be skipped or may fail, so it shows nothing: mark another test")
                if kind == "shows" and call in node.decorator_list and len(values) > 2:
                    raise ValueError(f"{name} is marked with several set-ups: mark the case that shows each of them")
                for quantity in quantities:
                    yield from ((name, quantity, setup) for setup in values[1:])


def _may_be_left_out(nodes: Iterable[ast.AST]) -> bool:
    """Whether a mark or a call there lets a test be skipped or fail, such as `pytest.skip`."""
    used = {ast.unparse(each) for node in nodes for each in ast.walk(node) if isinstance(each, ast.Attribute)}
    return not used.isdisjoint(_LEAVE_OUT)


def _marks(node: ast.AST, kind: str) -> list[ast.Call]:
    decorators: list[ast.AST] = getattr(node, "decorator_list", [])
    calls = [call for decorator in decorators for call in ast.walk(decorator) if isinstance(call, ast.Call)]
    return [call for call in calls if ast.unparse(call.func) == f"pytest.mark.{kind}"]


def table() -> str:
    """The table: each cell links to the files of the tests that show it, or that show that it is refused.

    Raises:
        ValueError: when tests show a quantity in a set-up, and show that it is refused there.
    """
    cells, refused = _tests_by_cell("shows"), _tests_by_cell("refuses")
    if both := sorted(cells.keys() & refused.keys()):
        raise ValueError(f"{both[0]} is shown by {cells[both[0]]} and refused by {refused[both[0]]}: one must be wrong")
    links = {cell: _links(SHOWN, tests) for cell, tests in cells.items()}
    links |= {cell: _links(REFUSED, tests) for cell, tests in refused.items()}
    rows = [
        f"| {setup} | {' | '.join(links.get((setup, quantity), NOT_TRIED) for quantity in QUANTITIES)} |\n"
        for setup in SETUPS
    ]
    return _HEAD + "|---" * (1 + len(QUANTITIES)) + "|\n" + "".join(rows)


def _links(sign: str, tests: Iterable[str]) -> str:
    files = dict.fromkeys(test.partition("::")[0] for test in tests)
    return " ".join(f"[{sign}](../{file})" for file in files)


def _tests_by_cell(kind: str) -> dict[tuple[str, str], list[str]]:
    """Tests as `path::name`, by set-up and quantity."""
    cells: dict[tuple[str, str], list[str]] = {}
    for name, quantity, setup in shown(kind):
        cells.setdefault((setup, quantity), []).append(name)
    return cells


def with_table(page: str) -> str:
    """The page with the table of now in place of the one that it has.

    Raises:
        ValueError: when the page has no such table.
    """
    start = page.find("| set-up |")
    if start < 0:
        raise ValueError("the page has no table of set-ups: its head begins with '| set-up |'")
    end = page.index("\n\n", start) + 1
    return page[:start] + table() + page[end:]


if __name__ == "__main__":
    PAGE.write_text(with_table(PAGE.read_text()))
