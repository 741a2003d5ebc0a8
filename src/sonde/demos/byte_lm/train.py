"""The training of one rank: DistributedDataParallel, gradient accumulation, AdamW, and a probe."""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import sonde
from sonde.demos.byte_lm.data import draw_windows, find_sources, read_corpus, window_generator
from sonde.demos.byte_lm.interrupt import StopRequest
from sonde.demos.byte_lm.model import ByteTransformer
from sonde.demos.byte_lm.options import Setup
from sonde.demos.byte_lm.progress import TrainingDisplay
from sonde.demos.console import LastingConsole

MAX_GRAD_NORM = 1.0
WARMUP_STEPS = 20
LAST_RATE = 0.1  # of the peak learning rate


@dataclass(frozen=True)
class Ending:
    """How a training ended.

    Attributes:
        n_steps: optimizer steps done.
        interrupted: whether Ctrl-C stopped it before the last step.
    """

    n_steps: int
    interrupted: bool


def train_rank(setup: Setup) -> Ending:
    """Train one rank, in its own process, which torch's launcher has started.

    Args:
        setup: the run, the same on every rank.

    Returns:
        The ending, the same on every rank.
    """
    stop = StopRequest()
    if setup.device == "cuda":  # NCCL, which serves CUDA and ROCm alone: the demo is not for other accelerators
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
        dist.init_process_group("cpu:gloo,cuda:nccl", device_id=device)
    else:
        device = torch.device("cpu")
        torch.set_num_threads(setup.n_threads)
        dist.init_process_group("gloo")
    try:
        return _train(setup, device, stop)
    finally:
        dist.destroy_process_group()


def _train(setup: Setup, device: torch.device, stop: StopRequest) -> Ending:
    rank = dist.get_rank()
    corpus = read_corpus(find_sources())
    torch.manual_seed(setup.seed)  # the same initial weights on every rank
    model = DistributedDataParallel(ByteTransformer(context=setup.context).to(device))
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.99))

    logging.getLogger("sonde").addHandler(logging.NullHandler())  # the display shows the alerts of the probe
    display = TrainingDisplay(setup, LastingConsole(quiet=rank != 0))
    log = sonde.RunLog(
        [sonde.JsonlSink(setup.folder), display],
        run="sonde demo: byte-level language model",
        metadata=setup.metadata(),
        every=setup.log_every,
    )
    probe = sonde.attach(
        model,
        optimizer,
        unit="sequences",
        every=1,  # a few hundred steps are few: by default, windows are left out to cost 1 %
        log=log,
    )
    with display, probe:
        for step in range(setup.n_steps):
            if stop.agreed():
                probe.close("interrupted")
                return Ending(step, interrupted=True)
            generator = window_generator(setup.seed, step, rank)
            windows = draw_windows(corpus, setup.batch // setup.n_ranks, setup.context, generator).to(device)
            for group in optimizer.param_groups:
                group["lr"] = setup.learning_rate * rate_at(step, setup.n_steps)

            loss = accumulate_gradients(model, probe, windows.chunk(setup.n_micro_batches))
            probe.log(loss=loss)
            probe.clip_grad_norm_(MAX_GRAD_NORM)
            optimizer.step()
            optimizer.zero_grad()
            display.advance(step + 1)
        probe.close("finished")
    return Ending(setup.n_steps, interrupted=False)


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
