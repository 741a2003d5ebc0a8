"""Gradients near the ends of a dtype's range: no group is lost beside a larger one, and ranks decide alike."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import sonde
from tests.gradient_norm.placed_gradients import plain
from tests.ranks import Ranks, mesh_of

SIZES = {"small": 1e-30, "one": 1.0, "large": 1e35, "zero": 0.0, "nan": math.nan, "inf": math.inf, "fp64": 1e-50}


def group(name: str) -> Tensor:
    size = SIZES[name]
    gradient = torch.tensor([0.25, -1.0, 0.5], dtype=torch.float64 if name == "fp64" else torch.float32)
    return gradient * size if math.isfinite(size) else gradient.index_fill(0, torch.tensor([1]), size)


def _norms_by_group(names: list[str], order: float, n_more: int) -> tuple[float, dict[str, float]]:
    more = {f"more{k}": torch.ones(2) for k in range(n_more)}
    norm, by_group = sonde.get_total_norm([*map(group, names), *more.values()], order, by_group=[*names, *more])
    return float(norm), {name: float(by_group[name]) for name in names}


def check(norm: float, by_group: dict[str, float], order: float) -> None:
    values = torch.cat([group(name).double() for name in by_group])
    exact = float(values.abs().max()) if math.isinf(order) else _exact(values, order)
    assert norm == pytest.approx(exact, rel=1e-6, nan_ok=True)
    for name, found in by_group.items():
        if name not in ("nan", "inf"):
            assert found == pytest.approx(_exact(group(name).double(), order), rel=1e-6, abs=1e-300), name
    assert math.isnan(by_group.get("nan", math.nan))
    assert math.isinf(by_group.get("inf", math.inf))


def _exact(values: Tensor, order: float) -> float:
    if not bool(values.isfinite().all()):
        return float(values.abs().sum())
    unit = float(values.abs().max()) or 1.0
    return unit * float(torch.linalg.vector_norm(values / unit, order))


GROUPS = [["small", "large", "zero"], ["one", "nan"], ["one", "inf", "large"], ["fp64", "one", "nan"]]


@pytest.mark.parametrize("order", [6.0, math.inf])
@pytest.mark.parametrize("names", GROUPS, ids="-".join)
@pytest.mark.parametrize("n_more", [0, 70])
def test_each_group_has_its_own_norm_whatever_the_others_are(names: list[str], order: float, n_more: int) -> None:
    norm, by_group = _norms_by_group(names, order, 0)
    check(norm, by_group, order)
    assert _norms_by_group(names, order, n_more)[1] == pytest.approx(by_group, rel=0, nan_ok=True)


def raises(call: Any) -> bool:
    try:
        call()
    except RuntimeError as error:
        if re.search("not finite|non-finite|overflows", str(error)):
            return True
        raise
    return False


def test_a_norm_that_is_returned_as_infinite_is_not_finite() -> None:
    gradient = torch.full((4,), 3e38)
    calls: list[Any] = [
        lambda g: torch.nn.utils.clip_grad_norm_([plain(g)], 1.0, error_if_nonfinite=True),
        lambda g: sonde.clip_grad_norm_([plain(g)], 1.0, error_if_nonfinite=True),
        lambda g: sonde.get_total_norm([g], error_if_nonfinite=True),
    ]
    assert [raises(lambda call=call: call(gradient)) for call in calls] == [True] * 3
    assert [raises(lambda call=call: call(gradient.double())) for call in calls] == [False] * 3
    skipped = plain(gradient)
    assert math.isinf(float(sonde.clip_grad_norm_([skipped], 1.0, nonfinite="skip")))
    assert skipped.grad is not None
    assert skipped.grad.tolist() == [0.0] * 4


def _stages_of_two_dtypes() -> list[bool]:
    mesh, stage = mesh_of((2,), ("pp",)), dist.get_rank()
    gradient = torch.full((4,), 3e38, dtype=torch.float64 if stage else torch.float32) * (1.0 - 0.1 * stage)
    options: dict[str, Any] = {"mesh": mesh, "pp_mesh": mesh, "error_if_nonfinite": True}
    decided = [
        raises(lambda: sonde.clip_grad_norm_([plain(gradient)], 1.0, **options)),
        raises(lambda: sonde.get_total_norm([gradient], **options)),
    ]
    if not stage:
        gradient = gradient.double()
    return [*decided, raises(lambda: sonde.get_total_norm([gradient], **options))]


def test_stages_of_two_dtypes_decide_alike(ranks2: Ranks) -> None:
    assert ranks2(_stages_of_two_dtypes) == [[True, True, False]] * 2


def _copies_of_tiny_gradients(scale: float) -> list[float]:
    gradient = torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64) * scale
    return [float(sonde.clip_grad_norm_([plain(gradient)], None, math.inf, mesh=mesh_of((2,))))]


@pytest.mark.parametrize("scale", [1e-310, 5e-324, 1e300])
def test_tiny_gradients_that_are_copies_are_copies(ranks2: Ranks, scale: float) -> None:
    assert ranks2(_copies_of_tiny_gradients, scale) == [[pytest.approx(3.0 * scale, rel=1e-6)]] * 2


@pytest.mark.parametrize("order", [1.0, 2.0, 6.0, math.inf])
def test_a_tensor_that_is_listed_twice_counts_twice_as_with_torch(order: float) -> None:
    g, h = torch.tensor([3.0, 4.0]), torch.tensor([1.0])
    expected = float(torch.nn.utils.get_total_norm([g, h, g], order))
    norm, by_group = sonde.get_total_norm([g, h, g], order, by_group=["a", "b", "c"])
    assert float(norm) == pytest.approx(expected)
    assert float(sonde.get_total_norm([("x", g), ("y", h), ("z", g)], order)) == pytest.approx(expected)
    assert float(by_group["a"]) == float(by_group["c"]) == pytest.approx(float(torch.linalg.vector_norm(g, order)))
