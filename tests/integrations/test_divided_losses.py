"""What the graph of a loss shows of its division by the tokens of a window."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("transformers", reason="needs transformers: pip install '.[transformers]'")

from sonde.integrations.transformers_batches import is_divided_by

N = torch.tensor(71)


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
        (lambda each: each.mean(), False),
        (lambda each: each.sum() / len(each), False),
        (lambda each: each.sum() * (1 / 72), False),
        (lambda each: each.mean() / 3, False),
    ],
)
def test_division_by_the_windows_tokens_is_seen_in_the_graph(loss: object, is_divided: bool) -> None:
    assert callable(loss)
    assert is_divided_by(loss(per_token()), N) is is_divided
