"""The peak memory of a training process, with and without a contestant, and of some work on an accelerator."""

from __future__ import annotations

import gc
import resource
import sys
from pathlib import Path

import torch

from benchmarks.contestants import Entry
from benchmarks.gpt import sequences
from benchmarks.training import Run, Setup, draw_windows


def peak_bytes(setup: Setup, entry: Entry, n_windows: int) -> int:
    """Peak memory of this process after training some windows: resident memory on the CPU, the allocator's on a GPU.

    Call in a fresh process that has imported the same modules for every contestant.
    """
    run = Run(setup)
    contestant = entry.make(run)
    for window in draw_windows(setup, sequences(setup.shape), n_windows, seed=1):
        run.train_window(contestant, window)
    if setup.device != "cpu":
        return int(torch.accelerator.max_memory_allocated())
    return _peak_resident_bytes()


def start_of_peak(device: str) -> int:
    """Bytes of tensors on an accelerator, of which the peak begins anew."""
    gc.collect()
    if device == "cpu":
        return 0
    torch.accelerator.reset_peak_memory_stats()
    return int(torch.accelerator.memory_allocated())


def peak_since(before: int, device: str) -> float | None:
    """The peak above the bytes at its start, in GiB; None on a CPU."""
    return None if device == "cpu" else round((torch.accelerator.max_memory_allocated() - before) / 2**30, 3)


def _peak_resident_bytes() -> int:
    status = Path("/proc/self/status")
    if status.exists():  # getrusage also counts the parent's peak, which survives fork and exec
        line = next(line for line in status.read_text().splitlines() if line.startswith("VmHWM"))
        return int(line.split()[1]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
