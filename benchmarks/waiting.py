"""What a contestant makes others wait for: collectives between ranks, and host synchronisations with a GPU."""

from __future__ import annotations

import warnings

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.contestants import Entry
from benchmarks.gpt import sequences
from benchmarks.timing import WARM_UP_WINDOWS
from benchmarks.training import Run, Setup, draw_windows


def collectives_per_window(setup: Setup, entry: Entry, n_windows: int = 4) -> float:
    """Collectives that this rank issues in a window after warm-up, DDP's own included."""
    run = Run(setup)
    contestant = entry.make(run)
    windows = draw_windows(setup, sequences(setup.shape), WARM_UP_WINDOWS + n_windows, seed=1)
    for window in windows[:WARM_UP_WINDOWS]:
        run.train_window(contestant, window)
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        for window in windows[WARM_UP_WINDOWS:]:
            run.train_window(contestant, window)
    issued: int = sum(e.count for e in profiled.key_averages() if e.key.startswith("c10d::"))
    return issued / n_windows


def synchronisations_per_window(setup: Setup, entry: Entry, n_windows: int = 20) -> float:
    """Host synchronisations with the GPU in a window after warm-up, as torch's sync debug mode counts them.

    Where it counts none, the windows are trained again in its "error" mode, which raises at the first.
    """
    run = Run(setup)
    contestant = entry.make(run)
    windows = draw_windows(setup, sequences(setup.shape), WARM_UP_WINDOWS + n_windows, seed=1)
    for window in windows[:WARM_UP_WINDOWS]:
        run.train_window(contestant, window)
    torch.cuda.synchronize()
    try:
        torch.cuda.set_sync_debug_mode("warn")
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for window in windows[WARM_UP_WINDOWS:]:
                run.train_window(contestant, window)
        count = sum("synchronizing CUDA operation" in str(w.message) for w in caught)
        if count == 0:
            torch.cuda.set_sync_debug_mode("error")
            for window in windows[WARM_UP_WINDOWS:]:
                run.train_window(contestant, window)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return count / n_windows
