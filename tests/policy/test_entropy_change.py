"""The forecast of an entropy change beside loops over prompts, real steps, and what is sampled after them."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sonde.policy.entropy_change import EntropyChangeProbe
from sonde.policy.entropy_options import EntropyChangeOptions
from sonde.policy.scoring.rollouts import Rollouts
from sonde.policy.scoring.token_statistics import CausalLMStatistics
from sonde.policy.stats.entropy_forecast import EntropyForecast
from sonde.policy.stats.entropy_gradient import Coefficients, per_token_coefficients, sequence_coefficients
from tests.small_policy import STATISTICS, SmallPolicy, drawn, loss, optimizer_of, policy, real_step, sample

N_E, N_U = 24, 12


class Scene:
    """A policy about to take a step."""

    def __init__(self, kind: str = "adamw", lr: float = 1e-3, dtype: torch.dtype = torch.float32) -> None:
        self.model = policy(dtype=dtype)
        self.optimizer = optimizer_of(self.model, kind, lr)
        self.E = drawn(self.model, 0, N_E, seed=1)
        self.U = drawn(self.model, 200, N_U, seed=2)
        loss(self.model, self.U).backward()

    def probe(self, *, token_statistics: Any = None, sampler: Any = None, **options: Any) -> EntropyChangeProbe:
        return EntropyChangeProbe(
            self.model,
            self.optimizer,
            EntropyChangeOptions(**options),
            token_statistics=token_statistics,
            sampler=sampler,
        )


def coefficients(objective: str, weights: str, scene: Scene) -> Coefficients:
    with torch.no_grad():
        s, h = STATISTICS(scene.model, scene.E)
    responses = scene.E.responses()
    if objective == "per_token":
        return per_token_coefficients(h, responses)
    w = responses.mask.double() / (responses.length[:, None] if weights == "length" else 1.0)
    return sequence_coefficients(s, responses, weights=w, is_causal=weights == "one")


def gradient_per_prompt(scene: Scene, rollouts: Rollouts, c: Coefficients) -> Tensor:
    """By a backward for every prompt; [prompts, parameters], fp64."""
    model = copy.deepcopy(scene.model).double()
    found = []
    for prompt in rollouts.prompt.unique():
        own = (rollouts.prompt == prompt).nonzero()[:, 0]
        s, h = STATISTICS(model, rollouts.rows(own))
        total = (c.on_log_prob[own] * s + c.on_entropy[own] * h).sum()
        grads = torch.autograd.grad(total, list(model.parameters()))
        found.append(torch.cat([g.flatten() for g in grads]))
    return torch.stack(found)


def of_update(scene: Scene) -> Coefficients:
    credit = scene.U.credit() * scene.U.responses().share[:, None]
    return Coefficients(torch.zeros_like(credit), credit)


@pytest.mark.parametrize("derivatives", ["forward", "central"])
@pytest.mark.parametrize("kind", ["adamw", "sgd", "momentum"])
@pytest.mark.parametrize(("objective", "weights"), [("per_token", "one"), ("sequence", "one"), ("sequence", "length")])
def test_each_prompts_share_is_its_gradient_along_the_real_step(
    kind: str, objective: str, weights: str, derivatives: str
) -> None:
    scene = Scene(kind)
    x = gradient_per_prompt(scene, scene.E, coefficients(objective, weights, scene))
    step = torch.cat([d.flatten() for d in real_step(scene.model, scene.optimizer).values()]).double()
    expected = x @ step
    probe = scene.probe(objective=objective, sequence_weights=weights, derivatives=derivatives)
    found = probe.forecast(scene.E)
    assert found.derivatives == derivatives
    by_prompt = torch.tensor([s.change for s in sorted(found.shares, key=lambda s: s.prompt)]) * N_E
    # Central differences of fp32 scores keep 2 to 3 digits; the real step is rounded to the parameters' fp32.
    off = 6e-3 if derivatives == "central" else 5e-4
    assert float((by_prompt - expected).norm() / expected.norm()) < off
    assert found.delta == pytest.approx(float(expected.mean()), abs=off * float(expected.std()))
    assert found.bars_dot == found.delta
    assert (found.n_evaluation, found.n_update, found.v_y) == (N_E, 0, 0.0)
    assert found.se == pytest.approx(math.sqrt(found.v_x))
    assert found.low < found.delta < found.high
    if objective == "per_token":
        assert all(s.change == pytest.approx(s.sharpening + s.drift) for s in found.shares)


def test_the_standard_error_is_the_scatter_of_the_prompts() -> None:
    scene = Scene()
    x = gradient_per_prompt(scene, scene.E, coefficients("sequence", "one", scene))
    step = torch.cat([d.flatten() for d in real_step(scene.model, scene.optimizer).values()]).double()
    found = scene.probe(objective="sequence").forecast(scene.E)
    assert found.se == pytest.approx(float((x @ step).std()) / N_E**0.5, rel=1e-3)


def test_truth_is_what_a_real_step_does() -> None:
    scene = Scene(lr=5e-4)
    with torch.no_grad():
        _, before = STATISTICS(scene.model, scene.E)
    found = scene.probe().forecast(scene.E)
    scene.optimizer.step()
    with torch.no_grad():
        _, after = STATISTICS(scene.model, scene.E)
    mask = scene.E.mask
    true = float((after - before)[mask].double().sum() / mask.sum())
    assert found.fixed_prefixes is not None
    assert found.importance is not None
    assert found.fixed_prefixes.true == pytest.approx(true, rel=1e-3)  # the last bits of the step are rounded otherwise
    assert found.fixed_prefixes.linear_over_true == pytest.approx(1.0, abs=0.1)
    assert found.is_valid, found.reason
    # Both scatter with the responses, each in its own way.
    assert abs(found.delta - found.importance.delta) < 2 * found.se
    assert 0.9 < found.importance.ess_fraction <= 1.0
    assert "nats a token" in str(found)


@pytest.mark.parametrize("objective", ["per_token", "sequence"])
def test_fresh_rollouts_agree_within_their_errors(objective: str) -> None:
    scene = Scene(lr=2e-3)
    E = drawn(scene.model, 0, 150, seed=3, n_each=8)
    probe = scene.probe(
        objective=objective, micro_batch_prompts=50, sampler=lambda m: sample(m, list(range(150)), n_each=16)
    )
    found = probe.measure(E)
    assert found.rollouts is not None
    assert found.rollouts.se > 0
    error = math.hypot(found.se, found.rollouts.se)
    # Real: three errors of the two together, and what is not linear in the step.
    assert abs(found.delta - found.rollouts.delta) < 3 * error + 0.1 * abs(found.rollouts.delta)
    assert found.rollouts.se < 10 * abs(found.rollouts.delta)


def test_a_large_step_is_not_to_be_trusted() -> None:
    found = Scene(lr=0.3).probe().forecast(drawn(policy(), 0, N_E, seed=1))
    assert not found.is_valid
    assert "not to be trusted: the step is too large to be linear" in found.reason
    assert math.isfinite(found.delta)
    assert math.isfinite(found.se)


@pytest.mark.parametrize("kind", ["adamw", "momentum", "rmsprop"])
def test_around_a_real_step(kind: str) -> None:
    scene = Scene(kind)
    expected = None if kind == "rmsprop" else scene.probe().forecast(scene.E)
    before = [p.detach().clone() for p in scene.model.parameters()]
    step = real_step(scene.model, scene.optimizer)
    probe = scene.probe(sampler=lambda m: sample(m, list(range(20))))
    with probe.around_step(scene.E) as around:
        with pytest.raises(RuntimeError, match="known after the with block"):
            _ = around.forecast
        scene.optimizer.step()
    for p, old, delta in zip(scene.model.parameters(), before, step.values(), strict=True):
        assert torch.allclose(p.detach() - old, delta, atol=1e-7)
    found = around.forecast
    assert found.is_valid, found.reason
    assert found.rollouts is not None
    assert found.fixed_prefixes is not None
    assert abs(found.fixed_prefixes.true - found.fixed_prefixes.linear) < 0.5 * found.se
    if expected is not None:
        assert found.delta == pytest.approx(expected.delta, rel=1e-6)
        assert found.importance is not None
        assert expected.importance is not None
        assert found.importance.delta == pytest.approx(expected.importance.delta, rel=1e-2)


def test_a_gradient_changed_inside_the_block_is_noticed() -> None:
    scene = Scene("sgd")
    with scene.probe().around_step(scene.E) as around:
        torch.nn.utils.clip_grad_norm_(scene.model.parameters(), 1e-3)
        scene.optimizer.step()
    assert not around.forecast.is_valid
    assert "differs from the forecast by" in around.forecast.reason


def test_a_scale_that_is_still_to_come() -> None:
    scene = Scene("sgd")
    whole = scene.probe().forecast(scene.E)
    half = scene.probe().forecast(scene.E, gradient_scale=0.5)
    assert half.delta == pytest.approx(0.5 * whole.delta, rel=1e-3)


# Along the mean gradient of update prompts.


@pytest.mark.parametrize(("objective", "weights"), [("per_token", "one"), ("sequence", "one")])
@pytest.mark.parametrize("kind", ["adamw", "sgd"])
def test_gradients_of_both_batches_beside_a_vector_for_every_prompt(kind: str, objective: str, weights: str) -> None:
    scene = Scene(kind)
    x = gradient_per_prompt(scene, scene.E, coefficients(objective, weights, scene))
    y = gradient_per_prompt(scene, scene.U, of_update(scene))
    if kind == "adamw":
        state = [scene.optimizer.state[p] for p in scene.model.parameters()]
        v = torch.cat([s["exp_avg_sq"].flatten().double() / (1 - 0.999 ** float(s["step"])) for s in state])
        y = y / (v.sqrt() + 1e-8)
    eta = 1e-3
    along_y, halves = x @ y.mean(0), [x[0::2].mean(0), x[1::2].mean(0)]
    v_x = float(along_y.var()) / N_E
    a, b = (y @ half for half in halves)
    v_y = float(((a - a.mean()) * (b - b.mean())).sum()) / (N_U * (N_U - 1))
    probe = scene.probe(update="gradient", objective=objective)
    found = probe.forecast(scene.E, scene.U)
    assert found.bars_dot == pytest.approx(float(along_y.mean()), rel=2e-3)
    assert found.delta == pytest.approx(eta * found.bars_dot)
    assert found.v_x == pytest.approx(eta**2 * v_x, rel=5e-3)
    assert found.v_y == pytest.approx(eta**2 * v_y, rel=5e-3)
    assert found.se == pytest.approx(math.sqrt(found.v_x + found.v_y))
    assert (found.n_evaluation, found.n_update) == (N_E, N_U)
    assert found.causes is not None
    parts = torch.tensor([c.change for c in sorted(found.causes.prompts, key=lambda c: c.prompt)])
    expected = eta / N_U * (y @ x.mean(0))
    assert float((parts - expected).norm() / expected.norm()) < 5e-3
    assert found.causes.explained == pytest.approx(1.0, rel=1e-2)
    for cause in found.causes.prompts:
        assert cause.change == pytest.approx(cause.from_rewarded + cause.from_penalised)


@pytest.mark.parametrize(
    ("options", "rel"),
    [
        ({"offload": True}, 1e-6),
        ({"micro_batch_prompts": 5}, 1e-4),
        ({"buffer_dtype": torch.float64}, 1e-4),
        ({"buffer_dtype": torch.bfloat16}, 0.1),  # 8 bits
        ({"buffer_dtype": torch.float16}, 0.02),  # 11 bits, where nothing is too small for them
    ],
)
def test_options_of_the_sums_change_no_more_than_rounding(options: dict[str, Any], rel: float) -> None:
    scene = Scene("sgd")
    plain = scene.probe(update="gradient", derivatives="forward").forecast(scene.E, scene.U)
    found = scene.probe(update="gradient", derivatives="forward", **options).forecast(scene.E, scene.U)
    assert found.delta == pytest.approx(plain.delta, rel=rel)
    assert found.se == pytest.approx(plain.se, rel=rel)


# Causes of the optimizer's own step.


@pytest.mark.parametrize("kind", ["adamw", "momentum", "sgd"])
@pytest.mark.parametrize("scale", [1.0, 0.25])
def test_momentum_batch_and_prompts(kind: str, scale: float) -> None:
    scene = Scene(kind)
    found = scene.probe().forecast(scene.E, scene.U, gradient_scale=scale, causes=True)
    causes = found.causes
    assert causes is not None
    assert causes.momentum + causes.batch + causes.decay == pytest.approx(found.delta, rel=1e-6)
    assert (causes.momentum == 0.0) == (kind == "sgd")
    assert (causes.decay == 0.0) == (kind != "adamw")
    assert len(causes.prompts) == N_U
    assert causes.explained == pytest.approx(1.0, rel=2e-2)
    # Without one prompt's part of the gradient, the batch's part of the step changes by what that prompt is said to do.
    worst = causes.prompts[0]
    left = scene.U.prompt == worst.prompt
    others = scene.U.rows((~left).nonzero()[:, 0])
    for p in scene.model.parameters():
        p.grad = None
    (loss(scene.model, others) * len(others) / len(scene.U)).backward()
    if kind != "adamw":  # whose second moment would change too
        without = scene.probe().forecast(scene.E, others, gradient_scale=scale, causes=True)
        assert found.delta - without.delta == pytest.approx(worst.change, rel=2e-2)


def test_causes_without_rollouts_of_the_update_are_momentum_and_batch() -> None:
    causes = Scene().probe().forecast(drawn(policy(), 0, 8, seed=1), causes=True).causes
    assert causes is not None
    assert causes.prompts == ()
    assert causes.explained is None


# What must not happen.


def held(scene: Scene) -> list[Any]:
    """All of the training's state, copied."""
    state = copy.deepcopy(scene.optimizer.state_dict())
    tensors = [p.detach().clone() for p in scene.model.parameters()]
    grads = [p.grad for p in scene.model.parameters()]
    copies = [None if g is None else g.clone() for g in grads]
    modes = [m.training for m in scene.model.modules()]
    return [tensors, grads, copies, state, modes, torch.get_rng_state()]


