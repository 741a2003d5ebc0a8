"""Gradients for cases that no small model has, and what becomes of a call on several ranks."""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import CommDebugMode

import sonde
from tests.ranks import mesh_of


def world() -> DeviceMesh:
    """All ranks, along one axis."""
    return mesh_of((dist.get_world_size(),))


def with_grad(gradient: Tensor) -> nn.Parameter:
    """A parameter with this gradient, as it is."""
    parameter = nn.Parameter(torch.zeros(gradient.shape, dtype=gradient.dtype, device=gradient.device))
    parameter.grad = gradient
    return parameter


def plain(gradient: Tensor) -> nn.Parameter:
    """A parameter with a copy of this gradient."""
    return with_grad(gradient.clone())


def noise(seed: int, *shape: int) -> Tensor:
    """The same on every rank."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def placed(
    local: Tensor, mesh: DeviceMesh, placements: list[Any], shape: tuple[int, ...], like: list[Any] | None = None
) -> nn.Parameter:
    """A parameter whose gradient has this local part; the parameter is placed like its gradient, or as `like`."""

    def dtensor(t: Tensor, where: list[Any]) -> DTensor:
        stride = torch.empty(shape).stride()
        return DTensor.from_local(t, mesh, where, run_check=False, shape=torch.Size(shape), stride=stride)

    parameter = nn.Parameter(dtensor(torch.zeros_like(local), like or placements))
    parameter.grad = dtensor(local, placements)
    return parameter


@dataclass
class Call:
    """A call of one rank.

    Attributes:
        parameters: as passed.
        options: as passed, besides `max_norm`.
        max_norm: of a clip; 1 zeroes nothing and changes most gradients.
        by: the function that is called.
    """

    parameters: Any
    options: dict[str, Any] = field(default_factory=dict)
    max_norm: Any = 1.0
    by: Callable[..., Any] = sonde.clip_grad_norm_


@dataclass(frozen=True)
class Case:
    """A call on every rank, and what it gives there.

    Attributes:
        name: in words.
        n_ranks: how many ranks make the call.
        call: made on each rank.
        gives: the norm; or what the message matches, on every rank or on each.
        n_collectives: that the call takes; None where it does not matter.
    """

    name: str
    n_ranks: int
    call: Callable[[], Call]
    gives: float | str | tuple[str, ...]
    n_collectives: int | None = 1


@dataclass(frozen=True)
class Outcome:
    """What became of a call on one rank: the message or the norm, the collectives, whether gradients are unchanged."""

    message: str
    norm: float | None
    n_collectives: int
    is_unchanged: bool
    goes_on: bool


def local_gradients(parameters: Any) -> list[Tensor]:
    """This rank's part of each gradient."""
    listed = parameters if isinstance(parameters, Sequence) else []
    tensors = [p[1] if isinstance(p, tuple) else p for p in listed]
    gradients = [getattr(t, "grad", None) for t in tensors]
    return [getattr(g, "_local_tensor", g) for g in gradients if g is not None and not g.is_meta]


def outcome(call: Call) -> Outcome:
    """Make the call on this rank, and then one that is right: a rank that is a collective ahead would spoil it."""
    before = [g.clone() for g in local_gradients(call.parameters)]
    arguments = [call.parameters, call.max_norm] if call.by is sonde.clip_grad_norm_ else [call.parameters]
    message, norm = "", None
    with CommDebugMode() as counted:
        try:
            made = call.by(*arguments, **call.options)
            norm = float(made) if isinstance(made, Tensor) else None
        except ValueError as error:
            message = str(error)
    after = local_gradients(call.parameters)
    is_unchanged = all(a is b or _same(a, b) for a, b in zip(before, after, strict=True))
    goes_on = float(sonde.clip_grad_norm_([plain(torch.ones(4))], None, mesh=world())) == 2.0
    return Outcome(message, norm, counted.get_total_counts(), is_unchanged, goes_on)


def _same(a: Tensor, b: Tensor) -> bool:
    return a.is_sparse or type(b) is not Tensor or a.dtype.itemsize < 2 or torch.equal(a, b)


def check(case: Case, outcomes: Sequence[Outcome]) -> None:
    """Every rank gives what the case says."""
    assert len(outcomes) == case.n_ranks
    for rank, found in enumerate(outcomes):
        expected = case.gives[rank] if isinstance(case.gives, tuple) else case.gives
        if isinstance(expected, str):
            assert found.norm is None, found
            assert re.search(expected, found.message), (rank, found.message)
            assert found.is_unchanged
        else:
            assert found.message == ""
            assert found.norm == pytest.approx(expected, rel=1e-6, nan_ok=True)
        assert found.goes_on
        assert found.n_collectives == case.n_collectives or case.n_collectives is None, found


def each_of(cases: Sequence[Case]) -> pytest.MarkDecorator:
    """One test for each case, given its index: a call cannot be sent to ranks."""
    return pytest.mark.parametrize("index", range(len(cases)), ids=[case.name for case in cases])


def check_on_ranks(request: pytest.FixtureRequest, module: str, index: int) -> None:
    """A case among the CASES of a module of tests gives on real ranks what it says."""
    case: Case = sys.modules[module].CASES[index]
    check(case, request.getfixturevalue(f"ranks{case.n_ranks}")(_outcome_of, module, index))


def _outcome_of(module: str, index: int) -> Outcome:
    return outcome(importlib.import_module(module).CASES[index].call())
