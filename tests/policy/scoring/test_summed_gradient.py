"""Sums of gradients beside those of autograd; `.grad` stays unchanged."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from sonde.policy.scoring.summed_gradient import summed_gradient
from tests.sharded import build, tokens


def objective(model: nn.Module, batch: Tensor) -> Tensor:
    out: Tensor = model(batch).square().sum()
    return out


@pytest.mark.parametrize("n_batches", [1, 4])
def test_the_sum_over_batches_is_the_gradient_of_the_sum(n_batches: int) -> None:
    model = build()
    twin = copy.deepcopy(model).double()
    objective(twin, tokens()).backward()
    held = [torch.randn_like(p) for p in model.parameters()]
    for p, grad in zip(model.parameters(), held, strict=True):
        p.grad = grad
    parts, flat = summed_gradient(lambda b: objective(model, b), model, list(tokens().chunk(n_batches)))
    assert flat is not None
    for p, q, grad in zip(model.parameters(), twin.parameters(), held, strict=True):
        assert q.grad is not None
        torch.testing.assert_close(parts[p].double(), q.grad, rtol=1e-4, atol=1e-4)
        assert p.grad is grad
        assert parts[p].untyped_storage().data_ptr() == flat.untyped_storage().data_ptr()


def test_sixteen_bit_models_are_summed_in_32() -> None:
    model = nn.Linear(1, 1, bias=False).bfloat16()
    with torch.no_grad():
        model.weight.fill_(1.0)
    ones = torch.ones(1, 1, dtype=torch.bfloat16)
    # In bf16 a sum of ones stops at 256.
    parts, _ = summed_gradient(lambda x: model(x).sum(), model, [ones] * 300)
    assert parts[model.weight].dtype == torch.float32
    assert float(parts[model.weight]) == 300.0


def test_unused_frozen_and_sparse_parameters() -> None:
    model = nn.ModuleDict(
        {"used": nn.Linear(3, 2), "unused": nn.Linear(3, 2), "table": nn.Embedding(5, 3, sparse=True)}
    )
    model["used"].bias.requires_grad_(False)
    ids = torch.tensor([1, 1, 4])
    parts, _ = summed_gradient(lambda i: model["used"](model["table"](i)).sum(), model, [ids, ids])
    assert model["used"].bias not in parts
    assert not parts[model["unused"].weight].any()
    expected = 2 * torch.bincount(ids, minlength=5)[:, None] * model["used"].weight.sum(0)
    torch.testing.assert_close(parts[model["table"].weight], expected.detach())


def test_hooks_after_accumulation_are_refused() -> None:
    model = build()
    next(model.parameters()).register_post_accumulate_grad_hook(lambda p: None)
    with pytest.raises(ValueError, match="perhaps an optimizer in the backward"):
        summed_gradient(lambda b: objective(model, b), model, [tokens()])