def assert_untouched(scene: Scene, before: list[Any]) -> None:
    tensors, grads, copies, state, modes, rng = before
    for p, old, grad, copied in zip(scene.model.parameters(), tensors, grads, copies, strict=True):
        assert torch.equal(p, old)
        assert p.grad is grad
        assert grad is None or torch.equal(grad, copied)
    now = scene.optimizer.state_dict()
    assert now["param_groups"] == state["param_groups"]
    for key, values in state["state"].items():
        for name, value in values.items():
            assert torch.equal(torch.as_tensor(now["state"][key][name]), torch.as_tensor(value))
    assert [m.training for m in scene.model.modules()] == modes
    assert torch.equal(torch.get_rng_state(), rng)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in scene.model.modules())
    assert not any(p._post_accumulate_grad_hooks for p in scene.model.parameters())  # type: ignore[attr-defined]


@pytest.mark.parametrize("update", ["step", "gradient"])
@pytest.mark.parametrize("derivatives", ["forward", "central"])
def test_nothing_of_the_training_changes(update: str, derivatives: str) -> None:
    scene = Scene()
    scene.model.train()
    before = held(scene)
    probe = scene.probe(update=update, derivatives=derivatives, sampler=lambda m: sample(m, list(range(6))))
    probe.measure(scene.E, scene.U, causes=update == "step")
    assert_untouched(scene, before)


