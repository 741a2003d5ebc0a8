"""Averages by hand, and the correlation's interval by simulation."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from sonde.policy.stats.entropy_gradient import Responses, weighted_entropy_rate
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
    assert summary.response_sd == pytest.approx(((0.667**2 + 1.667**2 + 2.333**2) / 2) ** 0.5, rel=1e-3)
    assert [summary.response_quantiles[q] for q in (5, 25, 50, 75, 95)] == pytest.approx([1.1, 1.5, 2.0, 3.5, 4.7])
    assert summary.sequence_sum == pytest.approx((4 + 3 + 5) / 3)
    assert (summary.mean_length, summary.sd_length, summary.longest) == (2.0, 1.0, 3)
    assert summary.at_limit == pytest.approx(1 / 3)
    assert (summary.n_prompts, summary.n_responses, summary.n_tokens) == (2, 3, 6)
    assert summary.advantage_correlation is None
    assert summary.log_prob_advantage is None


def test_the_standard_errors_are_those_of_prompts_drawn_again() -> None:
    """Lengths and entropies differ between prompts, and long responses have less entropy. An oracle of 400 draws."""
    generator = torch.Generator().manual_seed(0)
    n_prompts, n_draws = 40, 400
    rates, weighted, squares, squares_weighted = [], [], 0.0, 0.0
    for _ in range(n_draws):
        length = torch.randint(1, 7, (2 * n_prompts,), generator=generator)
        mask = torch.arange(6)[None, :] < length[:, None]
        of_prompt = torch.rand(n_prompts, 1, generator=generator, dtype=torch.float64).repeat_interleave(2, 0)
        h = (of_prompt + 3.0 / length[:, None]).expand(-1, 6) + torch.rand(2 * n_prompts, 6, generator=generator)
        responses = Responses(mask, torch.arange(n_prompts).repeat_interleave(2))
        summary = policy_entropy(-h, h, responses)
        rate, se = weighted_entropy_rate(h, responses, None)
        assert se is not None
        assert summary.token_weighted_se is not None
        rates.append(rate)
        weighted.append(summary.token_weighted)
        squares += se**2
        squares_weighted += summary.token_weighted_se**2
    n = len(rates)
    # 400 draws know a standard deviation to 3.5 %.
    assert (squares / n) ** 0.5 == pytest.approx(float(torch.tensor(rates).std()), rel=0.12)
    assert (squares_weighted / n) ** 0.5 == pytest.approx(float(torch.tensor(weighted).std()), rel=0.12)


def test_one_prompt_has_no_standard_error_and_prompts_that_agree_have_none_left() -> None:
    alone = Responses(MASK, torch.tensor([7, 7, 7]))
    assert policy_entropy(S, H, alone).token_weighted_se is None
    assert policy_entropy(S[:1], H[:1], Responses(MASK[:1], torch.tensor([7]))).response_sd is None
    assert weighted_entropy_rate(H, alone, None)[1] is None
    assert weighted_entropy_rate(torch.ones(3, 3), RESPONSES, None)[1] == 0.0
    # Two prompts: Σ H − R·T is 7 − 2·5 = −3 and 5 − 2·1 = 3, over 6 tokens in all.
    assert policy_entropy(S, H, RESPONSES).token_weighted_se == pytest.approx((2 * (9 + 9)) ** 0.5 / 6)


def test_a_uniform_policy_has_no_scatter_of_surprise() -> None:
    assert policy_entropy(-H, H, RESPONSES).surprise_sd == 0.0
    assert policy_entropy(S, H, RESPONSES).surprise_sd == pytest.approx((4 / 6) ** 0.5)


def test_advantages_per_response_and_per_token_agree() -> None:
    advantage = torch.tensor([1.0, -1.0, 0.5])
    per_response = policy_entropy(S, H, RESPONSES, advantage)
    per_token = policy_entropy(S, H, RESPONSES, advantage[:, None].expand(3, 3))
    assert per_response.log_prob_advantage == per_token.log_prob_advantage
    s, a = S[MASK].double(), advantage[:, None].expand(3, 3)[MASK].double()
    assert per_response.log_prob_advantage == pytest.approx(float((s * a).mean() - s.mean() * a.mean()))
    assert per_response.advantage_correlation is not None
    assert "at least 3 prompts, got 2" in per_response.advantage_correlation.reason


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


def test_quantiles_by_position_are_those_of_the_tokens_there() -> None:
    """Beside numpy-like quantiles of lists that are made token by token; gaps in a response do not count."""
    generator = torch.Generator().manual_seed(1)
    mask = torch.rand(40, 21, generator=generator) < 0.7
    mask[:, 0] = True
    h = torch.rand(40, 21, generator=generator, dtype=torch.float64)
    responses = Responses(mask, torch.arange(40) // 2)
    at_position: dict[int, list[float]] = {}
    for row in range(40):
        for place, column in enumerate(mask[row].nonzero()[:, 0].tolist(), start=1):
            at_position.setdefault(place, []).append(float(h[row, column]))
    found = policy_entropy(-h, h, responses).by_position
    assert [(at.first, at.last) for at in found] == [(1, 1), (2, 3), (4, 7), (8, 15), (16, 31)]
    for at in found:
        tokens = torch.tensor([x for place in range(at.first, at.last + 1) for x in at_position.get(place, [])])
        assert at.n_tokens == len(tokens)
        expected = torch.quantile(tokens.double(), torch.tensor([0.1, 0.5, 0.9], dtype=torch.float64)).tolist()
        assert (at.q10, at.q50, at.q90) == pytest.approx(expected, rel=1e-6)
    assert sum(at.n_tokens for at in found) == int(mask.sum())
