"""Finds the user's line that called sonde, so that warnings point there."""

from __future__ import annotations

import sys


def stack_level() -> int:
    """The `stacklevel` with which `warnings.warn` in the calling function points outside sonde and torch."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").split(".")[0] in ("sonde", "torch"):
        level, frame = level + 1, frame.f_back
    return level
