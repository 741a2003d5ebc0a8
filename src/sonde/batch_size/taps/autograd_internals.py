"""What autograd does not say in public about the backward that is running."""

from __future__ import annotations

import sys

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge


def accumulates(parameter: Tensor) -> bool:
    """Whether the backward that runs now adds to `.grad`: `torch.autograd.grad` calls the same hooks, and does not."""
    try:
        # Private, as nothing public tells the two apart: it refuses to answer for autograd.grad. A test guards it. What
        # it answers is of no use: False for a parameter that backward was called on.
        torch._C._will_engine_execute_node(get_gradient_edge(parameter).node)
    except RuntimeError:
        return False
    return True


def inside_another_backward(grad: Tensor) -> bool:
    """Whether this hook runs in a backward that another backward's node has started.

    Autograd tells no depth, but the Python stack does: CPU hooks run on the thread that called backward, under one
    call of the engine; hooks of other devices run on a thread of their own, under none.
    """
    depth, frame = 0, sys._getframe()
    while (frame := frame.f_back) is not None:  # type: ignore[assignment]
        depth += frame.f_code.co_name == "_engine_run_backward"
    return depth > (1 if grad.device.type == "cpu" else 0)
