"""Models that change themselves, or are changed, as training goes on: a measurement sees it, and leaves no trace."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import sonde
from sonde.contrib.hold_entropy import HoldEntropy
from sonde.policy.stats.forecast_point import forecast_point
from sonde.policy.stats.policy_alerts import find_policy_alerts
from tests.policy.entropy_scene import Scene
from tests.small_policy import STATISTICS, SmallPolicy, drawn, loss, optimizer_of


class Counting(SmallPolicy):
    """Its forward counts tokens, as a router does for its experts, and keeps the longest length with a table for it."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("counts", torch.zeros(8))
        self.longest = 0
        self.table: Tensor | None = None
        self.seen = torch.zeros(1)

    def forward(self, input_ids: Tensor) -> Tensor:
        self.counts += torch.bincount(input_ids.flatten(), minlength=8)[:8]
        self.seen += 1
        if not hasattr(self, "first"):
            self.first = input_ids.shape
            self.first_width = input_ids.shape[1]
        if input_ids.shape[1] > self.longest:
            self.longest = input_ids.shape[1]
            self.table = torch.arange(self.longest)
        return super().forward(input_ids)


PROBES = {
    "forecast": lambda scene: scene.probe().forecast(scene.E),
    "causes": lambda scene: scene.probe(beside=HoldEntropy()).forecast(scene.E, scene.U, causes=True),
    "policy entropy": lambda scene: sonde.PolicyEntropyProbe(scene.model, token_statistics=STATISTICS).measure(scene.E),
    "prompt noise": lambda scene: sonde.PromptNoiseProbe(scene.model, token_statistics=STATISTICS).measure(scene.U),
}


@pytest.mark.parametrize("probe", PROBES)
def test_what_a_forward_counts_and_keeps_is_as_before(probe: str) -> None:
    scene = Scene()
    scene.model = Counting()
    scene.optimizer = optimizer_of(scene.model, "sgd", 0.1)
    loss(scene.model, scene.U.rows(torch.arange(4))).backward()
    del scene.model.first_width
    counts, longest, table = scene.model.counts.clone(), scene.model.longest, scene.model.table
    seen = float(scene.model.seen)
    PROBES[probe](scene)
    assert torch.equal(scene.model.counts, counts)
    assert scene.model.longest == longest
    assert scene.model.table is table
    assert float(scene.model.seen) == seen
    assert not hasattr(scene.model, "first_width")


@pytest.mark.parametrize("around", [False, True])
def test_parameters_that_are_unfrozen_later_are_part_of_the_step(around: bool) -> None:
    """Frozen while the probe was made, as the base of a model is in the first phase of some trainings."""
    scene = Scene("sgd", lr=0.1)
    scene.model.hidden.requires_grad_(False)
    probe = scene.probe()
    scene.model.hidden.requires_grad_(True)
    expected = scene.probe().forecast(scene.E, causes=True)
    if around:
        with probe.around_step(scene.E, causes=True) as step:
            scene.optimizer.step()
        found = step.forecast
        assert found.doubt == ""
    else:
        found = probe.forecast(scene.E, causes=True)
    assert found.delta == pytest.approx(expected.delta, rel=1e-5)
    assert found.first_order.delta == pytest.approx(expected.first_order.delta, rel=1e-4)
    scene.model.requires_grad_(False)
    with pytest.raises(ValueError, match="has no trainable parameters"):
        probe.forecast(scene.E)


def test_parameters_that_share_memory_are_refused() -> None:
    scene = Scene()
    scene.model.position.weight.data = scene.model.token.weight.data[:7]
    with pytest.raises(ValueError, match=r"share memory, so a step of one moves the other too, .* a\.weight = b\."):
        scene.probe()
    # Views of one flat tensor that do not overlap are as good as tensors of their own.
    flat = torch.zeros(24)
    scene.model.out.bias.data = flat[: scene.model.out.bias.numel()]
    scene.model.position.weight.data = torch.zeros(16, 12)
    scene.model.hidden.bias.data = torch.zeros(24)
    scene.probe()


