"""Waiting that a contestant causes: collectives between ranks, and host synchronisations with a GPU."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.contestants import Entry
from benchmarks.gpt import sequences
from benchmarks.timing import WARM_UP_WINDOWS
from benchmarks.training import Contestant, Run, Setup, draw_windows


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
    """Host synchronisations with the GPU in a window after warm-up, as torch's sync debug mode counts them."""
    run = Run(setup)
    contestant = entry.make(run)
    windows = draw_windows(setup, sequences(setup.shape), WARM_UP_WINDOWS + n_windows, seed=1)
    for window in windows[:WARM_UP_WINDOWS]:
        run.train_window(contestant, window)
    torch.cuda.synchronize()
    return len(waits(run, contestant, windows[WARM_UP_WINDOWS:])) / n_windows


def waits(run: Run, contestant: Contestant, windows: Tensor) -> list[str]:
    """Where windows waited for the GPU: file and line of each time.

    If there are none, the windows are trained again in the "error" mode, which raises at the first.
    """

    def train() -> None:
        for window in windows:
            run.train_window(contestant, window)

    places = waits_of(train)
    if not places:
        with sync_debug_mode("error"):
            train()
    return places


def waits_of(work: Callable[[], object]) -> list[str]:
    """Where the host waited for the GPU: file and line of each time."""
    with sync_debug_mode("warn"), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        work()
    return [f"{w.filename}:{w.lineno}" for w in caught if "synchronizing CUDA operation" in str(w.message)]


@contextlib.contextmanager
def sync_debug_mode(mode: str) -> Iterator[None]:
    """Inside, torch notices whatever waits for a CUDA device; without one there is nothing to notice."""
    if not torch.cuda.is_available():
        yield
        return
    try:
        with warnings.catch_warnings():
            # torch says so at the first call: the mode does not see everything.
            warnings.filterwarnings("ignore", "Synchronization debug mode is a prototype")
            torch.cuda.set_sync_debug_mode(mode)
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
