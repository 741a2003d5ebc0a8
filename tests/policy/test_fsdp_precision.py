"""FSDP2's mixed precision: scored in 32 bits, and the training as it is without sonde."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard

import sonde
from sonde.contrib.hold_entropy import HoldEntropy
from sonde.policy.entropy_change import EntropyChangeProbe
from sonde.policy.entropy_options import EntropyChangeOptions
from sonde.policy.scoring.precision import gathered_in_float32, gathers_narrow
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
                probe = EntropyChangeProbe(model, optimizer, beside=HoldEntropy())
            probe.forecast(E, U, causes=True)
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


def steps_below_the_spacing(on_ranks: bool) -> list[tuple[float, ...]]:
    """Of bf16 parameters: along a gradient, and with a bonus; on two ranks of FSDP2 or in one process."""
    found = []
    for update, beside in (("gradient", None), ("step", HoldEntropy())):
        own = policy(dtype=torch.bfloat16)
        E, U = drawn(policy(), 0, 16, seed=1), drawn(policy(), 1000, 8, seed=2)
        model: Any = own
        if on_ranks:
            mesh = mesh_of((2,))
            fully_shard(own.hidden, mesh=mesh, shard_placement_fn=lambda p: Shard(p.dim() - 1))
            model = fully_shard(own, mesh=mesh)  # token.weight and out.bias have 7 rows: padded
            rank = dist.get_rank()
            E, U = E.rows(torch.arange(32) + 32 * rank), U.rows(torch.arange(16) + 16 * rank)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
        loss(model, U).backward()
        probe = EntropyChangeProbe(model, optimizer, EntropyChangeOptions(update=update, step_size=1e-5), beside=beside)  # type: ignore[arg-type]
        forecast = probe.forecast(E, U)
        if forecast.coefficient_to_hold is not None:
            found.append((forecast.coefficient_to_hold.change_per_unit,))
        else:
            found.append((forecast.finite_step.delta, forecast.delta))
    return found


def test_steps_that_no_optimizer_takes_are_not_rounded(ranks2: Ranks) -> None:
    """What 16 bits do not hold is added to each rank's part before it is gathered."""
    for along, alone in zip(ranks2(steps_below_the_spacing, True)[0], steps_below_the_spacing(False), strict=True):
        assert along == pytest.approx(alone, rel=0.02)  # gradients of FSDP2 are reduced in bf16


def noise_scale(is_beside: bool) -> tuple[Any, ...]:
    model = sharded(policy_of_fsdp=MixedPrecisionPolicy())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    probe = sonde.attach(model, optimizer, unit="responses", every=1, units_per_piece=16)
    for step in range(2):
        optimizer.zero_grad()
        for piece in range(2):
            E, U = batches(2 * step + piece)
            loss(model, U).backward()
        if is_beside:
            EntropyChangeProbe(model, optimizer, beside=HoldEntropy()).forecast(E)
        probe.step()
        optimizer.step()
    reading = probe.reading()
    probe.close()
    return reading.windows, reading.trace_cov, reading.grad_sq, dict(reading.dropped)


def test_backwards_of_a_forecast_are_no_pieces_under_fsdp2(ranks2: Ranks) -> None:
    assert ranks2(noise_scale, True) == ranks2(noise_scale, False)
    assert ranks2(noise_scale, True)[0][3] == {}


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
