"""Imports everything that a benchmark process needs, once, in the server that processes are forked from.

So starting a process costs milliseconds, and all of them have imported the same, whatever they measure.
"""

import importlib

from benchmarks import contestants, memory, timing, waiting

contestants.import_packages()
importlib.import_module("torch._dynamo")  # torch does so at the first optimizer, in 2 seconds

__all__ = ["contestants", "memory", "timing", "waiting"]
