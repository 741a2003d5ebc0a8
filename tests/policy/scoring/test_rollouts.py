"""Rollouts with inconsistent fields are refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.small_policy import rollouts


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mask": torch.zeros(16, 6)}, "response 0 has no token"),
        ({"mask": torch.ones(16)}, r"mask must be \[responses, tokens\]"),
        ({"prompt": torch.zeros(3, dtype=torch.long)}, "prompt"),
        ({"prompt": torch.zeros(16)}, "prompt must be whole numbers"),
        ({"advantage": torch.zeros(3)}, r"advantage must be \[16\] or \[16, 6\], .* got \[3\]"),
        ({"advantage": torch.full((16,), torch.nan)}, "advantage must be finite"),
        ({"inputs": {"input_ids": torch.zeros(3, 8)}}, r"inputs\['input_ids'\] must be a tensor of 16 rows"),
        ({"temperature": 0.0}, "temperature must be positive, got 0.0"),
        ({"weight": torch.ones(2, 2)}, "weight must be"),
    ],
)
def test_inconsistent_rollouts_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        rollouts(**changes)
