"""The forecast of a step beside the step that torch's optimizers take, step by step."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sonde
from sonde.policy.scoring.optimizer_step import (
    dot,
    forecast_step,
    taken,
    why_no_forecast,
)
from tests.ranks import Ranks
from tests.sharded import backward, exact_gradients, fsdp, norm_of, whole
from tests.step_meter import StepMeter

KINDS: list[tuple[type[torch.optim.Optimizer], dict[str, Any]]] = [
    (torch.optim.SGD, {"lr": 0.1}),
    (torch.optim.SGD, {"lr": 0.1, "weight_decay": 0.05}),
    (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "dampening": 0.3, "weight_decay": 0.05}),
    (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.05}),
    (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "maximize": True}),
    (torch.optim.Adam, {"lr": 0.01}),
    (torch.optim.Adam, {"lr": 0.01, "weight_decay": 0.1, "amsgrad": True, "betas": (0.8, 0.9)}),
    (torch.optim.Adam, {"lr": 0.01, "maximize": True, "eps": 1e-3}),
    (torch.optim.AdamW, {"lr": 0.01, "weight_decay": 0.1}),
    (torch.optim.AdamW, {"lr": 0.01, "weight_decay": 0.1, "amsgrad": True, "maximize": True}),
    (torch.optim.AdamW, {"lr": torch.tensor(0.01), "weight_decay": 0.1, "foreach": False}),
]
WAYS: list[dict[str, Any]] = [{"foreach": False}, {"foreach": True}, {"fused": True}]


def make_model(dtype: torch.dtype = torch.float64) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)).to(dtype)


def set_gradients(model: nn.Module, generator: torch.Generator) -> None:
    model.zero_grad()
    dtype = next(model.parameters()).dtype
    x = torch.randn(8, 5, generator=generator, dtype=torch.float64).to(dtype)
    model(x).square().sum(1).mean().backward()


def difference(a: Tensor, b: Tensor) -> float:
    return float((a - b).norm() / b.norm().clamp(min=1e-30))


@pytest.mark.parametrize("way", WAYS, ids=str)
@pytest.mark.parametrize(("kind", "options"), KINDS, ids=lambda x: getattr(x, "__name__", str(x)))
def test_the_forecast_is_the_step_that_is_taken(kind: Any, options: dict[str, Any], way: dict[str, Any]) -> None:
    """With a clip, a schedule, and two groups of parameters with different options."""
    model, generator = make_model(), torch.Generator().manual_seed(1)
    first, last = model[0], model[2]
    if isinstance(options["lr"], Tensor):
        way = {"foreach": False}  # torch requires this for a learning rate that is a tensor
    groups = [{"params": list(first.parameters())}, {"params": list(last.parameters()), "lr": 0.003}]
    optimizer = kind(groups, **(options | way))
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    for _ in range(6):
        set_gradients(model, generator)
        norm = float(sonde.clip_grad_norm_(model.parameters(), None))
        coefficient = min(1.0, 0.5 / (norm + 1e-6))
        forecast = forecast_step(optimizer, gradient_scale=coefficient)
        sonde.clip_grad_norm_(model.parameters(), 0.5)
        meter = StepMeter(model.parameters())
        optimizer.step()
        schedule.step()
        taken = meter.step()
        assert forecast.keys() == taken.keys() == set(model.parameters())
        for p, step in taken.items():
            # With an fp32 tensor as learning rate, torch computes 1 − lr·λ in fp32 too.
            assert difference(forecast[p], step) < (1e-5 if isinstance(options["lr"], Tensor) else 1e-9)


@pytest.mark.parametrize(("kind", "options"), KINDS, ids=lambda x: getattr(x, "__name__", str(x)))
def test_parts_add_up_to_the_step_and_vanish_without_their_option(kind: Any, options: dict[str, Any]) -> None:
    model, generator = make_model(), torch.Generator().manual_seed(1)
    optimizer = kind(model.parameters(), **options)
    for _ in range(3):
        set_gradients(model, generator)
        optimizer.step()
    set_gradients(model, generator)
    whole_step = forecast_step(optimizer)
    parts = {part: forecast_step(optimizer, part=part) for part in ("momentum", "batch", "decay")}  # type: ignore[arg-type]
    for p, step in whole_step.items():
        torch.testing.assert_close(sum(part[p] for part in parts.values()), step, rtol=1e-12, atol=1e-15)
        if not options.get("weight_decay"):
            assert not parts["decay"][p].any()
        if kind is torch.optim.SGD and not options.get("momentum"):
            assert not parts["momentum"][p].any()


def test_a_step_that_cannot_be_forecast_is_refused() -> None:
    model = make_model()
    optimizer = torch.optim.RMSprop(model.parameters())
    assert why_no_forecast(torch.optim.SGD(model.parameters(), lr=0.1)) == ""
    with pytest.raises(ValueError, match=r"cannot forecast the step of RMSprop: use around_step\(\)"):
        forecast_step(optimizer)
    embedding = nn.Embedding(4, 3, sparse=True)
    embedding(torch.tensor([1])).sum().backward()
    with pytest.raises(ValueError, match="a sparse gradient cannot be forecast, only measured"):
        forecast_step(torch.optim.SGD(embedding.parameters(), lr=0.1))


def _sharded() -> list[tuple[float, str]]:
    cut = fsdp()
    optimizer = torch.optim.AdamW(cut.parameters.values(), lr=0.1, weight_decay=0.1)
    differences = []
    for step in itertools.count():
        forecast, meter = forecast_step(optimizer), StepMeter(cut.parameters.values())
        optimizer.step()
        real = meter.step()
        differences += [
            (difference(whole(forecast[p]), whole(s)), str(forecast[p].placements)) for p, s in real.items()
        ]  # type: ignore[attr-defined]
        if step == 2:
            return differences
        optimizer.zero_grad()
        backward(cut.keep)
    return differences


def test_the_forecast_of_sharded_parameters(ranks2: Ranks) -> None:
    for differences in ranks2(_sharded):
        assert len(differences) == 3 * 9
        for off, placements in differences:
            assert off < 1e-5
            assert placements == "(Shard(dim=0),)"


def trained(kind: Any, options: dict[str, Any]) -> tuple[nn.Module, Any]:
    """A model with gradients, whose optimizer has taken two steps."""
    model, generator = make_model(), torch.Generator().manual_seed(1)
    optimizer = kind(model.parameters(), **options)
    for _ in range(2):
        set_gradients(model, generator)
        optimizer.step()
    set_gradients(model, generator)
    return model, optimizer


@pytest.mark.parametrize(("kind", "options"), KINDS, ids=lambda x: getattr(x, "__name__", str(x)))
def test_the_batchs_part_is_linear_in_the_vector_that_replaces_the_gradient(kind: Any, options: dict[str, Any]) -> None:
    model, optimizer = trained(kind, options)
    batch = forecast_step(optimizer, part="batch", gradient_scale=0.5)
    own = {p: p.grad for p in model.parameters() if p.grad is not None}
    generator = torch.Generator().manual_seed(2)
    other = {p: torch.randn(p.shape, generator=generator, dtype=torch.float64) for p in own}

    def along(a: float, b: float) -> dict[Tensor, Tensor]:
        vector = {p: a * own[p] + b * other[p] for p in own}
        return forecast_step(optimizer, part="batch", gradient_scale=0.5, along=vector)

    mixed, first, second = along(2.0, -3.0), along(1.0, 0.0), along(0.0, 1.0)
    for p, step in batch.items():
        assert torch.equal(first[p], step)
        assert difference(mixed[p], 2.0 * step - 3.0 * second[p]) < 1e-12


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("is_failing", [False, True])
def test_taken_restores_the_parameters(dtype: torch.dtype, is_failing: bool) -> None:
    model = make_model(dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    set_gradients(model, torch.Generator().manual_seed(1))
    before = [p.detach().clone() for p in model.parameters()]
    expected = copy.deepcopy(model)
    for p, q in zip(model.parameters(), expected.parameters(), strict=True):
        assert p.grad is not None
        q.data.copy_((p.detach().float() - 0.1 * p.grad.float()).to(dtype))
    try:
        with taken(forecast_step(optimizer), model):
            for p, q in zip(model.parameters(), expected.parameters(), strict=True):
                assert torch.equal(p, q)
            if is_failing:
                raise KeyError
    except KeyError:
        assert is_failing
    assert all(torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True))


def _dot() -> float:
    gradients = {p: p.grad for p in fsdp().parameters.values() if p.grad is not None}
    return dot(gradients, dict(gradients))


def test_inner_products_of_shards_add_up_to_those_of_the_whole(ranks2: Ranks) -> None:
    first, second = ranks2(_dot)
    assert first == second
    assert first == pytest.approx(norm_of(exact_gradients(), 2.0) ** 2, rel=1e-5)
