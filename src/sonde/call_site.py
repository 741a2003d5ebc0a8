"""Where sonde was called from, for warnings to point there."""

from __future__ import annotations

import sys


def stack_level() -> int:
    """How far up the caller outside of sonde and torch is, as `warnings.warn` in the calling function counts it."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").split(".")[0] in ("sonde", "torch"):
        level, frame = level + 1, frame.f_back
    return level
