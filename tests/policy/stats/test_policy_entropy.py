"""Averages by hand, and the correlation's interval by simulation."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from sonde.policy.stats.entropy_gradient import Responses
from sonde.policy.stats.policy_entropy import Correlation, correlate, policy_entropy

# Two prompts and three responses. One response is as long as the mask is wide.
MASK = torch.tensor([[1, 1, 0], [1, 1, 1], [1, 0, 0]]).bool()
RESPONSES = Responses(MASK, torch.tensor([7, 7, 9]))
H = torch.tensor([[1.0, 3.0, 99.0], [0.0, 1.0, 2.0], [5.0, 99.0, 99.0]])
S = torch.tensor([[-1.0, -2.0, 99.0], [-1.0, -1.0, -1.0], [-4.0, 99.0, 99.0]])


def test_token_and_sequence_weighted_averages_by_hand() -> None:
    summary = policy_entropy(S, H, RESPONSES)
    assert summary.token_weighted == pytest.approx((1 + 3 + 0 + 1 + 2 + 5) / 6)
    assert summary.sequence_weighted == pytest.approx((2 + 1 + 5) / 3)
    assert summary.sequence_sum == pytest.approx((4 + 3 + 5) / 3)
    assert summary.surprise == pytest.approx((3 + 3 + 4) / 3)
    assert (summary.mean_length, summary.sd_length, summary.longest) == (2.0, 1.0, 3)
    assert summary.at_limit == pytest.approx(1 / 3)
    assert (summary.n_prompts, summary.n_responses, summary.n_tokens) == (2, 3, 6)
    assert summary.advantage_correlation is None
    assert summary.log_prob_advantage is None


def test_advantages_per_response_and_per_token_agree() -> None:
    advantage = torch.tensor([1.0, -1.0, 0.5])
    of_responses = policy_entropy(S, H, RESPONSES, advantage)
    of_tokens = policy_entropy(S, H, RESPONSES, advantage[:, None].expand(3, 3))
    assert of_responses.log_prob_advantage == of_tokens.log_prob_advantage
    s, a = S[MASK].double(), advantage[:, None].expand(3, 3)[MASK].double()
    assert of_responses.log_prob_advantage == pytest.approx(float((s * a).mean() - s.mean() * a.mean()))
    assert of_responses.advantage_correlation is not None
    assert "at least 3 prompts, got 2" in of_responses.advantage_correlation.reason


def sampled(rho: float, n_clusters: int, generator: torch.Generator) -> Correlation:
    """Groups of 4 samples that share half of their variance."""

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    shared, own = normal(2, n_clusters, 1), normal(2, n_clusters, 4)
    x, e = ((shared + own) / 2**0.5).flatten(1)
    cluster = torch.arange(n_clusters).repeat_interleave(4)
    return correlate(x, rho * x + (1 - rho**2) ** 0.5 * e, cluster)


@pytest.mark.parametrize("rho", [0.0, 0.5, -0.9])
@pytest.mark.parametrize("n_clusters", [32, 128])
def test_the_interval_of_the_correlation_covers(rho: float, n_clusters: int) -> None:
    generator = torch.Generator().manual_seed(0)
    results = [sampled(rho, n_clusters, generator) for _ in range(1000)]
    covered = sum(c.low <= rho <= c.high for c in results) / len(results)  # type: ignore[operator]
    # Twice the Monte-Carlo error of 1.4 %. With 32 prompts, the scatter itself is known to 12 %.
    assert covered == pytest.approx(0.95, abs=0.03)
    assert sum(c.r for c in results) / len(results) == pytest.approx(rho, abs=0.02)


def test_perfect_and_no_correlation() -> None:
    x, cluster = torch.arange(8.0), torch.arange(8)
    assert correlate(x, 2 * x + 1, cluster).r == pytest.approx(1.0)
    assert correlate(x, -x, cluster).high == pytest.approx(-1.0)
    assert "every response has the same advantage" in correlate(x, torch.ones(8), cluster).reason
    assert "every response has the same entropy" in correlate(torch.ones(8), x, cluster).reason
