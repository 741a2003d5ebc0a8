"""The training of one rank: DistributedDataParallel, gradient accumulation, AdamW, and a probe."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import sonde
from sonde.batch_size.stats.columns import NOISE_SCALE
from sonde.demos.byte_lm.options import DemoOptions
from sonde.demos.byte_lm.task import ByteTransformer, draw_windows, find_sources, read_corpus, window_generator
from sonde.stats.intervals import logged_interval
from sonde.wording import count, number, percent

MAX_GRAD_NORM = 1.0
WARMUP_STEPS = 20
LAST_RATE = 0.1  # of the peak learning rate
_SECONDS_BETWEEN_LINES = 5.0


def train_rank(
    rank: int, options: DemoOptions, folder: Path, meeting_point: Path, is_asked_to_stop: Event, launcher: int
) -> None:
    """Train one rank, in its own process.

    Args:
        rank: its number.
        options: with a batch; the same on every rank.
        folder: for the log.
        meeting_point: a file that is not there yet, by which the ranks find each other.
        is_asked_to_stop: set by the launcher at Ctrl-C. All ranks then stop together, after the same step.
        launcher: its process. If it is gone, the ranks stop too.
    """
    where: dict[str, Any] = {"init_method": f"file://{meeting_point}", "rank": rank, "world_size": options.ranks}
    # In a container or under taskset, a process may use fewer cores than the machine has.
    n_cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    torch.set_num_threads(max(1, n_cores // options.ranks))
    dist.init_process_group("gloo", **where)
    try:
        _train(options, folder, lambda: is_asked_to_stop.is_set() or os.getppid() != launcher)
    finally:
        dist.destroy_process_group()


def _train(options: DemoOptions, folder: Path, must_stop: Callable[[], bool]) -> None:
    rank, batch = dist.get_rank(), options.batch or 0
    corpus = read_corpus(find_sources())
    torch.manual_seed(options.seed)  # the same initial weights on every rank
    model = DistributedDataParallel(ByteTransformer(context=options.context))
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.99))

    log = sonde.RunLog(
        [sonde.JsonlSink(folder), sonde.FunctionSink(_shown(options))],
        run="sonde demo: byte-level language model",
        metadata={name: value for name, value in vars(options).items() if name != "out"},
        every=options.log_every,
    )
    # By default, windows are left out to cost 1 %. A few hundred steps are few.
    with sonde.attach(model, optimizer, unit="sequences", every=1, log=log) as probe:
        for step in range(options.steps):
            if _any_rank(must_stop()):
                probe.close("interrupted")
                return
            generator = window_generator(options.seed, step, rank)
            windows = draw_windows(corpus, batch // options.ranks, options.context, generator)
            for group in optimizer.param_groups:
                group["lr"] = options.learning_rate * rate_at(step, options.steps)

            loss = accumulate_gradients(model, probe, windows.chunk(options.micro_batches))
            probe.log(loss=loss)
            probe.clip_grad_norm_(MAX_GRAD_NORM)
            optimizer.step()
            optimizer.zero_grad()
        probe.close("finished")


def _any_rank(value: bool) -> bool:
    """Whether it is so on any rank. All ranks call this together and get the same answer."""
    found = torch.tensor(float(value))
    dist.all_reduce(found, op=dist.ReduceOp.MAX)
    return bool(found)


def accumulate_gradients(
    model: DistributedDataParallel, probe: sonde.NoiseScaleProbe, micro_batches: Sequence[Tensor]
) -> Tensor:
    """Run one backward per micro-batch. Ranks exchange gradients only in the last backward.

    Args:
        model: the model. Its gradients are 0.
        probe: the probe, which must know where each piece begins and ends.
        micro_batches: bytes, each [windows, context + 1].

    Returns:
        The mean loss of this rank's micro-batches, in nats per byte.
    """
    losses: list[Tensor] = []
    for windows in micro_batches:
        is_last = len(losses) == len(micro_batches) - 1
        with probe.piece(units=len(windows)), nullcontext() if is_last else model.no_sync():
            loss = next_byte_loss(model, windows)
            (loss / len(micro_batches)).backward()
        losses.append(loss.detach())
    return torch.stack(losses).mean()


def next_byte_loss(model: nn.Module, windows: Tensor) -> Tensor:
    """Mean cross-entropy of the next byte, in nats per byte.

    Args:
        model: the model; it returns logits [windows, context, 256].
        windows: bytes, [windows, context + 1].
    """
    logits = model(windows[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten())


def rate_at(step: int, n_steps: int) -> float:
    """The learning rate divided by its peak: a linear warm-up, then half a cosine down to a tenth.

    Args:
        step: the optimizer step, from 0.
        n_steps: optimizer steps of the whole run.
    """
    if step < WARMUP_STEPS:
        return (step + 1) / WARMUP_STEPS
    done = (step - WARMUP_STEPS) / max(1, n_steps - WARMUP_STEPS)
    return LAST_RATE + (1 - LAST_RATE) * (1 + math.cos(math.pi * done)) / 2


def _shown(options: DemoOptions) -> Callable[[Mapping[str, float], int], None]:
    """Prints a line of a reading, a few seconds apart, and of the last one."""
    last, console = time.monotonic(), Console(highlight=False)

    def show(metrics: Mapping[str, float], step: int) -> None:
        nonlocal last
        if time.monotonic() - last >= _SECONDS_BETWEEN_LINES or step == options.steps:
            last = time.monotonic()
            console.print(_line(metrics, step, options), markup=False, soft_wrap=True)

    return show


def _line(metrics: Mapping[str, float], step: int, options: DemoOptions) -> str:
    speed, known = metrics.get("run/units_per_second"), logged_interval(metrics, NOISE_SCALE)
    scale = f"{known.in_words} sequences" if known.low is not None else known.in_words
    return (
        f"step {step}/{options.steps}, loss {number(metrics.get('sonde/loss'))} nats per byte, B_simple {scale}, "
        f"{count(speed and speed * options.context)} bytes/s, probe {percent(metrics.get('cost/fraction'))} of the time"
    )
