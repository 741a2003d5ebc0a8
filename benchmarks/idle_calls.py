"""What a window that is not measured costs, call by call.

    python -m benchmarks.idle_calls [--windows 300] [--out benchmarks/results]

A window of 30 ms varies by more than its calls take, so the calls are timed themselves: from outside, within training,
which has pushed their code out of the caches. Beside them is what they time of themselves, from which the probe knows
what they cost.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from benchmarks.contestants import Sonde
from benchmarks.gpt import GptShape, sequences
from benchmarks.machine import page
from benchmarks.training import Run, Setup, draw_windows
from sonde.batch_size.window_clock import ALWAYS

SHAPES = (
    GptShape(width=64, depth=6, heads=4, context=64),
    GptShape(width=16, depth=62, heads=4, context=32),
    GptShape(width=8, depth=2, heads=2, context=8),
)
"""Models of 76 and 748 parameter tensors, as in the benchmark of budgets, and one whose window takes a few ms."""
WARM_UP_WINDOWS = 20


@dataclass(frozen=True)
class Calls:
    """The calls of a window that is not measured, in seconds per window.

    Attributes:
        tensors: parameter tensors of the model.
        pieces: `probe.piece()`, with both its ends.
        step: `probe.step()`.
        hooks: of the optimizer's step.
        themselves: what the probe has timed of all three.
        window: a window with them.
    """

    tensors: int
    pieces: float
    step: float
    hooks: float
    themselves: float
    window: float

    @property
    def outside(self) -> float:
        """All three, timed from outside."""
        return self.pieces + self.step + self.hooks


class Timer:
    """Adds up stretches of time, less what the two calls of the clock take themselves."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._start = 0.0
        empty = []
        for _ in range(100):
            start = time.perf_counter()
            empty.append(time.perf_counter() - start)
        self._empty = statistics.median(empty)

    def start(self, *_: object) -> None:
        """Begin a stretch. The clock is called once before, so that it is in the caches."""
        time.perf_counter()
        self._start = time.perf_counter()

    def stop(self, *_: object) -> None:
        """End the stretch."""
        self.seconds += time.perf_counter() - self._start - self._empty

    def of(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """The result of a call, timed."""
        self.start()
        result = call(*args, **kwargs)
        self.stop()
        return result


def calls_of(setup: Setup, n_windows: int) -> Calls:
    """Train with a probe that measures none of the windows, and time its calls.

    Args:
        setup: model and windows, in one process.
        n_windows: windows to time.
    """
    run = Run(setup)
    pieces, step, hooks = Timer(), Timer(), Timer()
    # Hooks for all optimizers run in the order of their registration: pre-hooks before an optimizer's own, post-hooks
    # after. So these four stand around those of sonde.
    handles = [register_optimizer_step_pre_hook(hooks.start)]
    probe = Sonde(run, every=10**6).probe
    handles += [
        run.optimizer.register_step_pre_hook(hooks.stop),
        run.optimizer.register_step_post_hook(hooks.start),
        register_optimizer_step_post_hook(hooks.stop),
    ]
    windows = draw_windows(setup, sequences(setup.shape), WARM_UP_WINDOWS + n_windows, seed=0)

    def train(window: torch.Tensor, end: Callable[[], object]) -> None:
        for tokens in window:
            loss = run.wrapped(tokens)
            piece: AbstractContextManager[None] = pieces.of(probe.piece, units=setup.sequences)
            pieces.of(piece.__enter__)
            (loss / setup.micro_batches).backward()
            pieces.of(piece.__exit__, None, None, None)
        step.of(end)
        run.optimizer.step()
        run.optimizer.zero_grad()

    for window in windows[:WARM_UP_WINDOWS]:
        train(window, probe.step)
    for timer in (pieces, step, hooks):
        timer.seconds = 0.0
    start, before = time.perf_counter(), probe._pieces.spent[ALWAYS]
    for window in windows[WARM_UP_WINDOWS:]:
        train(window, probe.step)
    took, themselves = time.perf_counter() - start, probe._pieces.spent[ALWAYS] - before
    calls = [timer.seconds / n_windows for timer in (pieces, step, hooks)]
    for handle in handles:
        handle.remove()
    probe.close()
    tensors = sum(1 for _ in run.model.parameters())
    return Calls(tensors, *calls, themselves=themselves / n_windows, window=took / n_windows)


def as_table(rows: Sequence[Calls]) -> str:
    """A row for each model."""
    lines = [
        "| parameter tensors | window | `piece()`, 4 times | `step()` | optimizer's hooks | together | of the window "
        "| timed by themselves | together, over that |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        calls = [f"{1e6 * seconds:.0f} µs" for seconds in (row.pieces, row.step, row.hooks, row.outside)]
        cells = [f"{row.tensors}", f"{1e3 * row.window:.1f} ms", *calls, f"{100 * row.outside / row.window:.2f} %"]
        cells += [f"{1e6 * row.themselves:.0f} µs", f"{row.outside / row.themselves:.1f}"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--windows", type=int, default=300)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    rows = [calls_of(Setup(1, 1, micro_batches=4, sequences=2, shape=shape), options.windows) for shape in SHAPES]
    command = f"python -m benchmarks.idle_calls --windows {options.windows}"
    text = page("Calls of a window that is not measured", command, as_table(rows))
    print(text)
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "idle_calls_cpu.md").write_text(text)


if __name__ == "__main__":
    main()
