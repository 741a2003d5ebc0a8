"""What loops on models that are cut over ranks have in common: what they count, and what they compare."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

Values = list[tuple[float, float]]
"""(tr Σ, |G|²) of the total and of each group."""


def n_collectives() -> int:
    """How many collectives all groups of this process have issued, whichever they are."""
    groups = dist.distributed_c10d._world.pg_map
    return sum(group._get_sequence_number_for_group() for group in groups)


def reshard(model: nn.Module) -> None:
    """FSDP2 leaves parameters whole after a forward without a backward."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def whole_parameters(model: nn.Module) -> dict[str, Tensor]:
    """Every parameter, whole, by its name in the plain model. (All ranks take part.)"""
    reshard(model)
    named = ((name.removeprefix("module."), p) for name, p in model.named_parameters())
    return {name: (p.full_tensor() if isinstance(p, DTensor) else p).detach().clone() for name, p in named}


def joined(tensors: Iterable[Tensor]) -> Tensor:
    """A copy of this rank's part of all tensors, in one: a rank takes 0.1 ms to send a tensor, however small."""
    local = (t.to_local() if isinstance(t, DTensor) else t for t in tensors)
    return torch.cat([torch.empty(0), *(t.detach().flatten() for t in local)])


def last_window(probe: Any, metric: str | None = None) -> Values | None:
    """What the probe solved of its last window, in a metric or the first one; None if it dropped it."""
    solved = probe.window(metric)
    return solved and [(e.trace_cov, e.grad_sq) for e in (solved.total, *solved.per_group)]


def assert_same_values(found: Sequence[tuple[float, float]], exact: Values, effective_units: float) -> None:
    """Compare a window with the same by hand: tr Σ and |G|² of the total and of each group, and B_simple of the total.

    Gradients are of fp32, so every number is compared within 1e-5 of itself. |G|² may be a small difference of the
    window's |F|² and tr Σ / n, so its error is 1e-5 of these two.

    Args:
        found: by the probe.
        exact: by hand.
        effective_units: n, of the window.
    """
    assert len(found) == len(exact)
    errors = []
    for (trace_cov, grad_sq), (exact_trace_cov, exact_grad_sq) in zip(found, exact, strict=True):
        assert trace_cov == pytest.approx(exact_trace_cov, rel=1e-5, abs=0.0)
        errors.append(1e-5 * (abs(exact_grad_sq) + exact_trace_cov / effective_units))
        assert grad_sq == pytest.approx(exact_grad_sq, rel=0.0, abs=errors[-1])
    (trace_cov, grad_sq), (exact_trace_cov, exact_grad_sq) = found[0], exact[0]
    error_of_ratio = 1e-5 + errors[0] / abs(exact_grad_sq)
    assert trace_cov / grad_sq == pytest.approx(exact_trace_cov / exact_grad_sq, rel=error_of_ratio)


def with_total(of_groups: Values) -> Values:
    """The values of groups, after their total."""
    return [(sum(trace_cov for trace_cov, _ in of_groups), sum(grad_sq for _, grad_sq in of_groups)), *of_groups]
