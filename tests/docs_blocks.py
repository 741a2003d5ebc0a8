"""The code blocks of README.md and docs/: read from their pages, run in order, compared with what they claim."""

from __future__ import annotations

import contextlib
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
PAGES = [*(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")), *sorted(DOCS.glob("*.md"))]


@dataclass(frozen=True)
class Block:
    """A block of Python of a page, with the line of the page on which its code begins."""

    page: Path
    line: int
    code: str

    def run(self, names: dict[str, Any]) -> str:
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
    return [Block(page, text[: m.start(2)].count("\n") + 1, textwrap.dedent(m[2])) for m in found]


@dataclass
class Page:
    """A page whose blocks are run one after the other.

    Args:
        path: of the page.
        ranks: two processes, for blocks that every rank runs.
        not_run: numbers of blocks to leave out, from 1.
    """

    path: Path
    ranks: Ranks
    not_run: set[int]
    left: list[Block] = field(init=False)

    def __post_init__(self) -> None:
        self.left = [block for i, block in enumerate(python_blocks(self.path), start=1) if i not in self.not_run]

    def run(self, names: dict[str, Any]) -> str:
        """Run the next block with these names, to which it adds its own; return what it prints."""
        return self.left.pop(0).run(names)

    def run_on_ranks(self, scene: Callable[[list[Block], str], None], n: int = 1) -> None:
        """Let `scene` run the next n blocks on both ranks, from the folder in which this process is."""
        self.ranks(scene, [self.left.pop(0) for _ in range(n)], os.getcwd())


# Commands.

COMMAND = r"(?:sonde|make|python|pip|torchrun) .*"


def commands(page: Path) -> list[list[str]]:
    """Commands of the page, as words: lines of indented blocks and of blocks of shell, and code in backticks."""
    text = page.read_text()
    shell = re.findall(r"^ *```(?:sh|bash|shell|console)\n(.*?)^ *```", text, flags=re.S | re.M)
    prose = re.sub(r"^( *)```.*?^ *```", "", text, flags=re.S | re.M)
    lines = [*"".join(shell).splitlines(), *re.findall(r"^    (.*)$", prose, flags=re.M)]
    inline = [" ".join(code.split()) for code in re.findall(r"`([^`]+)`", prose)]
    found = [line.strip().removeprefix("$ ") for line in (*lines, *inline)]
    return [explained(line) for line in found if re.fullmatch(COMMAND, line)]


def explained(line: str) -> list[str]:
    """The words of a command, without the explanation behind a "#" or behind two spaces."""
    return shlex.split(re.split(r" {2,}", line)[0], comments=True)
