"""Training loops under DDP that several tests share, compared with whole gradients of all ranks."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

import sonde
from tests.batch_size.loops import (
    Recording,
    attached,
    batch,
    flat_grad,
    mean_loss,
    small_model,
)
from tests.oracles import window_by_hand

SIZES = ((4, 4, 4), (2, 6, 4), (5, 3, 1))
"""Units of the micro-batches of ranks 0, 1 and 2."""


def in_bf16(state: object, bucket):  # type: ignore[no-untyped-def]  # torch's own refuses gloo by its name
    return default_hooks.bf16_compress_hook(state, bucket)


def in_fp16(state: object, bucket):  # type: ignore[no-untyped-def]  # torch's own refuses gloo by its name
    return default_hooks.fp16_compress_hook(state, bucket)


def batches(rank: int, n_micro: int, window: int = 0) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(100 * rank + 17 * window)
    return [batch(n, generator) for n in SIZES[rank][:n_micro]]


def batches_of_four(n: int) -> list[tuple[Tensor, Tensor]]:
    """n batches of 4 rows, others on each rank."""
    generator = torch.Generator().manual_seed(dist.get_rank())
    return [batch(4, generator) for _ in range(n)]


def first_batches(n_windows: int) -> list[tuple[Tensor, Tensor]]:
    """The first of this rank's `batches` in each window."""
    return [batches(dist.get_rank(), 1, window)[0] for window in range(n_windows)]


def windows_of_one_piece(
    probe: sonde.NoiseScaleProbe,
    model: nn.Module,
    data: Iterable[tuple[Tensor, Tensor]],
    after_each: Callable[[], object] = lambda: None,
) -> None:
    """A window for each batch, at fixed weights."""
    for x, y in data:
        with probe.piece(units=len(x)):
            mean_loss(model, x, y).backward()
        probe.step()
        model.zero_grad()
        after_each()


def wrap(options: dict[str, Any]) -> tuple[nn.Module, DistributedDataParallel]:
    plain = small_model()
    return plain, DistributedDataParallel(plain, **options)


def train_on_rank(
    ddp_options: dict[str, Any],
    *,
    n_micro: int = 3,
    no_sync: bool = True,
    windows: int = 3,
    hook: str | None = None,
    tap: str = "leaf",
    summed: bool = False,
    clip: bool = True,
    same_data: bool = False,
) -> dict[str, Any]:
    """Train a few windows under DDP on this rank, at a fixed model, and compare with whole gradients."""
    rank, world = dist.get_rank(), dist.get_world_size()
    plain, model = wrap(ddp_options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    options: dict[str, Any] = {"tap": tap}
    if hook is not None:
        function, state = {
            "bf16": (in_bf16, None),
            "allreduce": (default_hooks.allreduce_hook, None),
            "powersgd": (powerSGD_hook.powerSGD_hook, powerSGD_hook.PowerSGDState(None, start_powerSGD_iter=2)),
        }[hook]
        if tap == "comm_hook":
            options |= {"comm_hook": function, "comm_state": state}
        else:
            model.register_comm_hook(state, function)
    if ddp_options.get("static_graph"):  # PyTorch asserts if no_sync is in the first iteration of a static graph
        mean_loss(model, *batches(rank, 1)[0]).backward()
        optimizer.zero_grad()
    norms = []
    sink = Recording()
    with attached(model, optimizer, log_every=2, sinks=[sink], **options) as probe:
        for window in range(windows):
            data = batches(0 if same_data else rank, n_micro, window)
            for i, (x, y) in enumerate(data):
                last = i == len(data) - 1
                with probe.piece(units=len(x)), contextlib.nullcontext() if last or not no_sync else model.no_sync():
                    mean_loss(model, x, y).backward()
            if summed:
                for p in plain.parameters():
                    p.grad.mul_(world)  # type: ignore[union-attr]
            if clip:
                norms.append(float(probe.clip_grad_norm_(0.05)))
            else:
                probe.step()
            optimizer.step()
            optimizer.zero_grad()
        reading = probe.reading()
        alerts = probe.alerts
        tap_name = probe._reader.tap_name
    return {
        "reading": reading,
        "norms": norms,
        "alerts": alerts,
        "tap": tap_name,
        "taps_logged": [r["pieces"]["tap"] for r in sink.of_kind("reading")],
        "expected": by_hand(plain, world, n_micro, windows, per_rank=tap == "comm_hook"),
        "hooks": sum(len(p._backward_hooks or ()) for p in plain.parameters()),
    }


def by_hand(model: nn.Module, world: int, n_micro: int, windows: int, *, per_rank: bool) -> dict[str, Any]:
    """Averages over windows of tr Σ, |G|² and the norm, from every rank's whole gradients."""
    estimates, norms = [], []
    for window in range(windows):
        gradients, units = [], []
        for rank in range(world):
            data = batches(rank, n_micro, window)
            rank_gradients = [flat_grad(model, mean_loss(model, x, y)) for x, y in data]
            if per_rank:  # the rank's micro-batches as one piece: weight m, m²/Σ(1/n) units
                gradients.append(torch.stack(rank_gradients).sum(0))
                units.append(n_micro**2 / sum(1 / len(x) for x, _ in data))
            else:
                gradients += rank_gradients
                units += [len(x) for x, _ in data]
        final = torch.stack(gradients).sum(0) / world
        weights = [float(n_micro) if per_rank else 1.0] * len(gradients)
        estimates.append(window_by_hand(gradients, weights, units, final))
        norms.append(float(final.norm()))
    traces, grads = zip(*estimates, strict=True)
    return {"trace_cov": sum(traces) / windows, "grad_sq": sum(grads) / windows, "norms": norms}


def assert_as_by_hand(results: list[dict[str, Any]], *, windows: int = 3, rel: float = 2e-5) -> None:
    first = results[0]["reading"]
    for result in results:
        reading, expected = result["reading"], result["expected"]
        assert reading.windows == windows, reading.dropped
        assert (reading.trace_cov, reading.grad_sq) == (first.trace_cov, first.grad_sq)  # the same on every rank
        # fp32 gradients and their reduction: a few 1e-7 of S and B, amplified by their difference.
        assert reading.trace_cov == pytest.approx(expected["trace_cov"], rel=rel)
        assert reading.grad_sq == pytest.approx(expected["grad_sq"], rel=rel, abs=rel * expected["trace_cov"])
        if result["norms"]:
            assert result["norms"] == pytest.approx(expected["norms"], rel=max(rel, 1e-6))
        assert result["hooks"] == 0
