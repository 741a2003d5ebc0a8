"""The code blocks of README.md and docs/: read from their pages, run in order, compared with what they claim."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import os
import re
import shlex
import textwrap
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.ranks import Ranks

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
Names = dict[str, Any]
NEEDS = {
    ("entropy-change.md", 1): "trl",
    # Where it is installed, tests/integrations/test_torchtitan.py does what these blocks do.
    ("torchtitan.md", 1): "torchtitan",
    ("torchtitan.md", 2): "torchtitan",
    ("trainers.md", 1): "transformers",
    ("trainers.md", 2): "transformers",
    ("trainers.md", 3): "trl",
    ("trainers.md", 4): "lightning",
    ("trainers.md", 5): "accelerate",
    ("trainers.md", 6): "accelerate",
}
"""Blocks, by page and number, that run only where a package is installed. All others run everywhere."""
PAGES = [*(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")), *sorted(DOCS.glob("*.md"))]


@dataclass(frozen=True)
class Block:
    """A block of Python of a page: its number there, from 1, and the line on which its code begins."""

    page: Path
    number: int
    line: int
    code: str

    def run(self, names: Names) -> str:
        """Run it with these names; return what it prints. A traceback shows the page and its line."""
        code = compile("\n" * (self.line - 1) + self.code, str(self.page), "exec")
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            exec(code, names)
        self.check_claims(printed.getvalue())
        return printed.getvalue()

    def check_claims(self, printed: str) -> None:
        """A comment with a number, behind a `print`, claims what it prints. Numbers may differ; "…" is any text."""
        for claim in re.findall(r"^\s*print\(.*\)  # (.*\d.*)$", self.code, flags=re.M):
            assert re.search(pattern_of(claim), printed), f"{self.page.name} claims {claim!r}\nprinted {printed!r}"


def pattern_of(claim: str) -> str:
    """A regular expression for the claim with other numbers; a time may be in milliseconds."""
    number = r"[-+−]?\d[\d,.]*(?:e[-+]?\d+)?"
    escaped = re.escape(claim).replace(r"\-", "-").replace(r"\+", "+").replace(re.escape("…"), ".*")
    return re.sub(number, lambda _: number, escaped.replace(r"\.", ".")).replace(rf"{number}\ s", rf"{number}\ m?s")


def python_blocks(page: Path) -> list[Block]:
    """The page's blocks of Python, in order."""
    text = page.read_text()
    found = re.finditer(r"^( *)```python\n(.*?)^ *```", text, flags=re.S | re.M)
    return [
        Block(page, number, text[: m.start(2)].count("\n") + 1, textwrap.dedent(m[2]))
        for number, m in enumerate(found, start=1)
    ]


@dataclass
class Page:
    """A page whose blocks are run one after the other.

    Args:
        path: of the page.
        ranks: two processes, for blocks that every rank runs.
    """

    path: Path
    ranks: Ranks
    printed: str = ""
    left: list[Block] = field(init=False)

    def __post_init__(self) -> None:
        self.left = python_blocks(self.path)

    def run(self, names: Names | Callable[[], Names]) -> Names | None:
        """Run the next block with these names, and return them with those that it adds.

        None if it `NEEDS` a package that is not there.
        """
        block = self.left.pop(0)
        package = NEEDS.get((block.page.name, block.number))
        if package is not None and importlib.util.find_spec(package) is None:
            return None
        found = names() if callable(names) else names
        self.printed = block.run(found)
        return found

    def run_on_ranks(self, scene: Callable[[list[Block], str], None], n: int = 1) -> None:
        """Let `scene` run the next n blocks on both ranks, from the folder in which this process is."""
        self.ranks(scene, [self.left.pop(0) for _ in range(n)], os.getcwd())


# Commands.

COMMAND = r"(?:sonde|make|python|pip|torchrun) (?!\w+:).*"  # `sonde run: …` is what it prints


def commands(page: Path) -> list[list[str]]:
    """Commands of the page, as words: lines of indented blocks and of blocks of shell, and code in backticks."""
    text = re.sub(r" \\\n +", " ", page.read_text())  # a command on several lines
    shell = re.findall(r"^ *```(?:sh|bash|shell|console)\n(.*?)^ *```", text, flags=re.S | re.M)
    prose = re.sub(r"^( *)```.*?^ *```", "", text, flags=re.S | re.M)
    lines = [*"".join(shell).splitlines(), *re.findall(r"^    (.*)$", prose, flags=re.M)]
    inline = [" ".join(code.split()) for code in re.findall(r"`([^`]+)`", prose)]
    found = [line.strip().removeprefix("$ ") for line in (*lines, *inline)]
    return [explained(line) for line in found if re.fullmatch(COMMAND, line)]


def explained(line: str) -> list[str]:
    """The words of a command, without the explanation behind a "#" or behind two spaces."""
    return shlex.split(re.split(r" {2,}", line)[0], comments=True)
