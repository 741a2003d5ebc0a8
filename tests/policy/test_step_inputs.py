"""What the step inside `around_step` begins with: if it is not what was there on entry, some numbers are not known."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from sonde.gradient_norm.clip import clip_grad_norm_
from tests.policy.entropy_scene import Scene
from tests.policy.step_blocks import (
    BF16,
    CHANGED,
    CLIPPED,
    FP32,
    around,
    assert_alike,
    assert_unknown,
    clipped,
    gradients,
    hold_of,
    scale_gradients,
    scene_of,
    step,
)
from tests.small_policy import loss


@pytest.mark.parametrize("kind", ["sgd", "adamw"])
@pytest.mark.parametrize("first_order", [False, True])
@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_gradients_that_are_clipped_inside_the_block_have_no_coefficient(
    kind: str, first_order: bool, dtype: torch.dtype
) -> None:
    """The bonus of later steps is clipped too, and only `applied_scale=` tells by how much."""
    forecast = around(scene_of(kind, dtype), clipped(0.6), first_order=first_order)
    assert_unknown(forecast.coefficient_to_hold, CLIPPED)
    assert (forecast.first_order is not None) == first_order


def test_a_small_clip_in_the_block_is_seen_in_16_bits() -> None:
    """The step itself would be a little off only, as rounding leaves it."""
    assert_unknown(hold_of(scene_of("sgd", BF16), clipped(0.95)), CLIPPED)


def test_gradients_that_16_bits_hold_coarsely_are_the_same_after_a_factor() -> None:
    """Those of fp16 are multiples of 6e-8 at its lower end."""

    def scaled(scene: Scene) -> None:
        scale_gradients(scene, 0.6)
        scene.optimizer.step()

    scene = scene_of("sgd", torch.float16)
    scene.model.out.weight.grad.mul_(1e-5)
    assert hold_of(scene, scaled, gradient_scale=0.6).change_per_unit is not None


def test_tiny_gradients_are_compared_too() -> None:
    scene = scene_of("adamw", BF16)
    scale_gradients(scene, 1e-6)
    assert_unknown(hold_of(scene, clipped(0.6)), CLIPPED)


def test_an_optimizer_of_accelerate_is_watched() -> None:
    accelerate = pytest.importorskip("accelerate", reason="needs accelerate")
    scene = scene_of("adamw", BF16)
    try:
        wrapped = accelerate.Accelerator(cpu=True).prepare_optimizer(scene.optimizer)
        assert_unknown(hold_of(scene, clipped(0.6), wrapped), CLIPPED)
    finally:
        accelerate.state.GradientState._reset_state()
        accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)


@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_a_factor_that_was_named_is_allowed_for_and_must_be_applied(dtype: torch.dtype) -> None:
    def scaled(scene: Scene) -> None:
        scale_gradients(scene, 0.6)
        scene.optimizer.step()

    before = scene_of("adamw", dtype)
    scale_gradients(before, 0.6)
    expected = hold_of(before, step, applied_scale=0.6)
    assert_alike(hold_of(scene_of("adamw", dtype), scaled, gradient_scale=0.6), expected, rel=0.05)
    assert_unknown(hold_of(scene_of("adamw", dtype), step, gradient_scale=0.6), CLIPPED)


@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize("inside", [False, True])
def test_a_clip_that_is_folded_into_the_optimizer_counts(dtype: torch.dtype, inside: bool) -> None:
    def fold(scene: Scene) -> None:
        norm = float(torch.nn.utils.get_total_norm(gradients(scene)))
        clip_grad_norm_(scene.model.parameters(), 0.3 * norm, fold_into=scene.optimizer)

    def fold_and_step(scene: Scene) -> None:
        fold(scene)
        scene.optimizer.step()

    scene = scene_of("adamw", dtype, fused=True)
    if inside:
        assert_unknown(hold_of(scene, fold_and_step), CLIPPED)
        return
    ordinary = scene_of("adamw", dtype, fused=True)
    scale_gradients(ordinary, 0.3)
    options = {"coefficient_to_hold": True}
    fold(scene)
    expected, found = ordinary.probe(**options).forecast(ordinary.E, applied_scale=0.3), scene.probe(**options)
    forecast = found.forecast(scene.E)
    assert forecast.delta == pytest.approx(expected.delta, rel=5e-3)
    assert_alike(forecast.coefficient_to_hold, expected.coefficient_to_hold)
    assert_alike(hold_of(scene, step), expected.coefficient_to_hold, rel=0.02)


@pytest.mark.parametrize("again", [False, True])
def test_a_clip_that_was_folded_into_an_earlier_step_does_not_count(again: bool) -> None:
    """The step drops it, since gradients were made anew."""

    def remade(scene: Scene) -> Scene:
        scene.optimizer.zero_grad()
        loss(scene.model, scene.U).backward()
        return scene

    scene = scene_of("adamw", fused=True)
    clip_grad_norm_(scene.model.parameters(), 1e-3, fold_into=scene.optimizer)
    found, expected = (remade(of) if again else of for of in (scene, scene_of("adamw", fused=True)))
    forecasts = [of.probe().forecast(of.E) for of in (found, expected)]
    is_same = forecasts[0].delta == pytest.approx(forecasts[1].delta, rel=1e-9)
    assert is_same == again


@pytest.mark.parametrize("is_unscaled", [False, True])
@pytest.mark.parametrize("kind", ["sgd", "adamw", "fused"])
def test_the_scale_of_a_loss_is_no_change(kind: str, is_unscaled: bool) -> None:
    scale = 1024.0
    scaler = torch.amp.GradScaler("cpu", init_scale=scale)
    plain, scene = (scene_of(kind.replace("fused", "adamw"), fused=kind == "fused") for _ in range(2))
    scale_gradients(scene, float(scaler.scale(torch.ones(()))))
    if is_unscaled:
        scaler.unscale_(scene.optimizer)
    found = hold_of(scene, lambda scene: scaler.step(scene.optimizer), grad_scaler=scaler)
    assert_alike(found, hold_of(plain, step))


@pytest.mark.parametrize("kind", ["sgd", "adamw"])
def test_a_closure_that_clips_is_not_seen_and_so_not_trusted(kind: str) -> None:
    """In 32 bits the step itself shows it, and a closure that changes nothing is fine."""

    def in_closure(factor: float) -> Callable[[Scene], None]:
        def block(scene: Scene) -> None:
            scene.optimizer.step(lambda: scale_gradients(scene, factor))

        return block

    assert_unknown(hold_of(scene_of(kind, BF16), in_closure(0.6)), "the gradients of the step were not seen")
    if kind == "sgd":
        assert_unknown(hold_of(scene_of(kind), in_closure(0.6)), "the step that was taken is 40% off the one forecast")
    assert_alike(hold_of(scene_of(kind), in_closure(1.0)), hold_of(scene_of(kind), step))


def test_a_learning_rate_that_is_changed_before_the_step() -> None:
    def faster(scene: Scene) -> None:
        scene.optimizer.param_groups[0]["lr"] *= 1.3
        scene.optimizer.step()

    def scheduled(scene: Scene) -> None:
        scheduler = torch.optim.lr_scheduler.StepLR(scene.optimizer, 1, gamma=0.5)
        scene.optimizer.step()
        scheduler.step()

    for dtype in (FP32, BF16):
        assert_unknown(hold_of(scene_of("sgd", dtype), faster), CHANGED)
        assert_alike(hold_of(scene_of("sgd", dtype), scheduled), hold_of(scene_of("sgd", dtype), step))


def test_a_learning_rate_in_a_tensor_is_changed_in_place() -> None:
    def faster(scene: Scene) -> None:
        scene.optimizer.param_groups[0]["lr"].mul_(1.3)
        scene.optimizer.step()

    for block, is_known in ((step, True), (faster, False)):
        scene = scene_of("sgd", BF16)
        scene.optimizer.param_groups[0].update(lr=torch.tensor(0.1), foreach=False)
        hold = hold_of(scene, block)
        assert (hold.change_per_unit is not None) == is_known
        assert is_known or CHANGED in hold.reason


def test_what_the_step_does_not_depend_on_may_change() -> None:
    """Entries of the user's own in a parameter group, and the learning rate of another model in the optimizer."""

    def block(scene: Scene) -> None:
        scene.optimizer.param_groups[0]["n_seen"] += 1
        scene.optimizer.param_groups[1]["lr"] *= 2.0
        scene.optimizer.step()

    scene = scene_of("sgd", BF16)
    scene.optimizer.param_groups[0].update(n_seen=0, mask=torch.ones(5))
    scene.optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(3))]})
    assert_alike(hold_of(scene, block), hold_of(scene_of("sgd", BF16), step))