class Failing:
    """Token statistics that raise at the k-th call."""

    def __init__(self, k: int) -> None:
        self.left = k

    def __call__(self, model: nn.Module, rollouts: Rollouts, /) -> tuple[Tensor, Tensor]:
        self.left -= 1
        if self.left < 0:
            raise RuntimeError("out of memory, say")
        return STATISTICS(model, rollouts)


@pytest.mark.parametrize("update", ["step", "gradient"])
@pytest.mark.parametrize("derivatives", ["forward", "central"])
def test_nothing_changes_wherever_it_fails(update: str, derivatives: str) -> None:
    """At every single call of the model, through all phases, and inside the sampler."""
    scene = Scene()
    options: dict[str, Any] = {"update": update, "derivatives": derivatives, "micro_batch_prompts": 12}
    before = held(scene)
    n_failures = 0
    while True:
        probe = scene.probe(
            token_statistics=Failing(n_failures), sampler=lambda m: sample(m, list(range(6))), **options
        )
        error: BaseException | None = None
        try:
            probe.measure(scene.E, scene.U, causes=update == "step")
        except RuntimeError as raised:
            error = raised
        assert_untouched(scene, before)
        if error is None:
            break
        assert "out of memory, say" in str(error)
        n_failures += 1
    assert n_failures >= 12

    def failing_sampler(model: nn.Module) -> Rollouts:
        raise RuntimeError("no sample")

    with pytest.raises(RuntimeError, match="no sample"):
        scene.probe(sampler=failing_sampler, **options).measure(scene.E, scene.U)
    assert_untouched(scene, before)


