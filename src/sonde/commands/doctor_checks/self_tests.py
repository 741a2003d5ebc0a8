"""Self-tests of `sonde doctor`: each mechanism on this machine beside its definition, computed in float64.

`python -m sonde.commands.doctor_checks.self_tests GROUP RANK STORE` runs a group in a process of its own, since
a test may crash or hang. It writes to stdout, as JSON, the name of each test when it begins, then the row.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import os
import sys
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import sonde
from sonde.commands.doctor_checks.check import REPORT_IT, Check, checked
from sonde.parallel.devices import default_device, has_float64, runs_beside_host
from sonde.wording import number

N_RANKS = 2
Compared = tuple[str, Sequence[float], Sequence[float]]
"""What was measured, in words; the numbers by sonde, and the exact ones."""
Test = Callable[[], Check | Compared]
_TOLERANCE = 1e-4
"""Relative. Gradients of 8 rows are exact to about 1e-7 in fp32, and differences of their squares to about 1e-6."""
_CPU = torch.device("cpu")


# A linear model, whose gradients are one line.

_RANDOM = torch.Generator().manual_seed(0)
_X = torch.randn(8, 3, generator=_RANDOM, dtype=torch.float64, device=_CPU)
_Y = torch.randn(8, generator=_RANDOM, dtype=torch.float64, device=_CPU)
_WEIGHT = torch.tensor([0.3, -0.2, 0.5], dtype=torch.float64, device=_CPU)
_WHAT = "tr Σ, |G|², norm"


def exact(n_pieces: int) -> list[float]:
    """tr Σ, |G|² and |F| of a step on all rows, by the definitions in docs/noise-scale.md."""
    of_rows = 2 * (_X @ _WEIGHT - _Y)[:, None] * _X  # [rows, parameters]
    pieces = of_rows.view(n_pieces, -1, 3).mean(1)
    small, big = float(pieces.square().sum(1).mean()), float(pieces.mean(0).square().sum())
    u, v = n_pieces / len(_X), 1 / len(_X)
    return [(small - big) / (u - v), (u * big - v * small) / (u - v), math.sqrt(big)]


def _model(device: torch.device = _CPU) -> nn.Module:
    model = nn.Linear(3, 1, bias=False, device=device)
    model.load_state_dict({"weight": _WEIGHT.float()[None]})
    return model


def _measured(model: nn.Module, n_pieces: int, rows: slice = slice(8), **options: Any) -> list[float]:
    """The same by sonde: a step on these rows, in so many pieces."""
    device = next(model.parameters()).device
    x, y = (values[rows].float().to(device).chunk(n_pieces) for values in (_X, _Y))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with sonde.attach(model, optimizer, unit="rows", every=1, verbose=False, **options) as probe:
        for k in range(n_pieces):
            ((model(x[k])[:, 0] - y[k]).square().mean() / n_pieces).backward()
        norm = probe.clip_grad_norm_(None)
        optimizer.step()
        window = probe.window()
        if window is None:
            raise RuntimeError(f"the step was left out: {', '.join(probe.reading().dropped)}")
        return [window.total.trace_cov, window.total.grad_sq, float(norm)]


def micro_batches() -> Compared:
    """By hooks on parameters, on the CPU and on the accelerator."""
    devices = dict.fromkeys((_CPU, default_device()))
    measured = [value for device in devices for value in _measured(_model(device), 4, per_example="never")]
    return f"{_WHAT} on {' and '.join(map(str, devices))}", measured, exact(4) * len(devices)


def single_examples() -> Compared:
    """By the inputs and output gradients of layers."""
    return _WHAT, _measured(_model(default_device()), 1, per_example="always"), exact(8)


def norm_and_clip() -> Compared:
    """`sonde.clip_grad_norm_` beside an exact sum."""
    weight = nn.Parameter(torch.zeros(1000, device=default_device()))
    weight.grad = torch.randn(1000, generator=_RANDOM, device=_CPU).to(weight.device)
    before = weight.grad.tolist()
    norm, whole = float(sonde.clip_grad_norm_(weight, 1.0)), math.sqrt(math.fsum(g * g for g in before))
    return "1,000 clipped elements", [norm, *weight.grad.tolist()], [whole, *(g / whole for g in before)]


def devices() -> Check:
    """What torch finds."""
    device, advice = default_device(), ""
    backends = [name for name in ("gloo", "nccl", "xccl") if dist.is_available() and dist.is_backend_available(name)]
    found = f"CPU with {torch.get_num_threads()} threads, {', '.join(backends) or 'no backend'} for ranks"
    if runs_beside_host(device):
        name = getattr(torch.get_device_module(device), "get_device_name", lambda: device.type)()
        found += f", {torch.accelerator.device_count()} × {name}"
        found += "" if has_float64(device) else " without fp64: sums are in fp32"
    is_asked_for = torch.version.cuda or os.environ.get("CUDA_VISIBLE_DEVICES", "-1") not in ("", "-1")
    if device.type == "cpu" and is_asked_for:
        built = "for CUDA" if torch.version.cuda else "without CUDA"
        advice = f"torch is built {built}, and finds no GPU: look at nvidia-smi and CUDA_VISIBLE_DEVICES"
    elif torch.cuda.device_count() > 1 and "nccl" not in backends:
        advice = "install a torch with NCCL to use several GPUs"
    return Check("devices", "warning" if advice else "ok", found, advice)


# On two ranks.


def _on_this_rank(model: nn.Module) -> Compared:
    first = 4 * dist.get_rank()
    return _WHAT, _measured(model, 1, slice(first, first + 4), per_example="never"), exact(N_RANKS)


def DDP() -> Compared:
    """A piece on each rank."""
    return _on_this_rank(nn.parallel.DistributedDataParallel(_model()))


def FSDP2() -> Compared:
    """The same, where each rank holds a part of the model."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    fully_shard(model := _model(), mesh=init_device_mesh("cpu", (N_RANKS,)))
    return _on_this_rank(model)


ALONE: Sequence[Test] = (devices, micro_batches, single_examples, norm_and_clip)
ON_RANKS: Sequence[Test] = (DDP, FSDP2)


def row_of(name: str, test: Test) -> Check:
    """The row of a test, which is run now."""
    found = test()
    if isinstance(found, Check):
        return found
    what, measured, right = found
    errors = [abs(a - b) / abs(b) for a, b in zip(measured, right, strict=True)]
    if all(error < _TOLERANCE for error in errors):  # not so if one is NaN
        return Check(name, "ok", f"{what}: exact to {number(max(errors), 1)}")
    pairs = ", ".join(f"{a:.6g} for {b:.6g}" for a, b in zip(measured[:3], right, strict=False))
    return Check(name, "fails", f"{what}: {pairs}", f"do not trust numbers of this machine: {REPORT_IT}")


def main(group: str, rank: str, store: str) -> None:
    """Run the tests of a group, and write their rows."""
    rows = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what libraries print is no row
    if group == "ranks":
        where: Any = {"init_method": f"file://{store}", "rank": int(rank), "world_size": N_RANKS}
        dist.init_process_group("gloo", timeout=timedelta(seconds=30), **where)
    for test in ON_RANKS if group == "ranks" else ALONE:
        name = test.__name__.replace("_", " ")
        rows.write(json.dumps(name) + "\n")
        row = checked(name, functools.partial(row_of, name, test))
        rows.write(json.dumps(dataclasses.asdict(row)) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
