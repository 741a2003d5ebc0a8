"""Folding a clip into a fused optimizer: the same step, and an optimizer that is afterwards as it was before it."""

from __future__ import annotations

import gc
import math
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sonde
from tests.gradient_norm.placed_gradients import noise, plain
from tests.ranks import Ranks
from tests.sharded import fsdp, whole

FUSED: list[Any] = [
    (torch.optim.AdamW, {"lr": 0.1}),
    (torch.optim.Adam, {"lr": 0.1, "amsgrad": True}),
    (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    pytest.param(
        torch.optim.Adagrad,
        {"lr": 0.1},
        marks=pytest.mark.skipif(
            not hasattr(torch.optim.Adagrad([nn.Parameter(torch.ones(1))], fused=True), "_step_supports_amp_scaling"),
            reason="Adagrad's fused step takes a scale from torch 2.13",
        ),
    ),
]


def parameters() -> list[nn.Parameter]:
    made = [plain(noise(k, *s)) for k, s in enumerate(((5, 3), (7,), (40, 30)))]
    for k, p in enumerate(made):
        p.data += noise(10 + k, *p.shape)
    return made


@pytest.mark.parametrize("max_norm", [0.5, 1e6, 0.0])
@pytest.mark.parametrize(("kind", "options"), FUSED, ids=lambda x: getattr(x, "__name__", ""))
def test_a_folded_clip_steps_as_a_clip_does(kind: Any, options: dict[str, Any], max_norm: float) -> None:
    folded, scaled = parameters(), parameters()
    of_folded, of_scaled = kind(folded, fused=True, **options), kind(scaled, fused=True, **options)
    for _ in range(3):
        a = sonde.clip_grad_norm_(folded, max_norm, fold_into=of_folded)
        b = sonde.clip_grad_norm_(scaled, max_norm)
        assert torch.equal(a, b)
        of_folded.step()
        of_scaled.step()
        for p, q in zip(folded, scaled, strict=True):
            # Dividing by 1/c and multiplying by c round differently.
            torch.testing.assert_close(p, q, rtol=1e-6, atol=1e-7)
            torch.testing.assert_close(p.grad, q.grad, rtol=1e-6, atol=1e-9)  # the kernel writes scaled gradients back
        assert not hasattr(of_folded, "grad_scale") and not hasattr(of_folded, "found_inf")  # noqa: PT018
        for p, q in zip(folded, scaled, strict=True):
            p.grad, q.grad = torch.ones_like(p), torch.ones_like(q)
    hooks = (of_folded._optimizer_step_pre_hooks, of_folded._optimizer_step_post_hooks)
    assert [len(each) for each in hooks] == [1, 1]  # which do nothing without a fold
    of_folded.step()
    of_scaled.step()
    for p, q in zip(folded, scaled, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_fused_step_is_skipped_on_the_device(bad: float) -> None:
    made = parameters()
    optimizer = torch.optim.AdamW(made, fused=True)
    made[0].grad[0, 0] = bad  # type: ignore[index]
    before = [p.detach().clone() for p in made]
    sonde.clip_grad_norm_(made, 1.0, nonfinite="skip", fold_into=optimizer)
    optimizer.step()
    assert all(torch.equal(p, q) for p, q in zip(made, before, strict=True))
    made[0].grad[0, 0] = 0.0  # type: ignore[index]
    sonde.clip_grad_norm_(made, 1.0, nonfinite="skip", fold_into=optimizer)
    optimizer.step()
    assert not torch.equal(made[0], before[0])
    assert float(optimizer.state[made[0]]["step"]) == 1  # the skipped step does not count


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda made: torch.optim.AdamW(made), "not fused: build it with fused=True"),
        (lambda made: torch.optim.AdamW(made[:2], fused=True), "does not hold 1 of the clipped parameters"),
        (
            lambda made: torch.optim.AdamW([*made, plain(torch.ones(2))], fused=True),
            "also holds parameters that are not clipped \\(1\\)",
        ),
        (lambda made: without_scale(torch.optim.Adagrad, made), r"torch .* takes no scale: use torch 2\.13 or later"),
        (lambda made: without_scale(torch.optim.SGD, made), "torch .* takes no scale: clip without fold_into"),
    ],
    ids=["not fused", "too few", "too many", "an older torch", "no scale"],
)
def test_if_the_optimizer_cannot_scale_the_clip_does_and_warns(make: Any, reason: str) -> None:
    made, expected = parameters(), parameters()
    optimizer = make(made)
    with pytest.warns(UserWarning, match=reason) as caught:
        sonde.clip_grad_norm_(made, 0.5, fold_into=optimizer)
    assert caught[0].filename == __file__
    sonde.clip_grad_norm_(expected, 0.5)
    for p, q in zip(made, expected, strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-5, atol=0)