@pytest.mark.parametrize("kind", ["adamw", "rmsprop"])
def test_around_a_step_all_is_as_before_or_as_after_it_wherever_it_fails(kind: str) -> None:
    """At every single call of the model, before the step and after it; forecast, and measured."""
    n_failures = n_after = 0
    while True:
        scene, twin = Scene(kind), Scene(kind)
        before = held(scene)
        twin.optimizer.step()
        after = held(twin)
        after[1], after[5] = before[1], before[5]
        probe = scene.probe(
            token_statistics=Failing(n_failures), sampler=lambda m: sample(m, list(range(6))), micro_batch_prompts=12
        )
        is_taken = has_failed = False
        try:
            with probe.around_step(scene.E, scene.U, causes=kind == "adamw"):
                scene.optimizer.step()
                is_taken = True
        except RuntimeError:
            has_failed = True
        assert_untouched(scene, after if is_taken else before)
        if not has_failed:
            break
        n_failures += 1
        n_after += is_taken
    assert n_failures > n_after >= 3


@pytest.mark.parametrize("leaves_training", [False, True])
def test_a_sampler_may_leave_the_model_in_training_mode(leaves_training: bool) -> None:
    def sampler(model: nn.Module) -> Rollouts:
        sampled = sample(model, list(range(6)))
        model.train(leaves_training)
        return sampled

    plain, scene = Scene(), Scene()
    scene.model.dropout.p = 0.3
    expected = plain.probe().forecast(plain.E)
    found = scene.probe(sampler=sampler).measure(scene.E)
    assert (found.delta, found.fixed_prefixes) == (expected.delta, expected.fixed_prefixes)


