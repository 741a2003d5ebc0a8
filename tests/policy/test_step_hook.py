"""The hook by which `around_step` sees what the optimizer's step begins with."""

from __future__ import annotations

import contextlib
import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounter

from sonde.gradient_norm.clip import clip_grad_norm_
from sonde.policy.scoring import step_inputs
from tests.policy.entropy_scene import Scene
from tests.policy.step_blocks import (
    BF16,
    CLIPPED,
    FP32,
    assert_alike,
    assert_unknown,
    clipped,
    gradients,
    hold_of,
    scale_gradients,
    scene_of,
    step,
)


def hooks(scene: Scene) -> int:
    return len(scene.optimizer._optimizer_step_pre_hooks)


def test_the_optimizer_has_one_hook_until_the_probe_is_closed() -> None:
    scene = scene_of("sgd")
    probe = scene.probe(coefficient_to_hold=True)
    for raises in (False, True):
        with contextlib.suppress(KeyError), probe.around_step(scene.E):
            assert hooks(scene) == 1
            scene.optimizer.step()
            if raises:
                raise KeyError("the user's own")
        assert not probe._inputs._watches
    probe.close()
    probe.close()
    assert hooks(scene) == 0
    assert not scene.optimizer._optimizer_step_post_hooks
    assert [hooks(s) for s in (scene_of("sgd"), scene_of("sgd", BF16)) if s.probe()] == [0, 1]


@pytest.mark.filterwarnings("ignore:.*is deprecated:DeprecationWarning")  # torch's own, as it compiles
@pytest.mark.parametrize("kind", ["sgd", "adamw"])
def test_a_compiled_step_is_not_compiled_again_in_each_block(kind: str) -> None:
    """Its compiler shows hooks that Adam's option `capturable` is on, whatever the group says."""
    torch._dynamo.reset()
    compiler, scene = CompileCounter(), scene_of(kind)
    compiled = torch.compile(scene.optimizer.step, backend=compiler)
    probe = scene.probe(coefficient_to_hold=True)
    compiled()
    count = compiler.frame_count
    assert count > 0
    for _ in range(4):
        with probe.around_step(scene.E) as found:
            compiled()
        assert compiler.frame_count == count
        assert found.forecast.coefficient_to_hold.change_per_unit is not None
    with probe.around_step(scene.E) as found:
        clipping = clipped(0.6)
        scene.optimizer.step = compiled  # type: ignore[method-assign]
        clipping(scene)
    assert_unknown(found.forecast.coefficient_to_hold, CLIPPED)


def test_a_block_may_begin_and_end_in_hooks_of_the_step() -> None:
    scene = scene_of("sgd")
    probe, stack, found = scene.probe(coefficient_to_hold=True), contextlib.ExitStack(), []
    scene.optimizer.register_step_pre_hook(lambda *_: found.append(stack.enter_context(probe.around_step(scene.E))))
    scene.optimizer.register_step_pre_hook(lambda *_: None)
    scene.optimizer.register_step_post_hook(lambda *_: stack.close())
    scene.optimizer.step()
    assert found[0].forecast.delta is not None


def rounded_away(scene: Scene, block: Any, *, closes: bool = False, late: Any = None, **options: Any) -> float | None:
    """What 16 bits round away of the step, by a probe that may be closed before, or older than a hook."""
    probe = scene.probe(**options)
    if late is not None:
        scene.optimizer.register_step_pre_hook(late)
    if closes:
        probe.close()
    update = {"update": scene.U} if options else {}
    with probe.around_step(scene.E, **update) as found:
        block(scene)
    assert found.forecast.delta is not None
    part: float | None = found.forecast.rounded_away
    return part


