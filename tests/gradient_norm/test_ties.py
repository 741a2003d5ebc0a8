"""Gradients that two pipeline stages both have are found; equal sums, signs turned round and infinities are no ties."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import sonde
from tests.ranks import Ranks, mesh_of


def noise(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def _clipped(gradient: Tensor, order: float = 2.0, nonfinite: Any = "ignore", max_norm: float | None = None) -> Any:
    """The gradient of this stage, beside another gradient of its own: the norm or the message; the gradient after."""
    mesh = mesh_of((dist.get_world_size(),), ("pp",))
    stage, parameters = dist.get_rank(), {}
    for name, grad in ((f"blocks.{stage}.w", gradient), (f"blocks.{stage}.own", noise(90 + stage, 3, 3))):
        parameters[name] = nn.Parameter(torch.zeros_like(grad))
        parameters[name].grad = grad.clone()
    try:
        norm = float(
            sonde.clip_grad_norm_(parameters.items(), max_norm, order, mesh=mesh, pp_mesh=mesh, nonfinite=nonfinite)
        )
    except ValueError as error:
        return str(error), None
    own = next(iter(parameters.values())).grad
    assert own is not None
    return norm, own.flatten()[-1].item()


def _chance(kind: str, order: float) -> Any:
    stage, whole = dist.get_rank(), noise(1, 4, 8)
    gradients = {
        "equal squares": torch.tensor([[1.0, 8.0], [4.0, 7.0]][stage], dtype=torch.bfloat16) * 2**-10,
        "turned round": whole * (1 - 2 * stage),
        "another order": whole.flatten()[torch.randperm(32, generator=torch.Generator().manual_seed(stage))],
        "one element": torch.tensor([0.5]),
        "few nonzero": torch.zeros(100).index_fill(0, torch.arange(7), 1.0).cumsum(0) * (torch.arange(100) < 7),
        "constant size": torch.ones(4, 8) * (1 - 2 * (torch.arange(8) % 2)),
    }
    return _clipped(gradients[kind], order)[0]


@pytest.mark.parametrize("order", [1.0, 2.0, 6.0])
@pytest.mark.parametrize(
    "kind", ["equal squares", "turned round", "another order", "one element", "few nonzero", "constant size"]
)
def test_gradients_that_are_not_tied_are_not_refused(ranks2: Ranks, kind: str, order: float) -> None:
    assert all(isinstance(norm, float) for norm in ranks2(_chance, kind, order))


def _tied(kind: str, order: float) -> Any:
    rows = noise(1, 50, 40)
    gradients = {
        "few rows": torch.zeros(5000, 40).index_copy(0, torch.arange(50) * 97 % 5000, rows),
        "transposed": noise(1, 30, 20).t(),
        "bf16": noise(1, 13).bfloat16(),
        "eight": noise(1, 8),
        "large": noise(1, 300, 512),
        "3-D": noise(1, 5, 30, 70),
    }
    return _clipped(gradients[kind], order)[0]


@pytest.mark.parametrize("order", [1.0, 2.0, 6.0])
@pytest.mark.parametrize("kind", ["few rows", "transposed", "bf16", "eight", "large", "3-D"])
def test_tied_gradients_are_refused(ranks2: Ranks, kind: str, order: float) -> None:
    for stage, message in enumerate(ranks2(_tied, kind, order)):
        assert f"blocks.{stage}.w has the same gradient on 2 pipeline stages and would count 2 times" in message
        assert f"replicas={{'blocks.{stage}.w': 2}}" in message


def _not_finite_on_one_stage(value: float, nonfinite: str) -> Any:
    gradient = noise(dist.get_rank(), 4, 8)
    if dist.get_rank() == 0:
        gradient[0, 0] = value
    return _clipped(gradient, nonfinite=nonfinite, max_norm=1.0)


@pytest.mark.parametrize("n_ranks", [2, 3])
@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_a_gradient_that_is_not_finite_is_no_tie(request: pytest.FixtureRequest, n_ranks: int, value: float) -> None:
    ranks: Ranks = request.getfixturevalue(f"ranks{n_ranks}")
    for norm, _ in ranks(_not_finite_on_one_stage, value, "ignore"):
        assert not math.isfinite(norm)
    for norm, last in ranks(_not_finite_on_one_stage, value, "skip"):
        assert not math.isfinite(norm)
        assert last == 0.0
