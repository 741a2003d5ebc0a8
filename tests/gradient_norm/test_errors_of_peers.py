"""What a rank on a GPU raises if other ranks found an error: it reads that from the sum, long after the sum."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from sonde.gradient_norm.agreement import Ballot, NormRequest, contrast, digest
from sonde.gradient_norm.global_norm import GlobalNorm, SummedVector
from sonde.gradient_norm.plan import NormPlan
from sonde.gradient_norm.scaling import clip_measured_


def measured(plan: NormPlan, thresholds: tuple[float, float], *, failed: float) -> GlobalNorm:
    """A norm as two ranks with these thresholds leave it after their sum; `failed` counts ranks."""
    total = SummedVector(plan, NormRequest(2.0))
    for rank, threshold in enumerate(thresholds):
        ballot = Ballot("up to 6", uses_max=False)
        ballot.add_digest("max_norm", digest(threshold), contrast(range(2), [rank]))
        total.slots.add_(ballot.slots(plan.device))
    total.sums.fill_(25.0)
    total.failed.fill_(failed)
    request = NormRequest(2.0, thresholds[0], "raise")
    return GlobalNorm(total.sums.unbind(), plan.collect(), False, True, total, request)


@pytest.mark.parametrize(
    ("thresholds", "failed", "match"),
    [
        ((1.0, 2.0), 0.0, "max_norm differs between ranks, got 1.0 on this rank: pass the same on every rank"),
        ((1.0, 1.0), 1.0, "another rank was called with something that cannot be used, or found a gradient that can"),
    ],
)
def test_the_message_names_what_is_wrong(thresholds: tuple[float, float], failed: float, match: str) -> None:
    p = nn.Parameter(torch.zeros(2))
    p.grad = torch.tensor([3.0, 4.0])
    plan = NormPlan([p])
    norm = measured(plan, thresholds, failed=failed)
    assert not norm.is_usable
    with pytest.raises(ValueError, match=match):
        clip_measured_(plan, norm, 1.0, nonfinite="raise")
    assert p.grad.tolist() == [3.0, 4.0]


def test_ranks_that_agree_have_no_error() -> None:
    p = nn.Parameter(torch.zeros(2))
    p.grad = torch.tensor([3.0, 4.0])
    plan = NormPlan([p])
    norm = measured(plan, (1.0, 1.0), failed=0.0)
    assert norm.error_of_peers(plan) is None
    assert float(clip_measured_(plan, norm, 1.0, nonfinite="raise")) == 5.0
    assert p.grad.tolist() == pytest.approx([0.6, 0.8])
