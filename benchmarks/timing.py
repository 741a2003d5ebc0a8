"""Time that a contestant adds to a window: compared with no probe, interleaved, in the same process."""

from __future__ import annotations

import gc
import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.contestants import PLAIN, Entry
from benchmarks.device import seconds_of
from benchmarks.gpt import sequences
from benchmarks.training import Run, Setup, draw_windows

WARM_UP_WINDOWS = 6
"""Windows until the optimizer has its state, and DDP its second set of buckets."""


@dataclass(frozen=True)
class Cost:
    """Time added to a window.

    Attributes:
        median: median of the ratios to no probe, minus 1.
        low: lower end of the median's bootstrap 95 % interval.
        high: upper end of the interval.
        n_blocks: number of ratios.
        seconds_added: median of the differences, per window.
        window_seconds: median time of a window without a probe.
    """

    median: float
    low: float
    high: float
    n_blocks: int
    seconds_added: float
    window_seconds: float


def time_blocks(setup: Setup, entry: Entry, n_blocks: int, *, contestant_first: bool) -> list[tuple[float, float]]:
    """Seconds per window without and with the contestant, in blocks of two windows of each: [blocks].

    A block goes plain, contestant, contestant, plain; every second block goes the other way round. So a machine that
    slows down steadily slows both alike. Two models are trained side by side on the same windows. The caller chooses
    the model that is built first, since memory layout alone makes some tenths of a per cent.
    """
    windows = draw_windows(setup, sequences(setup.shape), WARM_UP_WINDOWS + 2 * n_blocks, seed=1)
    order = [entry, PLAIN] if contestant_first else [PLAIN, entry]
    trainings = {e.title: _training(setup, e) for e in order}
    plain, contestant = trainings[PLAIN.title], trainings[entry.title]
    for window in windows[:WARM_UP_WINDOWS]:
        plain(window)
        contestant(window)
    seconds: list[tuple[float, float]] = []
    gc.disable()
    for k in range(n_blocks):
        gc.collect()
        first, second = windows[WARM_UP_WINDOWS + 2 * k :][:2]
        outer, inner = (plain, contestant) if k % 2 == 0 else (contestant, plain)
        before = _seconds(setup, outer, first)
        between = _seconds(setup, inner, first) + _seconds(setup, inner, second)
        around = before + _seconds(setup, outer, second)
        seconds.append((around / 2, between / 2) if k % 2 == 0 else (between / 2, around / 2))
    gc.enable()
    return seconds


def _training(setup: Setup, entry: Entry) -> Callable[[Tensor], None]:
    run = Run(setup)
    contestant = entry.make(run)
    return lambda window: run.train_window(contestant, window)


def _seconds(setup: Setup, train: Callable[[Tensor], None], window: Tensor) -> float:
    """Time of one window, on the slowest rank."""
    if setup.ranks > 1:
        dist.barrier()
    took = seconds_of(lambda: train(window), setup.device)
    if setup.ranks > 1:
        slowest = torch.tensor([took], device=window.device)
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
        took = float(slowest)
    return took


def cost(rounds: Sequence[Sequence[tuple[float, float]]], *, n_resamples: int = 4000) -> Cost:
    """Summarise the blocks of several processes; rounds: the result of `time_blocks` in each process.

    The bootstrap draws processes first, then blocks within each: blocks of one process share its memory layout.
    """
    ratios = [[contestant / plain for plain, contestant in blocks] for blocks in rounds]
    rng = random.Random(0)
    medians = sorted(
        statistics.median(
            [r for blocks in rng.choices(ratios, k=len(ratios)) for r in rng.choices(blocks, k=len(blocks))]
        )
        for _ in range(n_resamples)
    )
    return Cost(
        median=statistics.median([r for blocks in ratios for r in blocks]) - 1,
        low=medians[int(0.025 * n_resamples)] - 1,
        high=medians[int(0.975 * n_resamples)] - 1,
        n_blocks=sum(map(len, ratios)),
        seconds_added=statistics.median([contestant - plain for blocks in rounds for plain, contestant in blocks]),
        window_seconds=statistics.median([plain for blocks in rounds for plain, _ in blocks]),
    )


def in_words(cost: Cost) -> str:
    """The share with its interval, then the seconds."""
    added = f"{1e3 * cost.seconds_added:+.2f} of {1e3 * cost.window_seconds:.1f} ms"
    return f"{cost.median:+.2%} [{cost.low:+.2%}, {cost.high:+.2%}], {added}"