def test_training_goes_on_bit_for_bit() -> None:
    weights = []
    for is_watched in (False, True):
        scene = Scene()
        probe = scene.probe()
        for k in range(5):
            U = sample(scene.model, list(range(300 + 10 * k, 310 + 10 * k)))
            scene.optimizer.zero_grad()
            loss(scene.model, U).backward()
            if is_watched:
                with probe.around_step(scene.E):
                    scene.optimizer.step()
            else:
                scene.optimizer.step()
        weights.append([p.detach().clone() for p in scene.model.parameters()])
        torch.manual_seed(0)
    assert all(torch.equal(a, b) for a, b in zip(*weights, strict=True))


# Models that are random, and input that does not serve.


def test_dropout_is_off_meanwhile() -> None:
    scene = Scene()
    expected = scene.probe().forecast(scene.E)
    scene.model.dropout.p = 0.5
    scene.model.train()
    assert scene.probe().forecast(scene.E).delta == expected.delta
    assert scene.model.dropout.training


def test_what_is_random_all_the_same_is_refused() -> None:
    class Noisy(SmallPolicy):
        def forward(self, input_ids: Tensor) -> Tensor:
            logits = super().forward(input_ids)
            return logits + torch.randn_like(logits)

    model = Noisy()
    optimizer = optimizer_of(model)
    loss(model, drawn(model, 0, 4, seed=0)).backward()
    with pytest.raises(ValueError, match=r"two forwards of the same responses are .* nats apart"):
        EntropyChangeProbe(model, optimizer).forecast(drawn(model, 0, 4, seed=1))


