"""Imports everything that a benchmark process needs, once, in the server that processes are forked from.

So a process starts in milliseconds, and all processes have the same imports, whatever they measure.
"""

import importlib

from benchmarks import contestants, memory, timing, waiting

contestants.import_packages()
importlib.import_module("torch._dynamo")  # torch imports it with the first optimizer, in 2 seconds

__all__ = ["contestants", "memory", "timing", "waiting"]
