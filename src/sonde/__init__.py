"""sonde measures a PyTorch training run while it runs, changes nothing in it, and says what measuring costs.

The public names are in `__init__.pyi`. Each is imported when it is first used, so that `sonde report` needs no torch.
"""

from __future__ import annotations

import ast
import importlib
from pathlib import Path
from typing import Any


def _modules() -> dict[str, str]:
    """The module that defines each public name, as the stub imports it."""
    stub = ast.parse(Path(__file__).with_suffix(".pyi").read_text(encoding="utf-8"))
    imports = (node for node in stub.body if isinstance(node, ast.ImportFrom) and node.module != __name__)
    return {alias.name: str(node.module) for node in imports for alias in node.names}


_MODULES = _modules()
__all__ = list(_MODULES)


def __getattr__(name: str) -> Any:
    """A public name, or `sonde.integrations`, imported when it is first used."""
    if name == "integrations":
        return importlib.import_module("sonde.integrations")
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(_MODULES[name]), name)
    return value


def __dir__() -> list[str]:
    """Also the names that were not used yet."""
    return sorted({*globals(), *_MODULES})
