"""Training on any device, with and without a probe: what the tests on a GPU run, and the tests on a CPU run too.

The functions know nothing of the device but its name. So a CPU shows that they are right, and a GPU what it does.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import sonde
from sonde.parallel.devices import runs_beside_host, stream_of
from sonde.policy.entropy_change import EntropyChangeProbe
from sonde.policy.entropy_options import EntropyChangeOptions
from sonde.policy.scoring.rollouts import Rollouts
from tests.pretend_device import PretendDevice
from tests.small_policy import STATISTICS, drawn, loss, optimizer_of, policy

WINDOWS, PIECES, ROWS = 6, 3, 16


@contextlib.contextmanager
def no_waiting(device: torch.device) -> Iterator[None]:
    """Inside, anything that waits for a CUDA device or for the pretended one raises; other devices cannot tell."""
    if PretendDevice.present is not None:
        with PretendDevice.present.no_reads(of_anyone=True):
            yield
        return
    # Gloo copies through the host, and waits for it in threads of its own.
    if device.type != "cuda" or (dist.is_initialized() and "cuda:gloo" in dist.get_backend_config()):
        yield
        return
    with warnings.catch_warnings():
        # torch warns at the first call, which is an error under pytest, that the mode does not see everything.
        warnings.filterwarnings("ignore", "Synchronization debug mode is a prototype")
        try:
            torch.cuda.set_sync_debug_mode("error")
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")


def model_on(device: torch.device) -> nn.Sequential:
    """Parameters that are reduced inside hooks, and small ones that wait."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.LayerNorm(256), nn.Linear(256, 256), nn.Linear(256, 8)).to(
        device
    )


def rows_on(device: torch.device, seed: int, n_windows: int) -> Tensor:
    """Inputs, made on the CPU so that they are the same everywhere; [windows, pieces, rows, 64]."""
    generator = torch.Generator(device="cpu").manual_seed(seed)
    return torch.randn(n_windows, PIECES, ROWS, 64, generator=generator, device="cpu").to(device)


def wrapped(model: nn.Module, how: str, device: torch.device) -> nn.Module:
    """The model as it is, or in DDP, FSDP2, HSDP or tensor parallelism over all ranks of the default group."""
    if how == "ddp":
        return DistributedDataParallel(model)
    if how in ("fsdp2", "hsdp"):
        for layer in (model[0], model[3]):  # type: ignore[index]
            fully_shard(layer, mesh=mesh_on(device, how))
        return fully_shard(model, mesh=mesh_on(device, how))
    if how == "tp":
        cut = {"0": ColwiseParallel(output_layouts=Replicate()), "3": ColwiseParallel(), "4": RowwiseParallel()}
        return parallelize_module(model, mesh_on(device, how), cut)  # type: ignore[arg-type]
    return model


_meshes: dict[tuple[str, bool], Any] = {}


def mesh_on(device: torch.device, how: str) -> Any:
    """One mesh of all ranks, for HSDP of two axes; a new mesh would make new groups."""
    key, n_ranks = (device.type, how == "hsdp"), dist.get_world_size()
    if key not in _meshes:
        shape, names = ((n_ranks, 1), ("replicate", "shard")) if how == "hsdp" else ((n_ranks,), None)
        _meshes[key] = init_device_mesh(device.type, shape, mesh_dim_names=names)
    return _meshes[key]


def forget_meshes() -> None:
    """The groups of the meshes have ended."""
    _meshes.clear()


def backends(device_type: str, shared: str = "") -> str:
    """The backends of a default group: gloo on the CPU, the device's own or a named one on the device."""
    on_device = shared or dist.get_default_backend_for_device(device_type)
    return "cpu:gloo" if device_type == "cpu" else f"cpu:gloo,{device_type}:{on_device}"


