"""Hooks on modules and tensors: how they stay out of copies and graphs, the backward that they run in, their errors."""

from __future__ import annotations

import contextlib
import copyreg
import logging
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.utils.hooks import RemovableHandle

logger = logging.getLogger("sonde")

_logged: set[str] = set()


def log_failure(error: Exception) -> None:
    """Log an error that is being handled, with its traceback; once for each text."""
    if (text := f"{type(error).__name__}: {error}") not in _logged:
        _logged.add(text)
        logger.exception("sonde failed inside a hook, and training goes on without what it was to measure: %s", text)


# On modules.


class ModuleHook:
    """A hook on a module, known by this type: see `put_on`."""


def put_on(register: Callable[..., RemovableHandle], hook: Any, **options: bool) -> RemovableHandle:
    """Put a hook on a module. A copy or a pickle of the module is without it.

    A pickle can thus be loaded where sonde is not installed, and by `torch.load`, which asks of each object in a whole
    model whether it may be loaded.

    Args:
        register: the module's method, such as `model.register_forward_hook`.
        hook: to put on.
        **options: of that method.
    """
    # Copies and pickles ask here, by type, what an object is made of; a module has no say in what it is made of.
    copyreg.pickle(OrderedDict, _without_ours)
    handle = register(hook, **options)
    # A module also keeps the numbers of hooks that take keywords, and a hook of the user's may have the same number
    # where the module is loaded.
    for table in (reference() for reference in handle.extra_dict_ref):
        if table is not None and handle.id in table:
            table[handle.id] = hook
    return handle


def _without_ours(table: OrderedDict[Any, Any]) -> tuple[Any, ...]:
    """What a copy or a pickle of any `OrderedDict` is made of: the same as ever, but for hooks of sonde."""
    made, given, state, items, pairs = cast("tuple[Any, ...]", table.__reduce__())
    return made, given, state, items, (pair for pair in pairs if not isinstance(pair[1], ModuleHook))


def is_in_graph() -> bool:
    """Whether torch compiles or traces the forward that goes on: whatever a hook does would become part of it."""
    return torch.compiler.is_compiling() or bool(torch.jit.is_tracing())  # type: ignore[attr-defined, no-untyped-call]


def is_compiled(layer: nn.Module) -> bool:
    """Whether torch.compile has replaced a module's calls. Hooks inside would become part of what it compiles."""
    return type(layer).__name__ == "OptimizedModule" or getattr(layer, "_compiled_call_impl", None) is not None


def takes_fast_path(module: nn.Module) -> bool:
    """Whether torch runs a module in evaluation by a kernel that gives other bits, unless a hook is on it or in it."""
    if not isinstance(module, nn.TransformerEncoderLayer):
        return False
    return bool(getattr(getattr(module, "self_attn", None), "batch_first", False))


def why_no_hook(model: nn.Module) -> str:
    """Why no hook may stay on a model, in words; empty where it may."""
    if isinstance(model, torch.jit.ScriptModule):
        return "one of torch.jit takes no hooks"
    return "a hook on an nn.TransformerEncoderLayer changes what it returns in evaluation" * takes_fast_path(model)


@contextlib.contextmanager
def lifted(model: nn.Module) -> Iterator[None]:
    """Take such hooks off a model and its parts for a while: `torch.jit.script` would compile them."""
    tables = [table for m in model.modules() for table in (m._forward_hooks, m._forward_pre_hooks)]
    before = [dict(table) for table in tables]
    for table in tables:
        for number in [n for n, hook in table.items() if isinstance(hook, ModuleHook)]:
            del table[number]
    try:
        yield
    finally:
        for table, hooks in zip(tables, before, strict=True):
            table.clear()
            table.update(hooks)


# The running backward, as far as autograd does not publish it.

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
