"""Garbage collections, and searches for living objects, that pass by what was imported."""

from __future__ import annotations

import gc
import sys

_MANY = 50
"""New modules that are worth a collection."""


class Imported:
    """What a process has imported stays, and is not looked at: trainers alone are 300,000 objects, 30 ms for a look."""

    def __init__(self) -> None:
        self._n_modules = len(sys.modules)
        gc.freeze()

    def add(self) -> None:
        """Add what was imported since then; of a few new modules, do nothing."""
        if len(sys.modules) >= self._n_modules + _MANY:
            self._n_modules = len(sys.modules)
            gc.collect()  # what is garbage now would stay for good
            gc.freeze()
