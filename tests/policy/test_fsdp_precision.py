"""FSDP2's mixed precision: scored in 32 bits, and the training as it is without sonde."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from sonde.policy.entropy_change import EntropyChangeProbe
from sonde.policy.entropy_options import EntropyChangeOptions
from sonde.policy.scoring.fsdp_precision import gathered_in_float32, gathers_narrow
from tests.ranks import Ranks, mesh_of
from tests.small_policy import STATISTICS, drawn, loss, policy

BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, output_dtype=torch.bfloat16)


def sharded(dtype: torch.dtype = torch.float32, policy_of_fsdp: MixedPrecisionPolicy = BF16, **options: Any) -> Any:
    model = policy(dtype=dtype)
    mesh = mesh_of((2,))
    fully_shard(model.hidden, mesh=mesh, mp_policy=policy_of_fsdp, **options)
    fully_shard(model, mesh=mesh, mp_policy=policy_of_fsdp, **options)
    return model


def batches(step: int) -> tuple[Any, Any]:
    rank, own = dist.get_rank(), policy()
    return drawn(own, 100 * step + 8 * rank, 8, seed=step), drawn(own, 1000 + 100 * step + 4 * rank, 4, seed=step)


def weights_after_training(dtype: torch.dtype, is_watched: bool, reshards: Any) -> list[Tensor]:
    model = sharded(dtype, reshard_after_forward=reshards)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    probe = None
    for step in range(2):
        E, U = batches(step)
        optimizer.zero_grad()
        loss(model, U).backward()
        if is_watched:
            if probe is None:
                # Parameters of 16 bits have derivatives by a backward for every prompt, which FSDP2 takes by turns.
                options = EntropyChangeOptions(first_order=dtype == torch.float32, coefficient_to_hold=True)
                probe = EntropyChangeProbe(model, optimizer, options)
            probe.forecast(E, U, causes=dtype == torch.float32)
            with probe.around_step(E, U) as around:
                optimizer.step()
            assert around.forecast.precision == "float32", around.forecast.why_precision
        else:
            optimizer.step()
    return [p.to_local().detach().clone() for p in model.parameters()]


def all_trainings() -> list[bool]:
    return [
        all(map(torch.equal, *(weights_after_training(dtype, is_watched, reshards) for is_watched in (False, True))))
        for dtype, reshards in ((torch.float32, True), (torch.bfloat16, False))
    ]


def test_training_in_mixed_precision_goes_on_bit_for_bit(ranks2: Ranks) -> None:
    assert ranks2(all_trainings) == [[True] * 2] * 2


def forecasts_of_a_small_step() -> list[tuple[float, float, float]]:
    """At a rate of 1e-6: FSDP2's bf16, and FSDP2 of the same weights without it."""
    found = []
    for fsdp in (BF16, MixedPrecisionPolicy()):
        model = sharded(policy_of_fsdp=fsdp)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
        E, U = batches(0)
        loss(model, U).backward()
        with torch.no_grad():  # the same gradients
            for k, p in enumerate(model.parameters()):
                p.grad.copy_(torch.full_like(p, 0.1 * (k + 1)))
        forecast = EntropyChangeProbe(model, optimizer, EntropyChangeOptions(first_order=True)).forecast(E)
        found.append((forecast.delta, forecast.se, forecast.first_order.delta))
    return found


def test_a_small_step_is_forecast_as_without_mixed_precision(ranks2: Ranks) -> None:
    """In bf16, rounding in the two forwards has a multiple of this standard error."""
    narrow, wide = ranks2(forecasts_of_a_small_step)[0]
    assert narrow == pytest.approx(wide, rel=1e-3)


def what_fsdp_keeps() -> dict[str, Any]:
    """The guard: FSDP2 gathers in 32 bits inside, and has its own gathered parameters and hooks again afterwards."""
    model = sharded()
    E, _ = batches(0)
    STATISTICS(model, E)
    model.unshard()
    own = dict(model.named_parameters())
    seen: list[str] = []
    model.out.weight.register_hook(lambda grad: seen.append(str(grad.dtype)))
    model.reshard()
    inside: list[torch.dtype] = []
    handle = model.hidden.register_forward_pre_hook(lambda module, args: inside.append(module.weight.dtype))
    with gathered_in_float32(model):
        narrow_inside = gathers_narrow(model)
        _, h = STATISTICS(model, E)
    handle.remove()
    with contextlib.suppress(MemoryError), gathered_in_float32(model):
        STATISTICS(model, E)
        raise MemoryError
    s, _ = STATISTICS(model, E)
    s.sum().backward()
    model.unshard()
    again = dict(model.named_parameters())
    return {
        "inside": [str(dtype) for dtype in inside],
        "narrow": (narrow_inside, gathers_narrow(model)),
        "same": all(again[name] is p for name, p in own.items()),
        "hooks": seen,
        "scores": str(h.dtype),
    }


def test_guard_fsdp_keeps_its_own_gathered_parameters(ranks2: Ranks) -> None:
    for found in ranks2(what_fsdp_keeps):
        assert found["inside"] == ["torch.float32"]
        assert found["narrow"] == (False, True)
        assert found["same"]
        assert found["hooks"] == ["torch.bfloat16"]
