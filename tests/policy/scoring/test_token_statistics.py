"""Log-probabilities and entropies from logits, beside torch's own distributions."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sonde.policy.scoring.rollouts import Rollouts
from sonde.policy.scoring.token_statistics import CausalLMStatistics, statistics_of_logits
from tests.small_policy import drawn, policy


def logits_and_tokens(scale: float = 3.0, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    logits = scale * torch.randn(5, 7, 11, generator=generator, dtype=torch.float64)
    return logits.to(dtype), torch.randint(11, (5, 7), generator=generator)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
@pytest.mark.parametrize("scale", [0.0, 3.0, 1000.0])
def test_statistics_are_those_of_a_categorical_distribution(temperature: float, scale: float) -> None:
    logits, tokens = logits_and_tokens(scale, torch.float64)
    distribution = torch.distributions.Categorical(logits=logits / temperature)
    s, h = statistics_of_logits(logits, tokens, temperature=temperature)
    assert torch.allclose(s, distribution.log_prob(tokens), atol=1e-12)
    assert torch.allclose(h, distribution.entropy(), atol=1e-12)


def test_large_logits_lose_no_digits() -> None:
    logits, tokens = logits_and_tokens()
    exact = torch.distributions.Categorical(logits=logits.double())
    # fp32 has 7 digits of 3000 + x, so differences between logits keep 4. Nothing else is lost.
    s, h = statistics_of_logits(logits + 3000.0, tokens)
    assert torch.allclose(h.double(), exact.entropy(), atol=2e-3)
    s_small, h_small = statistics_of_logits(logits, tokens)
    assert torch.allclose(h_small.double(), exact.entropy(), atol=1e-6)
    assert torch.allclose(s, s_small, atol=2e-3)


def test_tokens_that_cannot_be_sampled_add_nothing() -> None:
    logits, tokens = logits_and_tokens()
    tokens = tokens.clamp(max=8)
    masked = torch.cat([logits[..., :9], torch.full_like(logits[..., 9:], -torch.inf)], -1).requires_grad_()
    s, h = statistics_of_logits(masked, tokens)
    s_without, h_without = statistics_of_logits(logits[..., :9], tokens)
    assert torch.allclose(s, s_without, atol=1e-6)
    assert torch.allclose(h, h_without, atol=1e-6)
    (s.sum() + h.sum()).backward()
    assert masked.grad is not None
    assert bool(masked.grad[..., :9].isfinite().all())


def test_logits_in_pieces_give_the_same_as_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    logits, tokens = logits_and_tokens()
    whole = statistics_of_logits(logits, tokens)
    monkeypatch.setattr("sonde.policy.scoring.token_statistics._ELEMENTS_AT_ONCE", 5 * 11 * 2)
    for a, b in zip(whole, statistics_of_logits(logits, tokens), strict=True):
        assert torch.equal(a, b)


class Recorder(nn.Module):
    """Returns logits that show the position, and records its arguments."""

    def forward(
        self, input_ids: Tensor, attention_mask: Any = None, position_ids: Any = None, logits_to_keep: int = 0
    ) -> Tensor:
        self.arguments = {
            "attention_mask": attention_mask,
            "position_ids": position_ids,
            "logits_to_keep": logits_to_keep,
        }
        logits = torch.zeros(*input_ids.shape, 4)
        logits[..., 0] = torch.arange(input_ids.shape[1]).float()
        return logits[:, -logits_to_keep:]


def test_a_tokens_logits_are_at_the_position_before_it_and_positions_do_not_count_padding() -> None:
    model, ids = Recorder(), torch.zeros(2, 6, dtype=torch.long)
    attention = torch.tensor([[1] * 6, [0, 0, 1, 1, 1, 1]])
    rollouts = Rollouts({"input_ids": ids, "attention_mask": attention}, torch.ones(2, 3), torch.tensor([0, 0]))
    s, _ = CausalLMStatistics()(model, rollouts)
    expected = torch.tensor([2.0, 3.0, 4.0])  # the positions before columns 3, 4, 5
    assert torch.allclose(s[0], expected - torch.log(expected.exp() + 3))
    assert model.arguments["logits_to_keep"] == 4
    assert model.arguments["position_ids"].tolist() == [[0, 1, 2, 3, 4, 5], [0, 0, 0, 1, 2, 3]]


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({"tokens": torch.zeros(1, 4)}, "inputs need 'input_ids' for a causal language model"),
        (
            {"input_ids": torch.zeros(1, 3, dtype=torch.long)},
            "the first cannot have been sampled, got 3 columns in the mask and 3",
        ),
    ],
)
def test_wrong_inputs_are_refused(inputs: dict[str, Tensor], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        CausalLMStatistics()(Recorder(), Rollouts(inputs, torch.ones(1, 3), torch.tensor([0])))


def test_logits_are_divided_by_the_temperature() -> None:
    model = policy()
    E = drawn(model, 0, 4, seed=1)
    s, h = CausalLMStatistics()(model, dataclasses.replace(E, temperature=2.0))
    logits = model(E.inputs["input_ids"])[:, 1:-1] / 2.0
    log_p = logits.log_softmax(-1)
    assert torch.allclose(h, -(log_p.exp() * log_p).sum(-1), atol=1e-6)
    assert torch.allclose(s, log_p.gather(-1, E.inputs["input_ids"][:, 2:, None])[..., 0], atol=1e-6)
