"""Hooks on layers and on what they return."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from sonde.batch_size.module_hook import ModuleHook, is_in_graph
from sonde.batch_size.per_example.rules import Inputs, LayerRule
from sonde.parallel.own_passes import is_in_own_pass


class LayerHook(ModuleHook):
    """A hook on a layer."""

    def __init__(self, function: Callable[..., None]) -> None:
        self._function = function

    def __call__(self, *args: Any) -> None:
        """Do nothing in a pass of sonde's own, nor in a graph that is being made.

        What the layer's parameters miss in a graph is noticed in backward.
        """
        if not is_in_graph() and not is_in_own_pass(args[0]):
            self._function(*args)


def hook_gradient_of(output: Tensor, inputs: Inputs, function: Callable[[Tensor], None]) -> None:
    """Call a function with the gradient of what a layer returned, whatever is written into it later.

    A write in place into a view leaves the view's own hooks behind: gradients then go to the tensor under it by another
    way. Linear layers return views for three dims, so `relu_` after them would do this. The hook of a view that shows
    all of the tensor under it is therefore put on that tensor, if the layer made it.
    """
    base, shape, stride = output._base, output.shape, output.stride()
    if base is not None and _is_whole(base, output) and not _is_given(base, inputs):
        base.register_hook(lambda grad: function(grad.contiguous().as_strided(shape, stride)))
    else:
        output.register_hook(function)


def is_graphed(layer: nn.Module) -> bool:
    """Whether `torch.cuda.make_graphed_callables` has put a graph in place of a module's forward."""
    return getattr(vars(layer).get("forward"), "__module__", None) == "torch.cuda.graphs"


def _is_whole(base: Tensor, output: Tensor) -> bool:
    """Whether an output shows every element of the tensor under it once, and that tensor is no leaf."""
    return base.grad_fn is not None and base.numel() == output.numel() and base.is_contiguous()


def _is_given(base: Tensor, inputs: Inputs) -> bool:
    """Whether an input lies in the same memory, so that the gradient of the tensor may come from elsewhere too."""
    memory = base.untyped_storage().data_ptr()
    return any(isinstance(t, Tensor) and t.untyped_storage().data_ptr() == memory for t in inputs)


def arranged(rule: LayerRule, layer: nn.Module, args: tuple[Any, ...], keywords: dict[str, Any]) -> Inputs:
    """What a layer was called with, as its rule takes it, without a graph."""
    inputs = rule.arrange(layer, args, _in_order(layer, keywords))
    return tuple(t.detach() if isinstance(t, Tensor) else t for t in inputs)


def _in_order(layer: nn.Module, keywords: dict[str, Any]) -> dict[str, Any]:
    """Keyword arguments in the order of the layer's forward."""
    if len(keywords) < 2:
        return keywords
    order = list(inspect.signature(layer.forward).parameters)
    return dict(sorted(keywords.items(), key=lambda item: order.index(item[0]) if item[0] in order else len(order)))
