"""Which files of sonde one thing closes over: what a reader may have to open to understand it.

    python -m tests.closure window     # or clip, forecast, or a module such as sonde.runs.reader

prints every file that the module imports, directly or through others, with its lines.
"""

from __future__ import annotations

import ast
import sys
from pathlib import Path

SOURCE = Path(__file__).parent.parent / "src"
ENTRIES = {
    "window": "sonde.batch_size.probe",
    "clip": "sonde.gradient_norm.clip",
    "forecast": "sonde.policy.entropy_change",
}


def file_of(module: str, source: Path = SOURCE) -> Path | None:
    """The file of a module; None for a package or for something else than a module of sonde."""
    path = source.joinpath(*module.split(".")).with_suffix(".py")
    return path if path.is_file() else None


def imported(path: Path, source: Path = SOURCE) -> set[str]:
    """Modules of sonde that a file imports, at its top or anywhere in it."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return {name for name in names if name.startswith("sonde.") and file_of(name, source) is not None}


def closure(module: str, source: Path = SOURCE) -> dict[str, int]:
    """Lines of every file that a module closes over, itself included, by module name."""
    lines: dict[str, int] = {}
    waiting = [module]
    while waiting:
        name = waiting.pop()
        path = file_of(name, source)
        if path is None:
            raise ValueError(f"no module {name!r}: give {', '.join(ENTRIES)}, or a module such as sonde.runs.reader")
        if name not in lines:
            lines[name] = len(path.read_text().splitlines())
            waiting += imported(path, source)
    return dict(sorted(lines.items()))


def main(names: list[str]) -> None:
    """Print the closure of each name; of all three entries if none is given."""
    for name in names or list(ENTRIES):
        lines = closure(ENTRIES.get(name, name))
        if names:
            sys.stdout.writelines(f"{n:6} {module}\n" for module, n in lines.items())
        sys.stdout.write(f"{name}: {len(lines)} files, {sum(lines.values()):,} lines\n")


if __name__ == "__main__":
    main(sys.argv[1:])