@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_gradients_that_are_repaired_in_the_block_have_no_coefficient(dtype: torch.dtype) -> None:
    def repaired(scene: Scene) -> None:
        for gradient in gradients(scene):
            gradient.nan_to_num_()
        scene.optimizer.step()

    for kind in ("sgd", "adamw"):
        scene = scene_of(kind, dtype)
        scene.model.out.weight.grad[0, 0] = torch.nan
        forecast = around(scene, repaired, first_order=True)
        assert forecast.delta is not None
        assert forecast.first_order is None
        assert forecast.rounded_away == (0.0 if dtype is FP32 else None)
        assert_unknown(forecast.coefficient_to_hold, "the step that the optimizer would take on entry is not finite")


def test_a_change_of_small_gradients_is_seen_beside_large_ones() -> None:
    """Adam steps as far by either."""

    def scale_others(scene: Scene, factor: float) -> None:
        for name, p in scene.model.named_parameters():
            if "out" not in name:
                p.grad.mul_(factor)

    def block(scene: Scene) -> None:
        scale_others(scene, 0.2)
        scene.optimizer.step()

    scene = scene_of("adamw", BF16)
    scale_others(scene, 1e-3)
    assert_unknown(hold_of(scene, block), CLIPPED)


def test_two_steps_in_one_block() -> None:
    def twice(scene: Scene) -> None:
        scene.optimizer.step()
        scene.optimizer.step()

    for dtype in (FP32, BF16):
        assert_unknown(hold_of(scene_of("sgd", dtype), twice), "took several steps: take one in each block")