@pytest.mark.parametrize("update", ["step", "gradient"])
def test_one_prompt_is_too_few(update: str) -> None:
    scene = Scene()
    found = scene.probe(update=update).forecast(drawn(scene.model, 0, 1, seed=1), scene.U)
    assert (found.delta, found.se, found.low, found.high) == (None,) * 4
    assert "at least 2" in found.reason
    assert not found.is_valid
    assert "entropy change unknown" in str(found)


def test_gradients_that_are_not_finite() -> None:
    scene = Scene()
    next(scene.model.parameters()).grad[0, 0] = torch.inf  # type: ignore[index]
    found = scene.probe().forecast(scene.E)
    assert (found.delta, found.reason, found.is_valid) == (None, "the step is not finite", False)


def test_a_forecast_says_that_it_is_lost_in_rounding() -> None:
    scene = Scene()

    def rounded(model: nn.Module, rollouts: Rollouts, /) -> tuple[Tensor, Tensor]:
        """As bf16 would have it."""
        s, h = STATISTICS(model, rollouts)
        return (s * 64).round() / 64, (h * 64).round() / 64

    found = scene.probe(derivatives="central", token_statistics=rounded).forecast(scene.E)
    assert "lost in rounding" in found.reason
    assert not found.is_valid
    assert scene.probe(derivatives="central").forecast(scene.E).is_valid


def test_scores_that_are_not_finite_before_or_after_the_step() -> None:
    scene = Scene()
    with torch.no_grad():
        next(scene.model.parameters())[1] = torch.nan
    found = scene.probe().forecast(scene.E)
    assert (found.delta, found.reason) == (None, "the policy's scores are not finite")
    scene = Scene()
    with scene.probe().around_step(scene.E) as around, torch.no_grad():
        next(scene.model.parameters())[1] = torch.nan
    assert around.forecast.reason == "the policy's scores are not finite after the step"
    assert not around.forecast.is_valid
    assert math.isfinite(around.forecast.delta)
    assert around.forecast.importance is None


def test_evaluation_and_update_that_share_prompts() -> None:
    scene = Scene()
    with pytest.warns(UserWarning, match=r"share 24 prompts, \[0, 1, 2\] among them"):
        scene.probe().forecast(scene.E, scene.E)
    with pytest.raises(ValueError, match="share 24 prompts"):
        scene.probe(strict=True).forecast(scene.E, scene.E)


def rollouts(**changes: Any) -> Rollouts:
    of = drawn(policy(), 0, 4, seed=1)
    fields = {"inputs": of.inputs, "mask": of.mask, "prompt": of.prompt, "advantage": of.advantage} | changes
    return Rollouts(**fields)


