"""The loop's own norm, however the model is cut: a right one is never accused, and a wrong one's factor is right."""

from __future__ import annotations

import re
import statistics
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from sonde.parallel.placements import local_tensor
from tests.batch_size.cut_loops import attached, clip_alone, run_pieces
from tests.batch_size.cuts import made
from tests.batch_size.set_ups import Loop
from tests.ranks import Ranks

WINDOWS = 8
LOOPS = {
    "FSDP2": Loop(clips=True),
    "FSDP2, with shards that are K²": Loop(clips=True, n_pieces=2),
    "FSDP2, parameters that it ignores": Loop(adapters="loop", head=True),
    "HSDP": Loop(mesh=(2, 2)),
    "TP": Loop("tp"),
    "sequence parallelism": Loop("sp"),
    "FSDP2 over TP": Loop("fsdp over tp"),
    "FSDP2 over sequence parallelism": Loop("fsdp over sp"),
    "experts in FSDP2": Loop("ep fsdp"),
    "pipeline": Loop("pp fsdp", axes={"dp": 2}),
    "FSDP2, in bf16": Loop(bf16="parameters"),
}
NORMS = ("right", "what the rank holds", "what all ranks hold", "twice as large")
SCALES = {"nothing": (1.0, 1.0), "a mean over micro-batches, before": (0.5, 1.0), "more, after": (1.0, 0.25)}


def _own(kind: str, parameters: list[Any], true: Tensor) -> Tensor:
    held = torch.stack([local_tensor(p.grad).double().square().sum() for p in parameters if p.grad is not None]).sum()
    if kind == "what all ranks hold":
        dist.all_reduce(held)
    return {"right": true, "twice as large": 2 * true}.get(kind, held.sqrt().float())


def _trained(loop: Loop, kind: str, scales: tuple[float, float], max_norm: float | None) -> dict[str, Any]:
    cut = made(loop)
    parameters = list(cut.model.parameters())
    optimizer = torch.optim.SGD(parameters, lr=0.0)  # ranks that clip by different norms would drift apart
    probe, factors = attached(cut, optimizer), []
    for window in range(WINDOWS):
        run_pieces(cut, probe, window)
        cut.reduce()
        for p in parameters:
            if p.grad is not None:
                p.grad.mul_(scales[0])
        before = [None if p.grad is None else p.grad.clone() for p in parameters]
        true = clip_alone(cut, parameters)  # the norm of all, which has tests of its own
        for p, gradient in zip(parameters, before, strict=True):
            p.grad = gradient
        own = _own(kind, parameters, true)
        if max_norm is not None:
            for p in parameters:
                if p.grad is not None:
                    p.grad.mul_((max_norm / (own + 1e-6)).clamp(max=1.0))
        assert probe.takes_all(parameters)
        probe.note_clip(own, max_norm)
        factors.append(float(own / true))
        for p in parameters:
            if p.grad is not None:
                p.grad.mul_(scales[1])
        optimizer.step()
        optimizer.zero_grad()
    probe.reading()
    alerts = dict(probe.alerts)
    probe.close()
    return {"factor": statistics.median(factors), "alert": alerts.get("own_norm")}


@pytest.mark.parametrize("kind", NORMS)
@pytest.mark.parametrize("name", LOOPS)
def test_a_wrong_norm_is_named_with_its_factor_and_a_right_one_is_not(name: str, kind: str, ranks4: Ranks) -> None:
    scales = list(SCALES.values())[(len(name) + len(kind)) % len(SCALES)]
    for max_norm in (None, 0.05):
        found = ranks4(_trained, LOOPS[name], kind, scales, max_norm)[0]
        if kind == "right":
            assert found["alert"] is None
        if abs(found["factor"] - 1) < 0.03:  # 2 % are the least, in most windows
            continue
        said = re.match(r"your grad norm was (\d\.\d\d) of the true one", found["alert"])
        assert said is not None
        assert abs(float(said[1]) - found["factor"]) <= 0.01