def test_a_gradient_that_is_gone_before_the_step() -> None:
    def without_one(scene: Scene) -> None:
        scene.model.out.weight.grad = None
        scene.optimizer.step()

    assert_unknown(hold_of(scene_of("sgd", BF16), without_one), "the gradients of the step were not seen")
    assert_unknown(hold_of(scene_of("sgd"), without_one), "off the one forecast on entry: in the block, change nothing")


def test_a_block_without_a_step_that_moves_parameters() -> None:
    def by_hand(scene: Scene) -> None:
        with torch.no_grad():
            scene.model.out.weight.add_(0.1)

    scene = scene_of("sgd")
    scale_gradients(scene, 0.0)
    assert_unknown(hold_of(scene, by_hand), "the step that was taken is far off the one forecast on entry")


@pytest.mark.parametrize("clears", [None, False, True])
def test_a_step_of_a_tiny_learning_rate_has_its_coefficient(clears: bool | None) -> None:
    """32 bits round it by several per cent, since AdamW rounds after weight decay too."""
    scene = Scene("adamw", lr=1e-7)

    def block(scene: Scene) -> None:
        scene.optimizer.step()
        if clears is not None:
            scene.optimizer.zero_grad(set_to_none=clears)

    assert_alike(hold_of(scene, block), hold_of(Scene("adamw", lr=1e-7), step))


def test_steps_that_write_to_gradients_have_their_coefficient() -> None:
    """torch's SGD adds Nesterov's momentum to them, with foreach."""
    scene = scene_of("momentum")
    scene.optimizer.param_groups[0].update(nesterov=True, foreach=True)
    before = scene.model.out.weight.grad.clone()
    hold = hold_of(scene, step)
    assert not torch.equal(scene.model.out.weight.grad, before)
    assert hold.change_per_unit is not None, hold


@pytest.mark.parametrize(("factor", "is_known"), [(1.0, True), (0.75, False), (0.3, False)])
def test_what_16_bits_round_away_is_unknown_after_a_clip_in_the_block(factor: float, is_known: bool) -> None:
    """Also without a coefficient. A step of another size would count as rounded."""
    scene = Scene("sgd", lr=1.0, dtype=BF16)
    probe = scene.probe()
    with probe.around_step(scene.E) as found:
        (step if is_known else clipped(factor))(scene)
    assert (found.forecast.rounded_away is not None) == is_known


def test_sparse_gradients_are_measured_without_a_coefficient() -> None:
    scene = Scene("sgd", lr=0.1)
    scene.model.token.sparse = True
    scene.optimizer.zero_grad()
    loss(scene.model, scene.U).backward()
    assert scene.model.token.weight.grad.is_sparse
    forecast = around(scene, step, first_order=True)
    assert forecast.first_order is not None
    assert forecast.delta is not None
    reason = "the optimizer's answer to a bonus is not known for a sparse gradient: build the layer with sparse=False"
    assert_unknown(forecast.coefficient_to_hold, reason)


def test_momentum_that_only_grows_has_no_coefficient() -> None:
    scene = Scene("momentum")
    scene.optimizer.param_groups[0]["momentum"] = 1.0
    assert_unknown(hold_of(scene, step), "with a momentum of 1 or more, a bonus moves the policy further")