def test_frozen_parameters_need_not_be_the_optimizers() -> None:
    made = parameters()
    optimizer = torch.optim.AdamW(made, fused=True)
    sonde.clip_grad_norm_([*made, nn.Parameter(torch.zeros(2), requires_grad=False)], 0.5, fold_into=optimizer)
    assert hasattr(optimizer, "grad_scale")


def without_scale(kind: Any, made: list[nn.Parameter]) -> torch.optim.Optimizer:
    """An optimizer whose fused step ignores a scale, as Adagrad's does in older releases."""
    optimizer: Any = kind(made, lr=0.1, fused=True)
    optimizer._step_supports_amp_scaling = False
    return optimizer  # type: ignore[no-any-return]


def _unfolded_then_folded(fold: bool) -> list[Tensor]:
    """A real GradScaler around a fused optimizer, its gradients unscaled and clipped before the step."""
    model = nn.Linear(4, 2)
    with torch.no_grad():
        for p in model.parameters():
            p.fill_(0.1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    for step in range(3):
        x = torch.full((3, 4), 1.0 + step)
        scaler.scale(model(x).square().mean()).backward()
        scaler.unscale_(optimizer)
        sonde.clip_grad_norm_(model.parameters(), 0.1, fold_into=optimizer if fold else None)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        assert not hasattr(optimizer, "grad_scale")
    return [p.detach().clone() for p in model.parameters()]


def test_a_fold_beside_a_grad_scaler() -> None:
    for folded, scaled in zip(_unfolded_then_folded(True), _unfolded_then_folded(False), strict=True):
        torch.testing.assert_close(folded, scaled, rtol=1e-5, atol=1e-6)


def _sharded(fold: bool) -> list[Tensor]:
    cut = fsdp()
    optimizer = torch.optim.AdamW(cut.parameters.values(), lr=0.1, fused=True)
    sonde.clip_grad_norm_(cut.parameters.items(), 0.05, mesh=cut.mesh, fold_into=optimizer if fold else None)
    optimizer.step()
    return [whole(p.detach()) for p in cut.parameters.values()]


def test_into_an_optimizer_of_sharded_parameters(ranks2: Ranks) -> None:
    for folded, scaled in zip(ranks2(_sharded, True)[0], ranks2(_sharded, False)[0], strict=True):
        torch.testing.assert_close(folded, scaled, rtol=1e-5, atol=1e-6)


BETWEEN: dict[str, Callable[[list[nn.Parameter]], Tensor | None]] = {
    "the norm is measured": lambda made: sonde.clip_grad_norm_(made, None),
    "the norm is measured by max_norm=inf": lambda made: sonde.clip_grad_norm_(made, math.inf),
    "the norm is measured by a plan": lambda made: sonde.get_total_norm(sonde.group_parameters_for_norm(made)),
    "one parameter is clipped": lambda made: sonde.clip_grad_norm_(made[:1], 1e9),
    "the norm of its gradients": lambda made: sonde.get_total_norm([p.grad for p in made]),  # type: ignore[misc]
    "a lower threshold": lambda made: sonde.clip_grad_norm_(made, 0.02),
    "a higher threshold": lambda made: sonde.clip_grad_norm_(made, 0.5),
    "a norm that is known": lambda made: sonde.clip_grads_with_norm_(made, 0.01, 0.05),
}


@pytest.mark.parametrize("between", BETWEEN.values(), ids=BETWEEN)
@pytest.mark.parametrize("make", [torch.optim.SGD, torch.optim.AdamW])
def test_what_comes_between_a_folded_clip_and_its_step_finds_clipped_gradients(
    make: Callable[..., torch.optim.Optimizer], between: Callable[[list[nn.Parameter]], Tensor | None]
) -> None:
    """A logger that measures, the clip of one layer, a loop that left out a step: all as without a fold."""
    found = []
    for folds in (True, False):
        made = parameters()
        optimizer = make(made, lr=0.1, fused=True)
        sonde.clip_grad_norm_(made, 0.05, fold_into=optimizer if folds else None)
        norm = between(made)
        assert not hasattr(optimizer, "grad_scale")
        optimizer.step()
        found.append([torch.zeros(()) if norm is None else norm, *made])
    assert all(map(torch.equal, *found))


def test_a_fold_whose_gradients_are_gone_scales_nothing() -> None:
    """The step was left out, and the next backward has come."""
    made = plain(torch.ones(2))
    optimizer = torch.optim.SGD([made], lr=1.0, fused=True)
    sonde.clip_grad_norm_([made], 0.1, fold_into=optimizer)
    made.grad = torch.ones(2)
    assert sonde.clip_grad_norm_([made], 10.0, fold_into=optimizer) == pytest.approx(math.sqrt(2.0))
    optimizer.step()
    assert made.tolist() == [-1.0, -1.0]


@pytest.mark.parametrize("fold", [True, False])
def test_a_skip_beside_a_grad_scaler_that_saw_no_nan(fold: bool) -> None:
    """The NaN came after the scaler unscaled, or is on another rank, so the scaler's own flag is not set."""
    model = nn.Linear(3, 1, bias=False)
    before = model.weight.detach().clone()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.0, fused=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    scaler.scale(model(torch.ones(2, 3)).sum()).backward()
    scaler.unscale_(optimizer)
    model.weight.grad[0, 0] = math.nan  # type: ignore[index]
    sonde.clip_grad_norm_(model.parameters(), 1.0, nonfinite="skip", fold_into=optimizer if fold else None)
    scaler.step(optimizer)
    scaler.update()
    assert torch.equal(model.weight, before)
    assert not hasattr(optimizer, "found_inf")


def one_parameter(kind: Any, grad: float, **options: Any) -> tuple[nn.Parameter, Any]:
    p = plain(torch.full((100,), grad))
    return p, kind([p], lr=1.0, fused=True, **options)


def test_gradients_near_the_largest_number_are_clipped_and_not_zeroed() -> None:
    p, optimizer = one_parameter(torch.optim.SGD, 1e38)
    sonde.clip_grad_norm_([p], 1.0, fold_into=optimizer)
    optimizer.step()
    assert float(p.detach().norm()) == pytest.approx(1.0)


def test_a_grad_scale_that_is_set_already_stays() -> None:
    p, optimizer = one_parameter(torch.optim.SGD, 8.0)
    optimizer.grad_scale = torch.tensor(8.0)
    with pytest.warns(UserWarning, match="its grad_scale is set already"):
        sonde.clip_grad_norm_([p], 1e9, fold_into=optimizer)
    assert float(optimizer.grad_scale) == 8.0
    optimizer.step()
    assert p.detach().unique().tolist() == [-1.0]


def test_a_first_step_that_is_skipped_leaves_no_momentum_unset() -> None:
    p, optimizer = one_parameter(torch.optim.SGD, math.inf, momentum=0.9)
    with pytest.warns(UserWarning, match="its momentum stays unset"):
        sonde.clip_grad_norm_([p], 1.0, nonfinite="skip", fold_into=optimizer)
    optimizer.step()
    assert optimizer.state[p]["momentum_buffer"].unique().tolist() == [0.0]
    assert not p.detach().any()


def test_a_clip_that_raises_leaves_no_fold_behind() -> None:
    p, optimizer = one_parameter(torch.optim.SGD, 8.0)
    sonde.clip_grad_norm_([p], 1e-3, fold_into=optimizer)
    p.grad = torch.full((100,), math.nan)
    with pytest.raises(RuntimeError, match="not finite"):
        sonde.clip_grad_norm_([p], 1.0, nonfinite="raise", fold_into=optimizer)
    assert getattr(optimizer, "grad_scale", None) is None


def skips_a_step(optimizer: torch.optim.Optimizer, made: list[nn.Parameter], way: str) -> None:
    """What a loop does that leaves out a step at a loss spike, and clips nothing in the next."""
    if way == "accumulated":
        for p in made:
            p.grad.add_(1.0)  # type: ignore[union-attr]
        return
    optimizer.zero_grad(set_to_none=way == "other objects")
    for p in made:
        p.grad = torch.ones_like(p) if p.grad is None else p.grad.add_(1.0)


@pytest.mark.parametrize("way", ["other objects", "the same objects, zeroed", "accumulated"])
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
def test_a_fold_does_not_outlive_its_gradients(kind: Any, way: str) -> None:
    made, expected = parameters(), parameters()
    optimizer, other_optimizer = kind(made, lr=0.1, fused=True), kind(expected, lr=0.1, fused=True)
    sonde.clip_grad_norm_(made, 1e-3, fold_into=optimizer)
    skips_a_step(optimizer, made, way)
    skips_a_step(other_optimizer, expected, way)
    with pytest.warns(UserWarning, match=rf"folded into {kind.__name__} is dropped, .* clip the gradients") as caught:
        optimizer.step()
    assert caught[0].filename == __file__
    other_optimizer.step()
    for p, q in zip(made, expected, strict=True):
        assert torch.equal(p, q)
    assert not hasattr(optimizer, "grad_scale")
    assert not hasattr(optimizer, "found_inf")


@pytest.mark.parametrize("unscales", [True, False])
@pytest.mark.filterwarnings("ignore:the clip folded into SGD is dropped")
def test_a_fold_that_outlived_its_gradients_leaves_a_grad_scaler_alone(unscales: bool) -> None:
    moved = []
    for folds in (True, False):
        p, optimizer = one_parameter(torch.optim.SGD, 8.0)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        if folds:
            sonde.clip_grad_norm_([p], 1e-3, fold_into=optimizer)
        optimizer.zero_grad()
        scaler.scale(p.sum()).backward()
        if unscales:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        moved.append(p.detach().clone())
    assert torch.equal(*moved)
    assert moved[0].unique().tolist() == [-1.0]


def test_a_fold_keeps_no_gradient_alive() -> None:
    made = parameters()
    optimizer = torch.optim.SGD(made, lr=0.1, fused=True)
    sonde.clip_grad_norm_(made, 1.0, fold_into=optimizer)
    gone = weakref.ref(made[0].grad)
    made[0].grad = None
    gc.collect()
    assert gone() is None


@pytest.mark.parametrize("shape", [(1,), (3, 2)])
def test_a_fold_tells_equal_gradients_apart_while_the_old_ones_live(shape: tuple[int, ...]) -> None:
    """The new gradient has the same values and as many writes; only the tensor is another one."""
    p = plain(torch.full(shape, 8.0))
    optimizer = torch.optim.SGD([p], lr=1.0, fused=True)
    sonde.clip_grad_norm_([p], 1e-3, fold_into=optimizer)
    alive, p.grad = p.grad, p.grad.clone()
    with pytest.warns(UserWarning, match="folded into SGD is dropped"):
        optimizer.step()
    assert torch.equal(p, torch.full(shape, -8.0))
    assert torch.equal(alive, torch.full(shape, 8.0))
    optimizer.step()  # and the optimizer is as it was
    assert torch.equal(p, torch.full(shape, -16.0))


def two_parameters() -> tuple[nn.Parameter, nn.Parameter, torch.optim.Optimizer]:
    """One with a gradient of norm 100, and one without; a step of SGD with rate 1."""
    p, q = plain(torch.full((1,), 100.0)), nn.Parameter(torch.zeros(1))
    return p, q, torch.optim.SGD([p, q], lr=1.0, fused=True)


@pytest.mark.parametrize("is_listed", [True, False])
def test_a_gradient_that_came_after_the_clip_is_not_scaled(is_listed: bool) -> None:
    p, q, optimizer = two_parameters()
    sonde.clip_grad_norm_([p, q] if is_listed else [p], 1.0, fold_into=optimizer)
    q.grad = torch.ones(1)
    with pytest.warns(UserWarning, match="folded into SGD is dropped, since gradients were added, .* clip the"):
        optimizer.step()
    assert (p.item(), q.item()) == (-100.0, -1.0)
    assert not hasattr(optimizer, "grad_scale")


@pytest.mark.parametrize("by_name", [True, False])
def test_a_closure_that_makes_gradients_anew_ends_the_fold(by_name: bool) -> None:
    p, _, optimizer = two_parameters()
    sonde.clip_grad_norm_([p], 1.0, fold_into=optimizer)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = p.sum()
        loss.backward()
        return loss

    options: dict[str, Any] = {"closure": closure} if by_name else {}
    with pytest.warns(UserWarning, match=r"step\(closure\) makes gradients anew: clip inside the closure"):
        optimizer.step(*([] if by_name else [closure]), **options)  # type: ignore[call-overload]
    assert p.item() == -1.0
    assert not hasattr(optimizer, "grad_scale")


def test_a_clip_inside_the_closure_is_folded() -> None:
    p, _, optimizer = two_parameters()

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = 100.0 * p.sum()
        loss.backward()
        sonde.clip_grad_norm_([p], 1.0, fold_into=optimizer)
        return loss

    for n_steps in (1, 2):
        optimizer.step(closure)
        assert p.item() == pytest.approx(-n_steps, rel=1e-5)
        assert not hasattr(optimizer, "grad_scale")


@pytest.mark.parametrize("is_stale", [True, False])
@pytest.mark.parametrize("register", ["register_step_pre_hook", "register_step_post_hook"])
@pytest.mark.filterwarnings("ignore:the clip folded into SGD is dropped")
def test_hooks_that_are_registered_after_the_fold_run(register: str, is_stale: bool) -> None:
    p, _, optimizer = two_parameters()
    calls: list[float] = []
    sonde.clip_grad_norm_([p], 1.0, fold_into=optimizer)
    getattr(optimizer, register)(lambda *_: calls.append(p.item()))
    if is_stale:
        p.grad = torch.full((1,), 2.0)
    optimizer.step()
    moved = -2.0 if is_stale else -1.0
    assert p.item() == pytest.approx(moved, rel=1e-5)
    assert calls == [0.0 if "pre" in register else p.item()]
