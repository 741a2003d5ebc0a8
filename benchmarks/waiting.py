"""Waiting that a contestant causes: collectives between ranks, and host synchronisations with a GPU."""

from __future__ import annotations

import warnings

import torch
import torch.distributed as dist

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
    # torch's profiler is not used: it crashes if collectives are under way when it stops (torch 2.13).
    before = _issued()
    for window in windows[WARM_UP_WINDOWS:]:
        run.train_window(contestant, window)
    return (_issued() - before) / n_windows


def _issued() -> int:
    """How many collectives the default process group has issued."""
    group = dist.group.WORLD
    assert group is not None
    return int(group._get_sequence_number_for_group())  # type: ignore[attr-defined]


def synchronisations_per_window(setup: Setup, entry: Entry, n_windows: int = 20) -> float:
    """Host synchronisations with the GPU in a window after warm-up, as torch's sync debug mode counts them.

    If the mode counts none, the windows are trained again in its "error" mode, which raises at the first.
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
