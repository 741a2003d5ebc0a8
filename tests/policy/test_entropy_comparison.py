"""Losses compared by what they would do to the entropy, beside exact enumeration of every response."""

from __future__ import annotations

import copy
import dataclasses
import functools
import json
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from benchmarks.tiny_policies import Recurrent, sampled, statistics
from torch import Tensor, nn

import sonde
from sonde.policy.entropy_change import EntropyChangeProbe
from sonde.policy.entropy_options import EntropyChangeOptions
from sonde.policy.scoring.rollouts import Rollouts
from tests.policy.entropy_scene import Scene, assert_untouched, held, stale
from tests.small_policy import STATISTICS, drawn, loss, real_step

N_COMPARISONS = 80
OPTIONS: dict[str, dict[str, float]] = {
    "clip 0.2": {},
    "clip-higher 0.28": {"high": 0.28},
    "entropy bonus": {"bonus": 0.05},
    "KL-Cov": {"kl_cov": 0.1},
}


class Training:
    """A policy about to learn from responses of some steps ago, with four losses to choose from."""

    def __init__(self, kind: str) -> None:
        self.generator = torch.Generator().manual_seed(5)
        self.model = Recurrent(2)
        made: dict[str, Callable[..., torch.optim.Optimizer]] = {
            "adam": functools.partial(torch.optim.Adam, lr=5e-3),
            "sgd": functools.partial(torch.optim.SGD, lr=0.2),
        }
        self.optimizer = made[kind](self.model.parameters())
        self.train(15)
        old = copy.deepcopy(self.model)
        self.update = sampled(old, 24, self.generator)
        with torch.no_grad():
            self.old, _ = statistics(old, self.update)
        self.train(12)

    def train(self, n: int) -> None:
        for _ in range(n):
            batch = sampled(self.model, 16, self.generator)
            s, _ = statistics(self.model, batch)
            self.optimizer.zero_grad()
            (-self.model.longest * (batch.credit() * s).sum() / len(batch)).backward()
            self.optimizer.step()
        self.optimizer.zero_grad()

    def loss(self, high: float = 0.2, bonus: float = 0.0, kl_cov: float = 0.0) -> Tensor:
        s, h = statistics(self.model, self.update)
        ratio, mask = (s - self.old).exp(), self.update.mask
        assert self.update.advantage is not None
        advantage = self.model.longest * self.update.advantage[:, None]
        each = -torch.minimum(ratio * advantage, ratio.clamp(0.8, 1 + high) * advantage)
        if kl_cov:  # a penalty on the tokens that lower the entropy most
            covariance = ((s - s[mask].mean()) * (advantage - advantage.mean())).detach().masked_fill(~mask, -9.0)
            each = each + (s - self.old).abs() * (covariance >= covariance[mask].quantile(1 - kl_cov))
        return (each * mask).sum() / len(self.update) - bonus * (h * mask).sum() / mask.sum()

    def losses(self) -> dict[str, Callable[[], Tensor]]:
        return {name: functools.partial(self.loss, **options) for name, options in OPTIONS.items()}

    def probe(self, **options: Any) -> EntropyChangeProbe:
        return EntropyChangeProbe(
            self.model,
            self.optimizer,
            EntropyChangeOptions(micro_batch_prompts=64, **options),
            token_statistics=statistics,
        )

    def truth(self) -> dict[str, float]:
        """The exact change of entropy by each loss."""
        found = {}
        for name, of in self.losses().items():
            of().backward()
            after, step = copy.deepcopy(self.model), real_step(self.model, self.optimizer)
            with torch.no_grad():
                for parameter, p in after.named_parameters():
                    p += step[parameter]
            found[name] = after.rate() - self.model.rate()
            self.optimizer.zero_grad()
        return found


