"""The options of the demo, and the choices that follow from them on this machine."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Literal

from tyro.conf import arg

BATCH_PER_RANK = 16
"""Sequences per rank and optimizer step without `--batch`."""


@dataclass(frozen=True)
class DemoOptions:
    """Train a small language model on real text and measure its gradient noise scale.

    The model reads the source files of Python's standard library byte by byte and learns to predict the next byte.
    Several processes train it under DistributedDataParallel. At the end, the noise scale says whether the batch size
    suits the training. Ctrl-C stops early and keeps what was measured. There is a second demo, `sonde demo entropy`:
    it trains a policy by reinforcement learning and forecasts how each update changes the policy's entropy.

    Attributes:
        steps: Optimizer steps.
        ranks: Processes.
        batch: Sequences per optimizer step, over all ranks.
        micro_batches: Backward passes per rank and step, over which gradients accumulate.
        context: Bytes per sequence.
        learning_rate: Peak learning rate of AdamW, after a warm-up and before a cosine decay.
        seed: Seed of the weights and of the windows of text.
        device: Where to train. With auto, on GPUs if there are any, otherwise on the CPU.
        log_every: Optimizer steps between readings.
        out: New or empty folder for the log and the report.
    """

    steps: Annotated[int, arg(metavar="N")] = 300
    ranks: Annotated[int | None, arg(metavar="N", help_behavior_hint="(default: one per GPU, or 2 on the CPU)")] = None
    batch: Annotated[int | None, arg(metavar="N", help_behavior_hint=f"(default: {BATCH_PER_RANK} per rank)")] = None
    micro_batches: Annotated[int, arg(metavar="N")] = 2
    context: Annotated[int, arg(metavar="N")] = 96
    learning_rate: Annotated[float, arg(metavar="RATE")] = 1e-3
    seed: Annotated[int, arg(metavar="N")] = 0
    device: Literal["auto", "cpu", "cuda"] = "auto"
    log_every: Annotated[int, arg(metavar="N")] = 5
    out: Annotated[Path | None, arg(metavar="FOLDER", help_behavior_hint="(default: sonde-demo/DATE-TIME)")] = None


@dataclass(frozen=True)
class Setup:
    """A run with every choice made, the same on every rank.

    Attributes:
        options: of the user.
        folder: for the log and the report.
        device: of every rank.
        ranks: number of processes.
        threads: CPU threads per process.
        batch: sequences per optimizer step, over all ranks.
    """

    options: DemoOptions
    folder: Path
    device: Literal["cpu", "cuda"]
    ranks: int
    threads: int
    batch: int

    def metadata(self) -> dict[str, object]:
        """The choices for the log, as JSON values."""
        chosen = {"device": self.device, "ranks": self.ranks, "threads": self.threads, "batch": self.batch}
        given = {name: value for name, value in asdict(self.options).items() if name != "out"}
        return given | chosen


def decide(options: DemoOptions, folder: Path, *, n_gpus: int, n_cores: int) -> Setup:
    """Make every choice that the options leave open.

    Args:
        options: the options of the user.
        folder: folder for the log and the report.
        n_gpus: number of GPUs of this machine.
        n_cores: number of cores that this process may use.

    Raises:
        ValueError: when an option is out of range, or when options do not fit each other or this machine.
    """
    _check_ranges(options)
    on_cpu = options.device == "cpu" or (options.device == "auto" and n_gpus == 0)
    ranks = options.ranks or (2 if on_cpu else n_gpus)
    if not on_cpu and not 1 <= ranks <= n_gpus:
        raise ValueError(
            f"each rank needs its own GPU, got {ranks} ranks and {n_gpus} GPUs: pass --device cpu or fewer --ranks"
        )
    n_pieces = ranks * options.micro_batches
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
            f"the batch must be a multiple of ranks × micro-batches = {ranks} × {options.micro_batches}, "
            f"got {batch}: pass --batch {below or n_pieces}"
        )
    return Setup(options, folder, "cpu" if on_cpu else "cuda", ranks, max(1, n_cores // ranks), batch)


def _check_ranges(options: DemoOptions) -> None:
    for name in ("steps", "ranks", "batch", "micro_batches", "context", "log_every"):
        value = getattr(options, name)
        if value is not None and value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}: give a whole number from 1 up")
    if not 0 <= options.seed < 2**31:
        raise ValueError(f"seed must be at least 0 and less than 2³¹, got {options.seed}: choose another seed")
    if not 0 < options.learning_rate < math.inf:
        raise ValueError(f"learning_rate must be positive and finite, got {options.learning_rate}: try 0.001")
