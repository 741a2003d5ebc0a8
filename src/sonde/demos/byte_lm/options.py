"""The options of the demo."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

from tyro.conf import arg

from sonde.demos.console import check_ranges

BATCH_PER_RANK = 16
"""Sequences per rank and optimizer step without `--batch`."""


@dataclass(frozen=True)
class DemoOptions:
    """Train a small language model on real text and measure its gradient noise scale.

    The model reads the source files of Python's standard library byte by byte and learns to predict the next byte.
    Several processes train it on the CPU under DistributedDataParallel. At the end, the noise scale says whether the
    batch size suits the training. Ctrl-C stops early and keeps what was measured. There is a second demo, `sonde demo
    entropy`: it trains a policy by reinforcement learning and forecasts how each update changes the policy's entropy.

    Attributes:
        steps: Optimizer steps.
        ranks: Processes.
        batch: Sequences per optimizer step, over all ranks.
        micro_batches: Backward passes per rank and step, over which gradients accumulate.
        context: Bytes per sequence.
        learning_rate: Peak learning rate of AdamW, after a warm-up and before a cosine decay.
        seed: Seed of the weights and of the windows of text.
        log_every: Optimizer steps between readings.
        out: New or empty folder for the log and the report.
    """

    steps: Annotated[int, arg(metavar="N")] = 300
    ranks: Annotated[int, arg(metavar="N")] = 2
    batch: Annotated[int | None, arg(metavar="N", help_behavior_hint=f"(default: {BATCH_PER_RANK} per rank)")] = None
    micro_batches: Annotated[int, arg(metavar="N")] = 2
    context: Annotated[int, arg(metavar="N")] = 96
    learning_rate: Annotated[float, arg(metavar="RATE")] = 1e-3
    seed: Annotated[int, arg(metavar="N")] = 0
    log_every: Annotated[int, arg(metavar="N")] = 5
    out: Annotated[Path | None, arg(metavar="FOLDER", help_behavior_hint="(default: sonde-demo/DATE-TIME)")] = None


def decided(options: DemoOptions) -> DemoOptions:
    """The options with a batch that fits them.

    Raises:
        ValueError: when an option is out of range, or when options do not fit each other.
    """
    check_ranges(options, "steps", "ranks", "batch", "micro_batches", "context", "log_every")
    n_pieces = options.ranks * options.micro_batches
    if n_pieces < 2:
        raise ValueError(
            "need at least 2 pieces per step to distinguish noise from signal, got 1 rank × 1 micro-batch: "
            "pass --micro-batches 2 or --ranks 2"
        )
    default = n_pieces * max(1, round(BATCH_PER_RANK / options.micro_batches))
    batch = default if options.batch is None else options.batch
    if batch % n_pieces:
        below = batch - batch % n_pieces
        raise ValueError(
            f"the batch must be a multiple of ranks × micro-batches = {options.ranks} × {options.micro_batches}, "
            f"got {batch}: pass --batch {below or n_pieces}"
        )
    return replace(options, batch=batch)
