"""Parameters of lazy modules that have not run: they have no shape and no gradient, and count as nothing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import sonde
from sonde.gradient_norm.plan import NormPlan
from tests.ranks import Ranks, mesh_of


class WithUnused(nn.Module):
    """A lazy layer stands beside a layer that runs."""

    def __init__(self) -> None:
        super().__init__()
        self.used = nn.Linear(2, 1, bias=False)
        self.unused = nn.LazyLinear(3, bias=False)


def with_gradient() -> WithUnused:
    model = WithUnused()
    model.used(torch.ones(1, 2)).sum().backward()
    return model


@pytest.mark.parametrize("has_names", [True, False])
def test_a_lazy_layer_that_has_not_run_is_left_out_as_by_torch(has_names: bool) -> None:
    model = with_gradient()
    parameters: Any = model if has_names else list(model.parameters())
    expected = float(torch.nn.utils.clip_grad_norm_(model.parameters(), 10.0))
    assert float(sonde.clip_grad_norm_(parameters, 10.0)) == pytest.approx(expected)
    plan = sonde.group_parameters_for_norm(parameters)
    assert float(sonde.clip_grad_norm_distributed_(plan, 10.0)) == pytest.approx(expected)


@pytest.mark.parametrize("is_planned", [True, False])
def test_a_lazy_layer_counts_once_it_has_run(is_planned: bool) -> None:
    model = with_gradient()
    parameters = list(model.parameters())
    plan = sonde.group_parameters_for_norm(parameters)
    sonde.clip_grad_norm_(parameters, None)
    model.unused(torch.ones(1, 2)).sum().backward()
    norm = sonde.clip_grad_norm_distributed_(plan, None) if is_planned else sonde.clip_grad_norm_(parameters, None)
    assert float(norm) == pytest.approx((2 + 6) ** 0.5)


def _on_ranks(is_stages: bool) -> list[float]:
    """The lazy layer is on one rank only if the ranks are stages."""
    model, mesh = with_gradient(), mesh_of((2,), ("pp",) if is_stages else ("dp",))
    with torch.no_grad():
        model.used.weight.grad.mul_(1.0 + dist.get_rank() * is_stages)  # type: ignore[union-attr]
    named = [(f"{dist.get_rank() if is_stages else ''}{name}", p) for name, p in model.named_parameters()]
    named = named[: 1 if is_stages and dist.get_rank() else 2]
    options: dict[str, Any] = {"mesh": mesh, "pp_mesh": mesh if is_stages else None}
    plan = sonde.group_parameters_for_norm(named, **options)
    norms = [sonde.clip_grad_norm_(named, None, **options) for _ in range(2)]
    return [float(sonde.clip_grad_norm_distributed_(plan, None)), *map(float, norms)]


@pytest.mark.parametrize("is_stages", [True, False])
def test_a_lazy_layer_leaves_no_rank_waiting(ranks2: Ranks, is_stages: bool) -> None:
    for norms in ranks2(_on_ranks, is_stages):
        assert norms == [pytest.approx((2 + 8 if is_stages else 2) ** 0.5)] * 3


def test_a_lazy_parameter_without_a_name_has_one_in_messages() -> None:
    assert NormPlan(list(WithUnused().parameters())).name_of(1) == "parameter 1 of no shape yet"