def test_what_is_rounded_away_is_known_only_of_the_step_that_was_forecast() -> None:
    """A step of three quarters would count as a step whose last quarter was rounded away."""

    def bf16_scene() -> Scene:
        return Scene("sgd", lr=1.0, dtype=BF16)

    def in_closure(scene: Scene) -> None:
        scene.optimizer.step(closure=lambda: scale_gradients(scene, 0.75))

    clip, gradient = clipped(0.75), {"update": "gradient", "step_size": 1.0}
    scene = bf16_scene()
    whole = rounded_away(bf16_scene(), step)
    assert whole is not None
    assert 0.0 < whole < 0.1
    assert rounded_away(bf16_scene(), step, **gradient) == pytest.approx(whole)
    assert rounded_away(bf16_scene(), in_closure) is None
    assert rounded_away(scene, step, late=lambda *_: scale_gradients(scene, 0.75)) is None
    assert rounded_away(bf16_scene(), clip, closes=True) is None
    assert rounded_away(bf16_scene(), clip, **gradient) is None


@pytest.mark.parametrize(("dtype", "factor"), [(FP32, 1.0), (FP32, 0.6), (BF16, 1.0), (BF16, 0.6)])
def test_a_hook_that_is_newer_than_the_probe(dtype: torch.dtype, factor: float) -> None:
    """In the first block it runs after the probe's. In 32 bits, the step itself shows what it does."""
    scene = scene_of("sgd", dtype)
    probe = scene.probe(coefficient_to_hold=True)
    scene.optimizer.register_step_pre_hook(lambda *_: scale_gradients(scene, factor))
    found = []
    for _ in range(2):
        with probe.around_step(scene.E) as around:
            scene.optimizer.step()
        found.append(around.forecast.coefficient_to_hold)
    if dtype is BF16:
        assert_unknown(found[0], "a step pre-hook that is newer than the probe may have changed gradients")
    elif factor != 1.0:
        assert_unknown(found[0], "the step that was taken is 40% off the one forecast")
    else:
        assert found[0].change_per_unit is not None
    if factor == 1.0:
        assert found[1].change_per_unit is not None, found[1]
    else:
        assert_unknown(found[1], CLIPPED)


def test_two_probes_of_one_optimizer_look_at_one_step() -> None:
    """Neither is in the other's way, also while their order changes; one of them goes around the step twice."""
    alone = hold_of(scene_of("sgd", BF16), step)
    scene = scene_of("sgd", BF16)
    one, two = (scene.probe(coefficient_to_hold=True) for _ in range(2))
    before = [p.detach().clone() for p in scene.model.parameters()]
    for n_extra_hooks in range(2):
        if n_extra_hooks:
            scene.optimizer.register_step_pre_hook(lambda *_: None)
            scene.optimizer.step()
        with torch.no_grad():
            for p, old in zip(scene.model.parameters(), before, strict=True):
                p.copy_(old)
        with one.around_step(scene.E) as a, two.around_step(scene.E) as b, one.around_step(scene.E) as c:
            scene.optimizer.step()
        for around in (a, b, c):
            assert_alike(around.forecast.coefficient_to_hold, alone, rel=1e-6)
    with torch.no_grad():
        for p, old in zip(scene.model.parameters(), before, strict=True):
            p.copy_(old)
    with one.around_step(scene.E) as a:
        with one.around_step(scene.E) as b:
            pass
        scene.optimizer.step()
    assert_alike(a.forecast.coefficient_to_hold, alone, rel=1e-6)
    assert "no parameter moved in the block" in b.forecast.reason


def test_a_clip_that_is_folded_after_the_probe_was_made_is_known_at_once() -> None:
    """sonde's own hooks are no strangers."""

    def folded(scene: Scene) -> None:
        clip_grad_norm_(scene.model.parameters(), 1e-3, fold_into=scene.optimizer)

    forecasts = []
    for is_older in (True, False):
        scene = scene_of("adamw", BF16, fused=True)
        if is_older:
            folded(scene)
        probe = scene.probe(coefficient_to_hold=True)
        if not is_older:
            folded(scene)
        with probe.around_step(scene.E) as around:
            scene.optimizer.step()
        forecasts.append(around.forecast)
    assert forecasts[0].rounded_away == forecasts[1].rounded_away is not None
    assert_alike(forecasts[1].coefficient_to_hold, forecasts[0].coefficient_to_hold, rel=1e-6)