@pytest.mark.parametrize(("kind", "least"), [("adam", 10.0), ("sgd", 1.5)])
def test_paired_intervals_hold_the_exact_difference(kind: str, least: float) -> None:
    """80 intervals of 95 % for each loss: the part that holds the truth has a standard error of 2.4 points.

    Steps of SGD are as long as gradients: the options are farther apart there, and pairing gains less.
    """
    training = Training(kind)
    truth, probe = training.truth(), training.probe()
    others = [name for name in OPTIONS if name != "clip 0.2"]
    n_held, n_resolved, n_wrong = (dict.fromkeys(others, 0) for _ in range(3))
    sharper: dict[str, list[float]] = {name: [] for name in others}
    for _ in range(N_COMPARISONS):
        found = probe.compare(training.losses(), sampled(training.model, 32, training.generator))
        base = found.forecasts["clip 0.2"]
        for name in others:
            true, paired = truth[name] - truth["clip 0.2"], found.differences[name]
            assert paired.is_valid, paired.reason
            n_held[name] += paired.low <= true <= paired.high
            n_resolved[name] += paired.is_resolved
            n_wrong[name] += paired.is_resolved and paired.difference * true < 0
            sharper[name].append(math.hypot(found.forecasts[name].se, base.se) / paired.se)
    medians = {name: sorted(ratios)[N_COMPARISONS // 2] for name, ratios in sharper.items()}
    assert min(n_held.values()) >= 0.92 * N_COMPARISONS, n_held
    assert max(n_wrong.values()) <= 0.01 * N_COMPARISONS, n_wrong
    # Clip-higher moves Adam's step by 0.1 % of its change, which 32 prompts seldom show.
    assert all(
        n > 0.9 * N_COMPARISONS or (kind, name) == ("adam", "clip-higher 0.28") for name, n in n_resolved.items()
    )
    assert min(medians.values()) >= least, medians


def test_a_difference_is_that_of_the_forecasts_and_is_the_sum_of_its_prompts() -> None:
    training = Training("adam")
    E = sampled(training.model, 32, training.generator)
    found = training.probe().compare(training.losses(), E, baseline="KL-Cov")
    assert list(found.forecasts) == list(OPTIONS)
    for name, of in training.losses().items():
        of().backward()
        alone = training.probe().forecast(E)
        training.optimizer.zero_grad()
        assert (found.forecasts[name].delta, found.forecasts[name].se) == (alone.delta, alone.se)
    base = found.forecasts["KL-Cov"]
    assert "KL-Cov" not in found.differences
    for name, paired in found.differences.items():
        assert paired.difference == pytest.approx(found.forecasts[name].delta - base.delta, rel=1e-9)
        assert sum(share.change for share in paired.shares) == pytest.approx(paired.difference, rel=1e-9)
        # To first order the jackknife is the scatter of differences of the forecasts' shares.
        of_base = {share.prompt: share.change for share in base.shares}
        parts = torch.tensor([32 * (s.change - of_base[s.prompt]) for s in found.forecasts[name].shares])
        assert paired.se == pytest.approx(float(parts.std()) / 32**0.5, rel=0.1)
    lines = found.table().splitlines()
    assert lines[0].split() == ["loss", "(nats", "a", "token)", "change", "difference,", "paired"]
    assert [line.split("  ")[0] for line in lines[1:]] == list(OPTIONS)
    assert lines[4].endswith("the baseline")
    assert lines[1].endswith("less entropy")
    json.dumps(dataclasses.asdict(found))
    assert type(found) is sonde.EntropyComparison


def test_two_equal_losses_differ_by_nothing() -> None:
    scene = Scene()
    scene.model.dropout.p = 0.3
    scene.model.train()
    scene.model.register_buffer("factor", torch.ones(1))

    def of() -> Tensor:
        assert scene.model.dropout.training
        scene.model.factor.mul_(2.0)  # type: ignore[operator, union-attr]
        return loss(scene.model, scene.U)

    def scaled(model: nn.Module, rollouts: Rollouts, /) -> tuple[Tensor, Tensor]:
        s, h = STATISTICS(model, rollouts)
        return s, h * model.factor  # type: ignore[operator]

    found = scene.probe(token_statistics=scaled).compare({"a": of, "b": of}, scene.E)
    difference = found.differences["b"]
    assert abs(found.forecasts["b"].delta) < 0.1 * found.forecasts["b"].entropy  # buffers are as before
    # The same random numbers: dropout leaves out the same units.
    assert (difference.difference, difference.low, difference.high) == (0.0, 0.0, 0.0)
    assert str(found).endswith("cannot be distinguished")


def test_the_scale_of_gradients_may_be_that_of_each_losss_own_clip() -> None:
    scene = Scene("sgd")
    losses = {"once": lambda: loss(scene.model, scene.U), "ten times": lambda: 10.0 * loss(scene.model, scene.U)}
    found = scene.probe().compare(losses, scene.E)
    assert found.forecasts["ten times"].delta == pytest.approx(10 * found.forecasts["once"].delta, rel=0.2)

    def clip() -> float:
        return 1e-3 / float(torch.nn.utils.get_total_norm([p.grad for p in scene.model.parameters()]))  # type: ignore[misc]

    clipped = scene.probe().compare(losses, scene.E, gradient_scale=clip)
    assert clipped.differences["ten times"].difference == pytest.approx(
        0.0, abs=1e-3 * abs(found.forecasts["once"].delta)
    )


@pytest.mark.parametrize(
    "options", [{"objective": "sequence"}, {"objective": "sequence", "sequence_weights": "length"}, {"clip_at": 2.0}]
)
@pytest.mark.parametrize("is_stale", [False, True])
def test_with_other_options_and_responses_of_older_weights(options: dict[str, Any], is_stale: bool) -> None:
    scene = Scene(lr=1e-4)
    E = stale(scene.model, 24, seed=1) if is_stale else scene.E
    losses = {
        "a": lambda: loss(scene.model, scene.U),
        "b": lambda: loss(scene.model, drawn(scene.model, 300, 8, seed=5)),
    }
    found = scene.probe(**options).compare(losses, E)
    paired, (a, b) = found.differences["b"], found.forecasts.values()
    # A clip cuts the weights of the two steps at different means.
    assert paired.difference == pytest.approx(b.delta - a.delta, rel=1e-9)
    assert 0.0 < paired.se < 1.5 * math.hypot(a.se, b.se)


def test_a_scaler_of_gradients_changes_nothing() -> None:
    scene = Scene("sgd")
    losses = {"a": lambda: loss(scene.model, scene.U), "b": lambda: loss(scene.model, scene.U).exp()}
    expected = scene.probe().compare(losses, scene.E)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    scaler.scale(loss(scene.model, scene.U))  # a scaler has its scale from its first use on
    scaled = EntropyChangeProbe(scene.model, scene.optimizer, grad_scaler=scaler).compare(losses, scene.E)
    assert scaled.differences == expected.differences


@pytest.mark.parametrize("fails", ["", "first", "second", "step"])
def test_nothing_of_the_training_changes_also_if_a_loss_fails(fails: str) -> None:
    scene = Scene()
    scene.model.dropout.p = 0.3
    scene.model.train()
    scene.model.register_buffer("n_forwards", torch.zeros(1))
    before = held(scene)
    critic = nn.Parameter(torch.ones(1))
    critic.grad = torch.full((1,), 3.0)

    def of(name: str) -> Tensor:
        scene.model.n_forwards += 1  # type: ignore[operator]
        torch.rand(1)
        value = loss(scene.model, scene.U) * critic
        if fails == name:
            raise RuntimeError("out of memory, say")
        if fails == "step":
            scene.optimizer.step()
        for p in scene.model.parameters():
            if p.grad is not None:
                p.grad.zero_()
        return value

    losses = {name: functools.partial(of, name) for name in ("first", "second")}
    if fails:
        with pytest.raises((RuntimeError, ValueError), match=r"out of memory, say|must not take a step"):
            scene.probe().compare(losses, scene.E)
    else:
        scene.probe().compare(losses, scene.E)
    assert_untouched(scene, before)
    assert float(critic.grad) == 3.0
    assert float(scene.model.n_forwards) == 0.0  # type: ignore[arg-type]
    assert not scene.optimizer._optimizer_step_pre_hooks  # type: ignore[attr-defined]


def test_a_step_that_is_not_known_is_no_difference() -> None:
    scene = Scene()
    losses = {"a": lambda: loss(scene.model, scene.U), "b": lambda: (loss(scene.model, scene.U) * 0.0 + 1e-300).sqrt()}
    found = scene.probe().compare(losses, scene.E)
    assert found.forecasts["a"].is_valid
    assert (found.differences["b"].difference, found.differences["b"].reason) == (None, "the step is not finite")
    other = scene.probe().compare(losses, scene.E, baseline="b")
    assert other.differences["a"].reason == "the baseline: the step is not finite"
    with torch.no_grad():
        next(scene.model.parameters())[1] = torch.nan
    found = scene.probe().compare(losses, scene.E)
    assert found.differences["b"].reason == "the policy's scores are not finite"


def refused(losses: Callable[[Scene], Any], kind: str = "adamw", **options: Any) -> Callable[[], object]:
    def call() -> object:
        scene = Scene(kind)
        baseline = options.pop("baseline", None)
        before = held(scene)
        try:
            return scene.probe(**options).compare(losses(scene), scene.E, baseline=baseline)
        finally:
            assert_untouched(scene, before)

    return call


def beside(made: Callable[[Scene], Any]) -> Callable[[Scene], Any]:
    """A good loss, and one that is made."""
    return lambda scene: {"good": lambda: loss(scene.model, scene.U), "other": lambda: made(scene)}


def moved(scene: Scene) -> Tensor:
    value = loss(scene.model, scene.U)
    with torch.no_grad():
        scene.model.out.bias.add_(1.0)
    return value


def shared(scene: Scene) -> dict[str, Callable[[], Tensor]]:
    s, _ = STATISTICS(scene.model, scene.U)
    return {"a": lambda: s.square().sum(), "b": lambda: s.exp().sum()}


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (refused(lambda s: [1, 2]), "losses must map names to functions that return a loss, got a list"),
        (refused(lambda s: {1: len, 2: len}), "the name of each loss must be a text, got 1"),
        (refused(lambda s: {"a": 1.0, "b": 2.0}), "the loss 'a' must be a function without arguments, got a float"),
        (refused(lambda s: {"a": loss(s.model, s.U)}), "the loss 'a' must be a function .* got a Tensor: pass lambda"),
        (refused(lambda s: {"a": len}), r"needs at least 2 losses, got 1: use forecast\(\)"),
        (refused(beside(moved), baseline="best"), "baseline must be one of 'good', 'other', got 'best'"),
        (refused(beside(moved)), "the loss 'other' changed parameters, which have their values again"),
        (refused(beside(lambda s: torch.ones(1, requires_grad=True) * 2)), "'other' has no gradient on any of the"),
        (refused(beside(lambda s: 0.0 * loss(s.model, s.U))), "'other' has no gradient on any .* or only zeros"),
        (refused(beside(lambda s: loss(s.model, s.U).detach())), "the loss 'other' has no graph"),
        (refused(beside(lambda s: loss(s.model, s.U).item())), "'other' must be a tensor of one element, got a float"),
        (refused(beside(lambda s: STATISTICS(s.model, s.U)[0])), r"one element, got shape \[48, 6\]: take its mean"),
        (refused(beside(lambda s: loss(s.model, s.U) / 0.0)), "the loss 'other' is (nan|inf|-inf): only finite losses"),
        (refused(shared), "the graph of the loss 'b' was used already"),
        (refused(beside(moved), "rmsprop"), "cannot forecast the step of RMSprop: compare.. needs the forecast"),
        (refused(beside(moved), update="gradient"), "leave update='gradient' out"),
    ],
)
def test_what_cannot_be_compared_is_refused(call: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()
