"""Imports everything that a benchmark process needs, once, in the server that processes are forked from.

So starting a process costs milliseconds, and all of them have imported the same, whatever they measure.
"""

from benchmarks import contestants, memory, timing, waiting

contestants.import_packages()

__all__ = ["contestants", "memory", "timing", "waiting"]