@pytest.mark.parametrize("precision", ["float32", "model"])
def test_inside_the_loops_autocast_the_weights_are_those_of_now(precision: Any) -> None:
    """Within a region of autocast, its cache would give the weights of its first forward."""
    plain = Scene("sgd", lr=0.5)
    outside = plain.probe().forecast(plain.E)
    gradients = []
    for is_watched in (False, True):
        scene = Scene("sgd", lr=0.5)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            if is_watched:
                with scene.probe(precision=precision).around_step(scene.E) as around:
                    scene.optimizer.step()
            else:
                scene.optimizer.step()
            scene.optimizer.zero_grad()
            total = loss(scene.model, scene.U)
        total.backward()
        gradients.append(scene.model.out.weight.grad)
    assert torch.equal(*gradients)
    assert around.forecast.delta == pytest.approx(outside.delta, abs=0.3 * outside.se)  # scores of bfloat16 scatter


def test_a_scale_that_is_still_in_the_gradients_may_be_given_around_a_step() -> None:
    scenes = Scene("momentum"), Scene("momentum")
    for p in scenes[1].model.parameters():
        p.grad *= 1024.0
    found = []
    for scene, scale in zip(scenes, (1.0, 1024.0), strict=True):
        probe = scene.probe(beside=HoldEntropy(applied_scale=scale))
        with probe.around_step(scene.E, gradient_scale=1 / scale, causes=True) as around:
            for p in scene.model.parameters():
                p.grad /= scale
            scene.optimizer.step()
        found.append(around.forecast)
    plain, scaled = found
    assert scaled.coefficient_to_hold.value == pytest.approx(plain.coefficient_to_hold.value, rel=1e-4)
    assert scaled.first_order.delta == pytest.approx(plain.first_order.delta, rel=1e-4)
    assert scaled.doubt == ""


def test_an_almost_uniform_policy_gets_no_advice_on_the_learning_rate() -> None:
    """A step of a training's start, which takes the policy far."""
    scene = Scene(lr=0.3)
    with torch.no_grad():
        scene.model.out.weight.mul_(0.02)
        scene.model.out.bias.zero_()
    forecast = scene.probe().forecast(drawn(scene.model, 0, 24, seed=1))
    assert not forecast.is_valid
    assert "the policy is almost uniform, and the step takes it too far for these responses" in forecast.reason
    assert "learning rate" not in forecast.reason
    points = [forecast_point(k, forecast.metrics(), reason=forecast.reason) for k in range(3)]
    assert points[0].is_near_uniform
    assert "steps_too_large" not in find_policy_alerts(points)


@pytest.mark.filterwarnings("ignore:.*is deprecated:DeprecationWarning")  # torch's own, as it compiles
@pytest.mark.shows("entropy change", "torch.compile")
def test_a_compiled_policy_has_the_forecast_of_the_policy() -> None:
    torch._dynamo.reset()
    scene = Scene()
    plain = scene.probe().forecast(scene.E, scene.U, causes=True)
    scene.model = torch.compile(scene.model, backend="eager")
    compiled = scene.probe().forecast(scene.E, scene.U, causes=True)
    torch._dynamo.reset()
    assert plain.causes is not None
    assert compiled.causes is not None
    assert (compiled.delta, compiled.se) == pytest.approx((plain.delta, plain.se), rel=1e-6)
    assert compiled.causes.explained == pytest.approx(plain.causes.explained, rel=1e-4)


@pytest.mark.filterwarnings("ignore:.*is deprecated:DeprecationWarning")
@pytest.mark.shows("policy entropy", "torch.compile")
def test_a_compiled_policy_has_the_entropy_of_the_policy() -> None:
    torch._dynamo.reset()
    scene = Scene()
    plain = sonde.PolicyEntropyProbe(scene.model, token_statistics=STATISTICS).measure(scene.E)
    compiled: Any = torch.compile(scene.model, backend="eager")
    found = sonde.PolicyEntropyProbe(compiled, token_statistics=STATISTICS).measure(scene.E)
    torch._dynamo.reset()
    assert found.token_weighted == pytest.approx(plain.token_weighted, rel=1e-6)
    assert found.sequence_sum == pytest.approx(plain.sequence_sum, rel=1e-6)
