"""A trainer's own norm that is that of each rank's shard, and what sonde must say of it."""

from __future__ import annotations

import re
import statistics
from typing import Any

import pytest
import torch
from torch import nn


def norm_of_shard(parameters: Any) -> tuple[torch.Tensor, float]:
    """The norm of this rank's shard, as some trainers take it; and that over the true one."""
    from torch.distributed.tensor import DTensor

    gradients = [p.grad for p in parameters if p.grad is not None]
    assert all(isinstance(g, DTensor) for g in gradients)
    norm = torch.nn.utils.get_total_norm([g.to_local() for g in gradients])
    squares = sum(g.full_tensor().double().square().sum() for g in gradients)
    return norm, float(norm) / float(squares) ** 0.5


def clip_by_shard(factors: list[float]) -> Any:
    """A trainer's clip by the norm of this rank's shard. It adds that norm over the true one to the list."""

    def clip(parameters: Any, max_norm: float, *args: Any, **kwargs: Any) -> torch.Tensor:
        norm, factor = norm_of_shard(parameters := list(parameters))
        factors.append(factor)
        nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)
        return norm

    return clip


def usual(factors: list[float]) -> float:
    """The median, as sonde takes it: of norms that mislead."""
    return statistics.median([factor for factor in factors if abs(factor - 1) > 0.02] or [1.0])


def check_said(is_wrong: bool, said: list[str], factor: float) -> None:
    """Check that what a rank says at its end names the factor of a wrong norm, and no right one."""
    found = re.findall(r"your grad norm was (0\.\d\d) of the true one", " ".join(said))
    assert len(found) == is_wrong, said
    if is_wrong:
        assert 0.5 < factor < 0.9
        assert float(found[0]) == pytest.approx(factor, abs=0.0051)  # of two decimals