@pytest.mark.parametrize("by_closure", [False, True])
@pytest.mark.parametrize("has_state", [False, True])
def test_the_first_step_of_adam_does_not_show_its_gradients(has_state: bool, by_closure: bool) -> None:
    """It moves by their signs alone, and so a hook that leaves only these is not noticed by the step."""
    scene = scene_of("adamw", fused=True)
    if has_state:
        scene.optimizer.step()
    probe = scene.probe(coefficient_to_hold=True)

    def to_signs() -> None:
        for gradient in gradients(scene):
            gradient.sign_()

    if not by_closure:
        scene.optimizer.register_step_pre_hook(lambda *_: to_signs())
    with probe.around_step(scene.E) as around:
        scene.optimizer.step(to_signs if by_closure else None)
    unseen = "the gradients of the step were not seen" if by_closure else "a step pre-hook that is newer"
    reason = "% off the one forecast" if has_state else unseen
    assert reason in around.forecast.coefficient_to_hold.reason


def test_blocks_that_begin_and_end_in_a_hook_that_is_newer_than_the_probe() -> None:
    """torch goes through the hooks meanwhile, and raises if their order changes."""
    scene = scene_of("sgd", BF16)
    probe, stack = scene.probe(coefficient_to_hold=True), contextlib.ExitStack()

    def next_block(*_: object) -> None:
        stack.close()
        stack.enter_context(probe.around_step(scene.E))

    scene.optimizer.register_step_pre_hook(next_block)
    scene.optimizer.register_step_pre_hook(lambda *_: None)
    for _ in range(3):
        scene.optimizer.step()
    stack.close()
    with probe.around_step(scene.E):
        probe.close()
        scene.optimizer.step()


def test_16_bits_that_are_unfrozen_later_are_watched_too() -> None:
    scene = Scene("sgd", lr=1.0, dtype=BF16)
    expected = rounded_away(scene, step)
    scene = Scene("sgd", lr=1.0, dtype=BF16)
    for p in scene.model.parameters():
        p.requires_grad_(False)
    scene.model.extra = torch.nn.Parameter(torch.ones(2))
    scene.optimizer.add_param_group({"params": [scene.model.extra]})
    probe = scene.probe()
    for p in scene.model.parameters():
        p.requires_grad_(True)
    with probe.around_step(scene.E) as around:
        scene.optimizer.step()
    assert around.forecast.rounded_away == expected is not None


def test_a_probe_that_is_closed_says_what_it_cannot_see() -> None:
    scene = scene_of("sgd", BF16)
    probe = scene.probe(coefficient_to_hold=True)
    probe.close()
    with probe.around_step(scene.E) as around:
        scene.optimizer.step()
    assert_unknown(around.forecast.coefficient_to_hold, "close the probe only after its last block")


def test_an_optimizer_is_freed_where_nobody_closes_the_probe() -> None:
    """At once: a training that makes a model again cannot wait for a garbage collection."""
    gc.collect()
    gc.disable()
    try:
        scene = scene_of("adamw")
        probe = scene.probe(coefficient_to_hold=True)
        with probe.around_step(scene.E):
            scene.optimizer.step()
        gone = weakref.ref(scene.optimizer)
        del probe, scene
        assert gone() is None
    finally:
        gc.enable()


def test_an_error_in_the_hook_ends_no_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is raised as the block ends, as any error of the measurement."""

    def fails(tensor: Tensor) -> Tensor:
        raise torch.OutOfMemoryError("no memory")

    plain, scene = scene_of("adamw"), scene_of("adamw")
    plain.optimizer.step()
    probe = scene.probe(coefficient_to_hold=True)

    def block() -> None:
        with probe.around_step(scene.E):
            monkeypatch.setattr(step_inputs, "sampled_elements", fails)
            scene.optimizer.step()

    with pytest.raises(torch.OutOfMemoryError, match="no memory"):
        block()
    for p, q in zip(scene.model.parameters(), plain.model.parameters(), strict=True):
        assert torch.equal(p, q)
