"""Metrics of a policy in older logs, whose names did not say which responses they are of."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TypeVar

from sonde.policy.stats.policy_entropy import QUANTILES

T = TypeVar("T")

_OLDEST, _PRESENT = "entropy/per_token", "entropy/evaluation_per_token"
_ON_EVALUATION = ("per_token", "per_token_se", "surprise_sd", "own_policy_z", "own_policy_departure")
_ON_UPDATE = (
    "token_weighted", "token_weighted_se", "token_weighted_surprise_sd", "sequence_weighted", "response_sd",
    *(f"response_q{q:02}" for q in QUANTILES), "sequence_sum", "advantage_correlation", "advantage_correlation_low",
    "advantage_correlation_high", "cov_log_prob_advantage",
)  # fmt: skip
_NAMES = {
    **{f"entropy/{name}": f"entropy/evaluation_{name}" for name in _ON_EVALUATION},
    **{f"entropy/{name}": f"entropy/update_{name}" for name in _ON_UPDATE},
    **{f"length/{name}": f"length/update_{name}" for name in ("mean", "sd", "longest", "at_limit")},
}


def are_older(declared: Collection[str]) -> bool | None:
    """Whether a header declares the older names; None if it declares no metrics of a policy."""
    if _OLDEST in declared:
        return True
    return False if _PRESENT in declared else None


def with_present_names(metrics: Mapping[str, T]) -> dict[str, T]:
    """Metrics of an older log by their present names."""
    return {_NAMES.get(name, name): value for name, value in metrics.items()}
