"""Facts about the running backward that autograd does not publish."""

from __future__ import annotations

import sys

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

_NO_BACKWARD = -1
"""Autograd's number of the running backward while no backward runs."""


def in_backward() -> bool:
    """Whether this thread runs inside a backward."""
    return torch._C._current_graph_task_id() != _NO_BACKWARD


def backward_number() -> int:
    """Autograd's number of the running backward, another one for each; a backward inside another has its own."""
    return torch._C._current_graph_task_id()


def accumulates(parameter: Tensor) -> bool:
    """Whether the running backward adds to `.grad`. `torch.autograd.grad` calls the same hooks, but does not add."""
    try:
        # This function is private, since no public function separates the two; a test guards it. It raises under
        # torch.autograd.grad. Its answer is not used: it is False for a parameter that backward was called on.
        torch._C._will_engine_execute_node(get_gradient_edge(parameter).node)
    except RuntimeError:
        return False
    return True


def will_accumulate(parameter: Tensor) -> bool:
    """Whether the running backward will add to this parameter's `.grad`, asked before it comes to the parameter.

    False under `torch.autograd.grad`, and for parameters that `backward(inputs=…)` leaves out.
    """
    try:
        return torch._C._will_engine_execute_node(get_gradient_edge(parameter).node)
    except RuntimeError:  # torch.autograd.grad has been asked for this parameter's gradient
        return False


def inside_another_backward(grad: Tensor) -> bool:
    """Whether this hook runs in a backward that a node of another backward has started.

    Autograd does not publish the depth, but the Python stack shows it. CPU hooks run on the thread that called
    backward, so each backward adds one call of the engine to the stack. Hooks of other devices run on the engine's own
    threads, where the stack of the outermost backward holds no such call.
    """
    depth, frame = 0, sys._getframe()
    while (frame := frame.f_back) is not None:  # type: ignore[assignment]
        depth += frame.f_code.co_name == "_engine_run_backward"
    return depth > (1 if grad.device.type == "cpu" else 0)
