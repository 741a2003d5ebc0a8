"""How large the house is: lines of code, files, closures, one measured window, words of docs.

python -m tests.house      # the table of today
"""

from __future__ import annotations

import ast
import io
import statistics
import sys
import tokenize
from collections import Counter
from pathlib import Path
from types import FrameType

import torch
from torch import nn

import sonde
from tests.closure import ENTRIES, closure

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "sonde"
NO_CODE = (
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
)
WINDOWS = 21


def lines_of_code(source: str) -> int:
    """Lines that are neither blank, nor comments, nor docstrings."""
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    lines = {k for t in tokens if t.type not in NO_CODE for k in range(t.start[0], t.end[0] + 1)}
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            lines -= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return len(lines)


def by_folder() -> dict[str, int]:
    """Lines of code of each folder of sonde; of the files outside folders together."""
    found: Counter[str] = Counter()
    for path in SOURCE.rglob("*.py"):
        part = path.relative_to(SOURCE).parts[0]
        found["files outside folders" if part.endswith(".py") else part] += lines_of_code(path.read_text())
    return dict(found)


def plain_window() -> tuple[int, int]:
    """Calls of sonde's functions, and files of sonde that they are in, in one measured window: the median window.

    The window is that of a plain loop: two layers, four declared pieces, every default but `every=1`.
    """
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16))
    optimizer = torch.optim.AdamW(model.parameters())
    seen: list[str] = []

    def profile(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(str(SOURCE)):
            seen.append(frame.f_code.co_filename)

    counts: list[tuple[int, int]] = []
    with sonde.attach(model, optimizer, unit="rows", every=1, verbose=False) as probe:
        for _ in range(3 * WINDOWS):  # the first windows find out what the loop does
            seen.clear()
            sys.setprofile(profile)
            for micro_batch in torch.randn(32, 16).chunk(4):
                with probe.piece(units=len(micro_batch)):
                    model(micro_batch).square().mean().backward()
            probe.step()
            optimizer.step()
            sys.setprofile(None)
            optimizer.zero_grad()
            counts.append((len(seen), len(set(seen))))
    last = counts[-WINDOWS:]
    return statistics.median_low(n for n, _ in last), statistics.median_low(n for _, n in last)


def sizes() -> dict[str, int]:
    """What the ratchets hold, by name."""
    table = {f"lines of code: {name}": n for name, n in sorted(by_folder().items())}
    table["lines of code of the study"] = sum(lines_of_code(p.read_text()) for p in (ROOT / "evidence").rglob("*.py"))
    table["files of source"] = len(list(SOURCE.rglob("*.py")))
    table |= {f"files that one {name} closes over": len(closure(module)) for name, module in ENTRIES.items()}
    table["calls of one measured window"], table["files of one measured window"] = plain_window()
    table["words of docs"] = sum(
        len(p.read_text().split()) for p in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    )
    table["lines of tests"] = sum(len(p.read_text().splitlines()) for p in (ROOT / "tests").rglob("*.py"))
    return table


if __name__ == "__main__":
    now = sizes()
    sys.stdout.writelines(f"{n:8,} {name}\n" for name, n in now.items())
    total = sum(n for name, n in now.items() if name.startswith("lines of code: "))
    sys.stdout.write(f"{total:8,} lines of code in all\n")
