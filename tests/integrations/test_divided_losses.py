"""What the graph of a loss shows of its division by the tokens of a window."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("transformers", reason="needs transformers: pip install '.[transformers]'")

from sonde.integrations.transformers_batches import is_divided_by

N, OWN = torch.tensor(71), torch.tensor(24)


class Fused(torch.autograd.Function):
    """A loss that one function makes, with its division."""

    @staticmethod
    def forward(ctx: Any, each: Tensor) -> Tensor:
        ctx.n = len(each)
        return each.sum() / 71

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return (grads[0] / 71).expand(ctx.n)


class Passes(Fused):
    """A function in a model, which makes no loss."""

    @staticmethod
    def forward(ctx: Any, each: Tensor) -> Tensor:
        ctx.n = len(each)
        return each.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0]


class HandsOn(torch.autograd.Function):
    """What DDP does with the outputs of a model."""

    @staticmethod
    def forward(ctx: Any, *outputs: Tensor) -> tuple[Tensor, ...]:
        return tuple(output.view_as(output) for output in outputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:
        return grads


def per_token() -> Tensor:
    logits = nn.Linear(6, 29)(torch.randn(24, 6))
    return nn.functional.cross_entropy(logits, torch.randint(29, (24,)), reduction="none")


@pytest.mark.parametrize(
    ("loss", "is_divided"),
    [
        (lambda each: each.sum() / 71, True),
        (lambda each: each.sum() / N, True),
        (lambda each: 2 * (each.sum() / N), True),
        (lambda each: each.sum() * (1 / 71), True),
        (lambda each: each.sum() * (1 / N), True),
        (lambda each: each.sum().bfloat16() * (1 / N).bfloat16(), True),
        (lambda each: (each * (torch.ones(24) / N)).sum(), True),
        (lambda each: each.mean() * (OWN / N), True),
        (lambda each: (each.mean().bfloat16() * (OWN / N).bfloat16()) / 3, True),
        (lambda each: each.sum() / N + 1e-3 * each.square().mean(), True),
        (Fused.apply, None),
        (lambda each: 2 * Fused.apply(each), None),
        (lambda each: Fused.apply(each) / 71, True),
        (lambda each: Passes.apply(each).mean(), False),
        (lambda each: HandsOn.apply(each, each.sum() / N)[1], True),
        (lambda each: HandsOn.apply(each, each.mean())[1] / 3, False),
        (lambda each: each.mean() + 0.0141 * each.square().mean(), False),  # 1/71 is 0.014085
        (lambda each: (each * (torch.arange(24) > 2)).mean(), False),
        (lambda each: each.mean(), False),
        (lambda each: each.sum() / len(each), False),
        (lambda each: each.sum() * (1 / 72), False),
        (lambda each: each.mean() / 3, False),
    ],
)
def test_division_by_the_windows_tokens_is_seen_in_the_graph(loss: object, is_divided: bool | None) -> None:
    assert callable(loss)
    assert is_divided_by(loss(per_token()), N, OWN) is is_divided