def train(
    device: torch.device,
    *,
    probed: bool,
    how: str = "plain",
    end: str = "step",
    beside: bool = False,
    every: int | None = 1,
    fused: bool = False,
    n_pieces: int = PIECES,
    **options: Any,
) -> tuple[sonde.NoiseScaleReading | None, list[Tensor]]:
    """A reading, and the weights after some windows.

    Args:
        device: to train on.
        probed: with a probe.
        how: "plain", "ddp", "fsdp2", "hsdp" or "tp".
        end: of a window: "step" or "clip".
        beside: run every second backward on a stream of its own.
        every: as `attach`.
        fused: the optimizer's.
        n_pieces: of a window.
        **options: of `attach`.
    """
    model = wrapped(model_on(device), how, device)
    # With a smaller eps, Adam's metric weighs elements whose gradient is little more than rounding by far the most.
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-4, fused=fused)
    rank = dist.get_rank() if how not in ("plain", "tp") else 0  # ranks of tensor parallelism share a micro-batch
    data = rows_on(device, rank, WINDOWS)[:, :n_pieces]
    parameters = list(model.parameters())
    mesh = mesh_on(device, how) if how in ("fsdp2", "hsdp", "tp") else None
    plan = sonde.group_parameters_for_norm(parameters, mesh=mesh) if end != "step" else None
    probe = None
    if probed:
        options = {"unit": "rows", "units_per_piece": ROWS, "every": every, "verbose": False} | options
        probe = sonde.attach(model, optimizer, **options)
    # The first backward makes state that may wait. DDP moves gradients to other buckets in the second window's forward.
    n_warm = 2 if how == "ddp" else 1
    for k, window in enumerate(data):
        with contextlib.nullcontext() if k < n_warm else no_waiting(device):
            train_window(model, window, probe, beside=beside)
            end_window(probe, plan, end)
            optimizer.step()
            optimizer.zero_grad()
    reading = probe.reading() if probe else None
    if probe:
        probe.close()
    return reading, [_local(p).detach().clone() for p in parameters]


def train_window(model: nn.Module, window: Tensor, probe: Any, *, beside: bool) -> None:
    """The backwards of one window's pieces."""
    for k, x in enumerate(window):
        piece = probe.piece() if probe else contextlib.nullcontext()
        waits = isinstance(model, DistributedDataParallel) and k < len(window) - 1
        sync = model.no_sync() if waits else contextlib.nullcontext()  # type: ignore[operator]
        with piece, sync, other_stream(x) if beside and k % 2 else contextlib.nullcontext():
            model(x).square().mean().backward()


@contextlib.contextmanager
def other_stream(x: Tensor) -> Iterator[None]:
    """Another stream than the present one, which waits for it and is waited for; nothing on a CPU."""
    if not runs_beside_host(x.device):
        yield
        return
    present, other = stream_of(x), torch.Stream(x.device)
    assert present is not None
    other.wait_stream(present)
    with other:
        yield
    present.wait_stream(other)


def end_window(probe: Any, plan: Any, end: str) -> None:
    """End a window as asked for; without a probe, clip as the probe does."""
    if end == "clip":
        probe.clip_grad_norm_(0.1) if probe else sonde.clip_grad_norm_distributed_(plan, 0.1)
        return
    if probe:
        probe.step()


def _local(p: Tensor) -> Tensor:
    return p.to_local() if hasattr(p, "to_local") else p  # type: ignore[no-any-return]


SETUPS: dict[str, dict[str, Any]] = {
    "leaf hooks": {},
    "gradients that wait": {"staging_mib": 1e-3},
    "backwards on two streams": {"beside": True},
    "Adam's metric": {"metric": "adam"},
    "the sign metric": {"metric": "sign"},
    "the spectral metric": {"metric": "spectral"},
    "metrics together": {"metric": ("euclidean", "adam", "sign", "spectral"), "end": "clip"},
    "one window in three": {"every": 3},
    "a clip": {"end": "clip"},
    "a fused optimizer": {"fused": True},
    "single examples": {"per_example": "always"},
}
ON_RANKS: dict[str, dict[str, Any]] = {
    "DDP, leaf hooks": {"how": "ddp"},
    "DDP, a clip": {"how": "ddp", "end": "clip"},
    "DDP, single examples": {"how": "ddp", "per_example": "always"},
    "FSDP2": {"how": "fsdp2"},
    "FSDP2, a clip": {"how": "fsdp2", "end": "clip"},
    "FSDP2, single examples": {"how": "fsdp2", "per_example": "always"},
    "FSDP2, metrics together": {"how": "fsdp2", "metric": ("sign", "euclidean")},
    "HSDP": {"how": "hsdp"},
    "HSDP, a clip": {"how": "hsdp", "end": "clip"},
    "tensor parallelism": {"how": "tp"},
    "tensor parallelism, a clip": {"how": "tp", "end": "clip"},
}


