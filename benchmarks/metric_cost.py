"""What each metric adds to a measured window.

    python -m benchmarks.metric_cost                # a GPT of 3.3M parameters, 4 micro-batches of 4 × 128 tokens
    python -m benchmarks.metric_cost --blocks 40 --sequences 16

For each choice of `metric=`, two models train side by side with AdamW, one of them with a probe that measures every
window, in blocks that go plain, probe, probe, plain. Leave the machine alone meanwhile. Only measured windows pay: at
one window in N, training pays an N-th.
"""

from __future__ import annotations

import gc
import time
from dataclasses import dataclass

import torch
import tyro

import sonde
from benchmarks.machine import describe
from benchmarks.per_example import Options as ModelOptions
from benchmarks.per_example import build
from benchmarks.timing import Cost, cost

CHOICES: tuple[tuple[str, ...], ...] = (
    ("euclidean",),
    ("adam",),
    ("euclidean", "adam"),
    ("euclidean", "sign"),
    ("euclidean", "spectral"),
    ("euclidean", "adam", "sign", "spectral"),
)
WARM_UP = 3


@dataclass(frozen=True)
class Options:
    """What is measured.

    Attributes:
        blocks: of four windows, two of each model.
        sequences: in a micro-batch.
        micro_batches: in a window.
        width: of the model.
        depth: blocks of the model.
        context: tokens in a sequence.
        threads: of the CPU.
    """

    blocks: int = 20
    sequences: int = 4
    micro_batches: int = 4
    width: int = 256
    depth: int = 4
    context: int = 128
    threads: int = 1


class Training:
    """A model that trains on the same few micro-batches again and again.

    Args:
        options: of the benchmark.
        metric: what its probe measures; None without a probe.
    """

    def __init__(self, options: Options, metric: tuple[str, ...] | None) -> None:
        size = ModelOptions(
            sequences=options.sequences, width=options.width, depth=options.depth, context=options.context
        )
        self._model, tokens = build(size)
        self._batches = [tokens.roll(shift) for shift in range(options.micro_batches)]
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=1e-4)
        self.probe = None
        if metric is not None:
            attached = {"unit": "sequences", "units_per_piece": float(options.sequences), "every": 1, "verbose": False}
            self.probe = sonde.attach(self._model, self._optimizer, metric=metric, staging_mib=64.0, **attached)  # type: ignore[arg-type]

    def window_seconds(self) -> float:
        """Train one window, and time it."""
        begin = time.perf_counter()
        for tokens in self._batches:
            self._model(tokens).sum().backward()
        if self.probe is not None:
            self.probe.step()
        self._optimizer.step()
        self._optimizer.zero_grad()
        return time.perf_counter() - begin


def run(options: Options, metric: tuple[str, ...]) -> Cost:
    """What a metric, or several, add to a window."""
    plain, probed = Training(options, None), Training(options, metric)
    for _ in range(WARM_UP):
        plain.window_seconds()
        probed.window_seconds()
    blocks = []
    gc.disable()
    for k in range(options.blocks):
        gc.collect()
        outer, inner = (plain, probed) if k % 2 == 0 else (probed, plain)
        around = outer.window_seconds()
        between = inner.window_seconds() + inner.window_seconds()
        around += outer.window_seconds()
        blocks.append((around / 2, between / 2) if k % 2 == 0 else (between / 2, around / 2))
    gc.enable()
    assert probed.probe is not None
    probed.probe.close()
    return cost([blocks])


def main() -> None:
    """Print a table."""
    options = tyro.cli(Options, description=__doc__)
    torch.set_num_threads(options.threads)
    for name, value in describe("cpu", ()).items():
        print(f"- {name}: {value}")
    print(f"- {options}\n\n| metric | a measured window | of |\n|---|---|---|")
    for metric in CHOICES:
        found = run(options, metric)
        added = f"{100 * found.median:+.1f} % [{100 * found.low:.1f}, {100 * found.high:.1f}]"
        print(f"| {', '.join(metric)} | {added} | {1000 * found.window_seconds:.0f} ms |", flush=True)


if __name__ == "__main__":
    main()
