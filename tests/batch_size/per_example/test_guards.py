"""Facts about torch that per-example norms lean on: each of these tests fails when one goes."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module

from sonde.batch_size.hooks import will_accumulate


def test_guard_a_write_into_a_view_leaves_the_hooks_of_the_tensor_under_it() -> None:
    """Linear layers return views for three dims, before torch 2.15. A hook on one never runs, one under it does."""
    seen: dict[str, Tensor] = {}
    base = nn.Linear(3, 4)(torch.ones(10, 3))
    output = base.view(2, 5, 4)
    output.register_hook(lambda grad: seen.update(view=grad))
    base.register_hook(lambda grad: seen.update(base=grad))
    output.mul_(3.0)
    output.sum().backward()
    assert list(seen) == ["base"]
    assert torch.equal(seen["base"], torch.full((10, 4), 3.0))


def test_guard_a_hook_sees_the_gradient_of_the_value_before_a_write_in_place() -> None:
    seen: list[Tensor] = []
    output = torch.ones(3, requires_grad=True) * 1.0
    output.register_hook(seen.append)
    output.mul_(3.0)
    output.sum().backward()
    assert torch.equal(seen[0], torch.full((3,), 3.0))


def test_guard_a_module_says_whether_it_was_compiled() -> None:
    layer = nn.Linear(2, 2)
    assert layer._compiled_call_impl is None
    layer.compile(backend="aot_eager")
    assert layer._compiled_call_impl is not None
    assert type(torch.compile(nn.Linear(2, 2), backend="aot_eager")).__name__ == "OptimizedModule"


def test_guard_a_backward_says_which_parameters_it_will_reach() -> None:
    x, first, second = (torch.ones(2, requires_grad=True) for _ in range(3))
    found: list[tuple[bool, bool]] = []

    def run() -> Tensor:
        product = x * first * second
        product.register_hook(lambda grad: found.append((will_accumulate(first), will_accumulate(second))))
        return product.sum()

    run().backward()
    run().backward(inputs=[second])
    torch.autograd.grad(run(), [x])
    torch.autograd.grad(run(), [x, first])
    assert found == [(True, True), (False, True), (False, False), (False, False)]


def test_guard_a_hook_on_all_modules_leaves_its_number_behind() -> None:
    """Without that, `close` need not take it away."""
    handle = torch_module.register_module_forward_hook(lambda *args: None, with_kwargs=True)
    handle.remove()
    assert torch_module._has_any_global_hook()
    torch_module._global_forward_hooks_with_kwargs.pop(handle.id)
    assert not torch_module._has_any_global_hook()
