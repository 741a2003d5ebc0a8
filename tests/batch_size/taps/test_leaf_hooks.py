"""The memory that leaf hooks take, and guards on the PyTorch behaviour that they rely on."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import Variable

from sonde.batch_size.hooks import accumulates
from sonde.batch_size.taps.leaf_hooks import STAGED_NUMEL
from sonde.batch_size.taps.metric import Euclidean
from sonde.batch_size.taps.tap import Tap
from sonde.batch_size.taps.witness import Witness
from sonde.batch_size.window_clock import OwnTime
from sonde.parallel.wrappers import find_wrapper


def tap_of(parameters: list[nn.Parameter], staging_bytes: int = 8 * 2**20) -> Tap:
    """A tap, read by the test."""
    wrapper, witness = find_wrapper(nn.ParameterList(parameters)), Witness([p.shape for p in parameters])
    return Tap(
        wrapper,
        witness,
        [Euclidean()],
        staging_bytes=staging_bytes,
        on_backward_end=lambda: None,
        own=OwnTime(),
    )


class Watch(torch.utils._python_dispatch.TorchDispatchMode):
    """Notes the largest tensor that any operation creates."""

    def __init__(self) -> None:
        super().__init__()
        self.largest = 0
        self.clones = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if isinstance(out, Tensor) and not func.is_view and not any(out is a for a in args):  # nor in place
            self.largest = max(self.largest, out.numel())
            self.clones += func is torch.ops.aten.clone.default and out.numel() > STAGED_NUMEL
        return out


def test_a_large_gradient_is_not_copied_even_by_autograd() -> None:
    """With a tap, autograd still hands its gradient over as `.grad` instead of cloning it."""

    def storage_kept(tapped: bool) -> bool:
        weight = nn.Parameter(torch.randn(400, 400))
        seen: list[int] = []
        weight.register_hook(lambda g: seen.append(g.data_ptr()))
        tap = tap_of([weight]) if tapped else None
        if tap:
            tap.begin_piece()
        (weight * torch.randn(400, 400)).sum().backward()
        if tap:
            tap.end_piece()
            tap.close()
        assert weight.grad is not None
        return weight.grad.data_ptr() == seen[0]

    assert storage_kept(tapped=False)
    assert storage_kept(tapped=True)


def test_the_hook_creates_no_tensor_of_gradient_size() -> None:
    weight = nn.Parameter(torch.randn(512, 512))
    weight.grad = torch.zeros(512, 512)  # added to in place: autograd makes nothing of that size either
    tap = tap_of([weight])
    grad = torch.randn(512, 512)
    tap.begin_piece()
    with Watch() as watch:
        weight.backward(grad)
        (piece,) = tap.end_piece()
    assert float(piece.terms[0, 0]) == pytest.approx(float(grad.double().square().sum()))
    assert 0 < watch.largest <= 1024
    tap.close()


def test_small_gradients_are_staged_within_a_bound() -> None:
    parameters = [nn.Parameter(torch.randn(100, 100)) for _ in range(50)]
    tap = tap_of(parameters, staging_bytes=200_000)
    tap.staged_numel = 20_000
    grads = [torch.randn(100, 100) for _ in parameters]
    alive = [weakref.ref(g) for g in grads]
    tap.begin_piece()
    most = 0
    for index in range(len(parameters)):
        grad = grads.pop(0)
        tap.take(index, grad)  # as a hook does
        del grad
        most = max(most, sum(r() is not None for r in alive) - len(grads))
    assert 2 <= most * 40_000 / 100_000 <= 6
    tap.end_piece()
    tap.close()


def test_staged_gradients_are_reduced_before_anything_can_write_to_them() -> None:
    """After backward has ended, a write to `.grad` must not change a gradient that waits."""
    small = nn.Parameter(torch.ones(10))
    tap = tap_of([small])
    tap.begin_piece()
    (small * 3).sum().backward()
    small.grad.zero_()  # type: ignore[union-attr]
    assert float(tap.end_piece()[0].terms[0, 0]) == pytest.approx(90)
    tap.close()


def test_guard_leaf_hooks_see_the_gradient_before_accumulation() -> None:
    weight = nn.Parameter(torch.ones(3))
    seen: list[Tensor] = []
    weight.register_hook(lambda g: seen.append(g.clone()))
    for factor in (1.0, 2.0):
        (factor * weight).sum().backward()
    assert [float(g[0]) for g in seen] == [1.0, 2.0]
    assert weight.grad is not None
    assert float(weight.grad[0]) == 3.0


def test_guard_private_end_of_backward_callback() -> None:
    weights = [nn.Parameter(torch.ones(3)) for _ in range(2)]
    order: list[str] = []

    def hook(grad: Tensor) -> None:
        order.append("hook")
        if order == ["hook"]:
            Variable._execution_engine.queue_callback(lambda: order.append("end"))

    for weight in weights:
        weight.register_hook(hook)
    (weights[0] * weights[1]).sum().backward()
    order.append("after")
    assert order == ["hook", "hook", "end", "after"]


def test_guard_graph_task_id_differs_between_backwards() -> None:
    weight = nn.Parameter(torch.ones(3))
    ids: list[int] = []
    weight.register_hook(lambda _: ids.append(torch._C._current_graph_task_id()))
    for _ in range(2):
        (weight * 2).sum().backward()
    assert len(set(ids)) == 2
    assert min(ids) >= 0
    assert torch._C._current_graph_task_id() == -1  # outside a backward


def test_guard_private_function_that_separates_autograd_grad_from_backward() -> None:
    weight = nn.Parameter(torch.ones(3))
    answers: list[bool] = []
    weight.register_hook(lambda _: answers.append(accumulates(weight)))
    (weight * 2).sum().backward()
    torch.autograd.grad((weight * 2).sum(), [weight])
    (weight * 2).sum().backward(inputs=[weight])
    with torch.enable_grad():
        torch.autograd.grad((weight * weight).sum(), [weight], create_graph=True)
    weight.backward(torch.ones(3))
    assert answers == [True, False, True, False, True]