def compared(device: torch.device, setup: dict[str, Any]) -> tuple[Any, bool]:
    """A set-up's reading on a device, and whether its weights are bit for bit those without a probe.

    Without a probe it is trained first, and on a device twice: what torch itself waits for, or does not repeat, is no
    fault of sonde's.
    """
    options = ("metric", "staging_mib", "per_example")
    without = {k: v for k, v in setup.items() if k not in options}
    _, plain = train(device, probed=False, **without)
    if device.type != "cpu":
        _, again = train(device, probed=False, **without)
        assert equal(plain, again), "without a probe, training is not the same bit for bit when it is repeated"
    reading, weights = train(device, probed=True, **setup)
    return reading, equal(weights, plain)


def equal(a: list[Tensor], b: list[Tensor]) -> bool:
    """Whether tensors are the same bit for bit."""
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def check(reading: Any, expected: Any, *, is_untouched: bool) -> None:
    """Compare a device's reading with that of the CPU."""
    assert is_untouched
    assert (reading.windows, dict(reading.dropped)) == (expected.windows, dict(expected.dropped))
    assert reading.windows > WINDOWS // 4
    # Products of matrices round otherwise on a GPU, in fp32 by some 1e-6, and TF32 is off by default.
    assert (reading.trace_cov, reading.grad_sq) == pytest.approx((expected.trace_cov, expected.grad_sq), rel=1e-2)


def entropy_forecast(device: torch.device, **options: Any) -> float:
    """The change of a small policy's entropy that a forecast finds on a device, from the same responses everywhere."""
    model, optimizer, evaluated, learned = policy_on(device)
    loss(model, learned).backward()
    forecast = EntropyChangeProbe(model, optimizer, EntropyChangeOptions(**options)).forecast(evaluated)
    assert forecast.delta is not None, forecast.reason
    return float(forecast.delta)


def train_policy(device: torch.device, *, probed: bool, **options: Any) -> list[Tensor]:
    """A small policy's weights after some steps. A forecast waits for the device; the steps themselves do not."""
    model, optimizer, evaluated, learned = policy_on(device)
    credit = learned.credit().to(device)
    probe = EntropyChangeProbe(model, optimizer, EntropyChangeOptions(**options)) if probed else None
    for _ in range(3):
        with no_waiting(device):
            s, _ = STATISTICS(model, learned)
            (-(credit * s).sum() / len(learned)).backward()
        with probe.around_step(evaluated) if probe else contextlib.nullcontext() as around, no_waiting(device):
            optimizer.step()
        assert around is None or around.forecast.delta is not None
        optimizer.zero_grad()
    return [p.detach().clone() for p in model.parameters()]


def policy_on(device: torch.device) -> tuple[nn.Module, torch.optim.Optimizer, Rollouts, Rollouts]:
    """A small policy on a device and its optimizer; responses to evaluate and to learn from, their tokens there."""

    def moved(rollouts: Rollouts) -> Rollouts:
        """Tokens where the policy is; the rest stays on the host."""
        return dataclasses.replace(rollouts, inputs={name: x.to(device) for name, x in rollouts.inputs.items()})

    on_cpu = policy()
    optimizer_of(on_cpu)  # some steps, for weights that are not those of a start
    evaluated, learned = (moved(drawn(on_cpu, first, n, seed=n)) for first, n in ((0, 24), (200, 12)))
    model = copy.deepcopy(on_cpu).to(device)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3), evaluated, learned