@pytest.mark.parametrize(
    ("changes", "said"),
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
def test_responses_that_make_no_sense(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        rollouts(**changes)


def forecast(E: dict[str, Any] | None = None, U: dict[str, Any] | None = None, **options: Any) -> EntropyForecast:
    scene = Scene()
    update = None if U is None else rollouts(**({"prompt": torch.arange(4).repeat_interleave(4) + 50} | U))
    return scene.probe(**options).forecast(rollouts(**(E or {})), update)


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: forecast({"is_truncated": True}), "sampled with top_p < 1 or the like"),
        (
            lambda: forecast({"temperature": 0.7}),
            r"sampled at temperature 0.7, and are scored at 1.0: .*temperature=0.7",
        ),
        (lambda: forecast(U={"temperature": 0.7}), "update responses were sampled at temperature 0.7"),
        (lambda: forecast(U={"advantage": None}), "update responses need their advantages"),
        (lambda: forecast(update="gradient"), "pass their rollouts"),
        (lambda: forecast(token_statistics=lambda m, r: (torch.zeros(2), torch.zeros(2))), "token statistics must be"),
        (lambda: forecast(objective="tokens"), "objective must be one of per_token, sequence, got 'tokens'"),
        (lambda: forecast(micro_batch_prompts=0), "micro_batch_prompts must be a whole number from 1 up, got 0"),
        (lambda: forecast(level=95), "level must be between 0 and 1, got 95"),
        (lambda: forecast(buffer_dtype=torch.int32), "buffer_dtype must be one of"),
        (lambda: forecast(step_size=0.0), "step_size must be positive"),
        (lambda: forecast(checkpoint=True), "checkpoint=True needs a model of transformers"),
    ],
)
def test_bad_input(call: Callable[[], EntropyForecast], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        call()


def test_calls_out_of_order() -> None:
    scene = Scene()
    with (
        pytest.raises(ValueError, match="around_step\\(\\) measures the optimizer's own step"),
        scene.probe(update="gradient").around_step(scene.E),
    ):
        pass
    with pytest.raises(RuntimeError, match="needs a sampler"):
        scene.probe().measure(scene.E)
    scene.optimizer.zero_grad()
    with pytest.raises(RuntimeError, match="no parameter has a gradient: call this after the backward"):
        scene.probe().forecast(scene.E)


def test_an_optimizer_without_state_or_foresight() -> None:
    scene = Scene("rmsprop")
    with pytest.raises(ValueError, match=r"step of RMSprop is not known before it is taken.*around_step"):
        scene.probe().forecast(scene.E)
    fresh = torch.optim.AdamW(scene.model.parameters(), lr=1e-3)
    with pytest.raises(ValueError, match="no second moment"):
        EntropyChangeProbe(scene.model, fresh, EntropyChangeOptions(update="gradient")).forecast(scene.E, scene.U)
    # Its first step is known nevertheless.
    assert math.isfinite(EntropyChangeProbe(scene.model, fresh).forecast(scene.E).delta)


def test_temperature_is_that_of_the_sampler() -> None:
    model = policy()
    E = drawn(model, 0, 4, seed=1)
    s, h = CausalLMStatistics(temperature=2.0)(model, E)
    logits = model(E.inputs["input_ids"])[:, 1:-1] / 2.0
    log_p = logits.log_softmax(-1)
    assert torch.allclose(h, -(log_p.exp() * log_p).sum(-1), atol=1e-6)
    assert torch.allclose(s, log_p.gather(-1, E.inputs["input_ids"][:, 2:, None])[..., 0], atol=1e-6)


def test_an_optimizer_that_holds_others_too() -> None:
    scene = Scene("sgd")
    alone = scene.probe().forecast(scene.E, scene.U, causes=True)
    critic = nn.Linear(3, 1)
    critic(torch.ones(1, 3)).sum().backward()
    both = torch.optim.SGD([*scene.model.parameters(), *critic.parameters()], lr=1e-3)
    found = EntropyChangeProbe(scene.model, both).forecast(scene.E, scene.U, causes=True)
    assert found.delta == alone.delta
    assert found.causes is not None
    assert found.causes.explained == pytest.approx(1.0, rel=2e-2)


def test_options_as_single_keywords_still_work_for_one_release() -> None:
    scene = Scene()
    with pytest.warns(DeprecationWarning, match=r"write EntropyChangeProbe\(.*, EntropyChangeOptions\(level=0.5\)\)"):
        old = EntropyChangeProbe(scene.model, scene.optimizer, level=0.5)
    assert old.forecast(scene.E).low == scene.probe(level=0.5).forecast(scene.E).low
    with pytest.raises(TypeError, match=r"has no keyword 'objectiv': did you mean 'objective'\?"):
        EntropyChangeProbe(scene.model, scene.optimizer, objectiv="sequence")
    with (
        pytest.warns(DeprecationWarning, match="deprecated"),
        pytest.raises(ValueError, match="level must be between 0 and 1, got 95"),
    ):
        EntropyChangeProbe(scene.model, scene.optimizer, level=95)
