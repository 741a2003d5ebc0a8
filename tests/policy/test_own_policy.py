"""Whether evaluation responses are the policy's own: by sampling from a model rightly and wrongly."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor

from sonde.policy.scoring.rollouts import Rollouts
from sonde.policy.scoring.token_statistics import CausalLMStatistics
from sonde.policy.stats.forecast_point import forecast_point
from sonde.policy.stats.own_policy import OwnPolicyTest, SamplerTest
from sonde.policy.stats.policy_alerts import find_policy_alerts
from tests.policy.entropy_scene import Scene
from tests.small_policy import STATISTICS, SmallPolicy, drawn, policy, sample


class Sampling(SmallPolicy):
    """A policy whose logits are changed on the way to the sampler."""

    def __init__(self, model: SmallPolicy, how: str) -> None:
        super().__init__()
        self.load_state_dict(model.state_dict())
        self.how = how

    def forward(self, input_ids: Tensor) -> Tensor:
        logits = super().forward(input_ids)
        if self.how == "top_p":
            ordered, index = logits.softmax(-1).sort(descending=True)
            beyond = ordered.cumsum(-1) - ordered > 0.9
            return logits.masked_fill(torch.zeros_like(beyond).scatter(-1, index, beyond), -torch.inf)
        return logits / {"own": 1.0, "cold": 0.7, "hot": 1.4}[self.how]


def judged(how: str, seed: int, model: SmallPolicy) -> OwnPolicyTest:
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        made = sample(Sampling(model, how), list(range(24)))
        s, h = STATISTICS(model, made)
    found = OwnPolicyTest.of(s, h, made.responses())
    assert found is not None
    return found


def test_own_responses_pass_and_z_has_the_scatter_that_it_says() -> None:
    model = policy()
    z = torch.tensor([judged("own", seed, model).z for seed in range(200)])
    assert abs(float(z.mean())) < 0.25  # 3.5 standard errors of 200
    assert float(z.std()) == pytest.approx(1.0, abs=0.18)


@pytest.mark.parametrize(
    ("how", "cause"),
    [
        ("cold", "at a lower temperature"),
        ("top_p", "cut off by top-p"),
        ("hot", "at a higher temperature"),
        ("own", ""),
    ],
)
def test_an_alert_names_the_likely_cause_after_a_few_forecasts(how: str, cause: str) -> None:
    model = policy()
    points = []
    for seed in range(6):
        test = judged(how, seed, model)
        metrics = {"entropy/evaluation_own_policy_z": test.z, "entropy/evaluation_own_policy_departure": test.departure}
        points.append(forecast_point(seed, {"entropy/evaluation_per_token": 1.5, **metrics}))
    alerts = find_policy_alerts(points)
    assert ("not_own_policy" in alerts) == bool(cause), alerts
    assert cause in alerts.get("not_own_policy", "")


OLDER = policy()
with torch.no_grad():
    OLDER.out.weight.mul_(0.9)
    OLDER.token.weight.add_(0.1 * torch.randn(OLDER.token.weight.shape, generator=torch.Generator().manual_seed(1)))
"""The sampler, some steps behind the policy."""


def reported(how: str, seed: int) -> Rollouts:
    """Responses of the older policy, with its log-probabilities or with wrong ones."""
    made = drawn(OLDER, 0, 32, seed=seed)
    with torch.no_grad():
        cold = CausalLMStatistics()(OLDER, dataclasses.replace(made, temperature=0.7))[0]
        q = STATISTICS(OLDER, made)[0]
    wrong = {"right": q, "cold": cold, "constant": torch.full_like(q, -1.0)}
    wrong["shifted"] = torch.cat([q[:, :1], q[:, :-1]], 1)
    return dataclasses.replace(made, log_prob=wrong[how])


@pytest.mark.parametrize("how", ["right", "cold", "constant", "shifted"])
def test_log_probabilities_that_are_not_the_samplers_are_found_out(how: str) -> None:
    """E[π/q − 1] = 0 at each token, whatever the policy π: within its error only if q is the sampler's."""
    scene, points, z = Scene(), [], []
    for seed in range(12):
        forecast = scene.probe(micro_batch_prompts=32).forecast(reported(how, seed))
        assert forecast.sampler is not None
        z.append(forecast.sampler.z)
        points.append(forecast_point(seed, forecast.metrics()))
        assert points[-1].sampler == forecast.sampler
        assert not forecast.is_valid or how != "constant"
    alerts = find_policy_alerts(points)
    assert ("not_of_sampler" in alerts) == (how != "right"), alerts
    if how == "right":
        assert abs(sum(z) / 12) < 3 / 12**0.5
        assert 0.005 < forecast.sampler.kl < 0.2
        assert f"KL of sampler and policy {forecast.sampler.kl:.1e} nats a token" in str(forecast)


def test_the_samplers_z_has_the_scatter_that_it_says() -> None:
    z = []
    for seed in range(200):
        made = reported("right", seed)
        with torch.no_grad():
            s, _ = STATISTICS(policy(), made)
        assert made.log_prob is not None
        z.append(SamplerTest.of(s, made.log_prob, made.responses()).z)
    assert abs(float(torch.tensor(z).mean())) < 0.25
    assert float(torch.tensor(z).std()) == pytest.approx(1.0, abs=0.18)


def test_a_forecast_says_that_its_responses_are_not_the_policys_own() -> None:
    scene = Scene()

    def evaluation(how: str) -> Rollouts:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return sample(Sampling(scene.model, how), list(range(100)))

    forecast = scene.probe(micro_batch_prompts=100).forecast(evaluation("cold"))
    assert "are not the policy's own: their tokens are more likely" in forecast.reason
    assert not forecast.is_valid
    assert forecast.own_policy.z < -5
    assert scene.probe(micro_batch_prompts=100).forecast(evaluation("own")).is_valid
