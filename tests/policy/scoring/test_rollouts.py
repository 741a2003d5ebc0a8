"""Rollouts with inconsistent fields are refused."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

from sonde.policy.scoring.rollouts import Rollouts, mask_doubt
from tests.small_policy import STATISTICS, drawn, policy, rollouts


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mask": torch.zeros(16, 6)}, "response 0 has no token"),
        ({"mask": torch.ones(16)}, r"mask must be \[responses, tokens\]"),
        (
            {"mask": torch.where(torch.arange(6) < 3, 5, -100).expand(16, 6)},
            r"mask must be True or 1 .* labels != -100",
        ),
        ({"mask": torch.full((16, 6), torch.nan)}, "mask must be True or 1 where the policy sampled a token"),
        ({"prompt": torch.tensor(1)}, r"prompt must be \[responses\], got \[\]"),
        ({"prompt": torch.zeros(3, dtype=torch.long)}, "prompt"),
        ({"prompt": torch.zeros(16)}, "prompt must be whole numbers"),
        ({"advantage": torch.zeros(3)}, r"advantage must be \[16\] or \[16, 6\], .* got \[3\]"),
        ({"advantage": torch.full((16,), torch.nan)}, "advantage must be finite"),
        ({"inputs": {"input_ids": torch.zeros(3, 8)}}, r"inputs\['input_ids'\] must be a tensor of 16 rows"),
        ({"temperature": 0.0}, "temperature must be positive, got 0.0"),
        ({"temperature": "1"}, "temperature must be a number or a tensor, got '1'"),
        ({"weight": torch.ones(2, 2)}, "weight must be"),
        (
            {"mask": [[True] * 6] * 16},
            r"mask must be a tensor, \[responses, tokens\], got a list: pass torch.tensor\(mask\)",
        ),
        ({"prompt": list(range(16))}, r"prompt must be a tensor, \[responses\], got a list"),
        ({"prompt": None}, r"prompt must be a tensor, \[responses\], got None"),
        ({"advantage": [0.0] * 16}, r"advantage must be a tensor, \[responses\] or \[responses, tokens\], got a list"),
        ({"weight": 1.0}, r"weight must be a tensor, \[responses, tokens\], got a float"),
        ({"inputs": torch.zeros(16, 8)}, r"inputs must map names to tensors, got a Tensor: pass \{'input_ids': ids\}"),
    ],
)
def test_inconsistent_rollouts_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        rollouts(**changes)


def test_a_temperature_may_be_a_tensor_of_one_number() -> None:
    assert rollouts(temperature=torch.tensor(0.5)).temperature == 0.5


def test_a_packed_row_that_begins_in_the_middle_of_a_sequence_is_refused() -> None:
    """Its first tokens would be left out without notice."""
    row = {"input_ids": torch.arange(7), "position_ids": torch.tensor([5, 6, 7, 8, 0, 1, 2])}
    sampled = torch.tensor([0, 1, 1, 1, 0, 1, 1])
    with pytest.raises(ValueError, match="the row begins at position 5, in the middle of a sequence"):
        Rollouts.from_packed(row, sampled, torch.tensor([3]))


@pytest.mark.parametrize("values", [torch.tensor([0, 0, 0.5]), torch.tensor([-100, -100, 3]), torch.tensor([0, 0, -1])])
def test_a_mask_of_packed_rows_is_no_weights_and_no_labels(values: Tensor) -> None:
    row = {"input_ids": torch.arange(3), "position_ids": torch.arange(3)}
    with pytest.raises(ValueError, match="mask must be True or 1 where the policy sampled a token"):
        Rollouts.from_packed(row, values, torch.tensor([3]))


@pytest.mark.parametrize("bounds", [None, torch.tensor([0, 3, 5])])
def test_padding_behind_packed_responses_is_left_out(bounds: Tensor | None) -> None:
    row = {"input_ids": torch.tensor([5, 6, 2, 0, 0]), "position_ids": torch.tensor([0, 1, 2, 0, 0])}
    made = Rollouts.from_packed(row, torch.tensor([0, 1, 1, 0, 0]), torch.tensor([3]), cu_seqlens=bounds)
    assert made.inputs["input_ids"].tolist() == [[5, 6, 2]]


@pytest.mark.parametrize("bounds", [None, torch.tensor([0])])
def test_an_empty_packed_row_has_no_response(bounds: Tensor | None) -> None:
    """Probes refuse it on all ranks: an error here would be raised on this rank alone."""
    nothing = torch.zeros(0, dtype=torch.long)
    row = {"input_ids": nothing, "position_ids": nothing}
    assert len(Rollouts.from_packed(row, nothing, nothing, cu_seqlens=bounds)) == 0


def doubt(made: Rollouts) -> str:
    with torch.no_grad():
        s, _ = STATISTICS(policy(), made)
    return mask_doubt(made, torch.where(made.mask.bool(), s, 0.0))


def test_a_mask_without_the_token_that_ends_a_response_or_with_the_prompt_is_doubted() -> None:
    """Either makes the change of entropy wrong by as much as a factor of 2, with no other sign."""
    made = drawn(policy(), 0, 12, seed=3)
    assert not doubt(made)
    assert not doubt(made.rows(torch.arange(0, 48, 4)))  # one response to each prompt
    ids, mask = made.inputs["input_ids"][:, 2:], made.mask
    keeps = (mask & (ids != 0)).any(1).nonzero()[:, 0]  # END is 0: some responses are nothing else
    without_end = dataclasses.replace(made, mask=mask & (ids != 0) | ~(mask & (ids != 0)).any(1, keepdim=True) & mask)
    assert "token 0 follows each: if the policy samples a token that ends a response" in doubt(without_end.rows(keeps))
    with_prompt = dataclasses.replace(made, mask=torch.cat([torch.ones(48, 1, dtype=torch.bool), mask], 1))
    assert "the mask begins with the same token in all responses to a prompt, which the policy" in doubt(with_prompt)
    other = dataclasses.replace(with_prompt, inputs={"ids": made.inputs["input_ids"]})
    assert not mask_doubt(other, torch.zeros(48, 7))  # tokens that are not known
