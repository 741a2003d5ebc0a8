"""Hooks on layers and on what they return, and what these see: a plain forward, or one of an activation checkpoint."""

from __future__ import annotations

import enum
import inspect
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from sonde.batch_size.module_hook import ModuleHook, is_in_graph
from sonde.batch_size.per_example.rules import Inputs, LayerRule
from sonde.parallel.own_passes import is_in_own_pass

_CHECKPOINTS = "torch.utils.checkpoint"


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


class Stage(enum.Enum):
    """How a layer's forward stands to activation checkpoints.

    A non-reentrant checkpoint (`use_reentrant=False`) builds its graph in the first forward, whose outputs get the
    hooks, and throws the activations away. In backward it runs the forward again, for the activations alone. The first
    call's input is then taken from the second call. A reentrant checkpoint builds its graph in backward, and needs none
    of this.
    """

    PLAIN = enum.auto()
    """In no checkpoint, or in one whose graph is built here."""
    FIRST = enum.auto()
    """Its activations will be thrown away."""
    AGAIN = enum.auto()
    """Run again in backward, for its activations."""
    NEITHER = enum.auto()
    """Run again in backward as a part of an outer checkpoint: an inner one throws its activations away once more."""


def stage() -> Stage:
    """The stage of the forward that is running now, by the functions of `torch.utils.checkpoint` on the stack."""
    frame, is_inside = sys._getframe(1), False
    while (frame := frame.f_back) is not None:  # type: ignore[assignment]
        if frame.f_globals.get("__name__") != _CHECKPOINTS:
            continue
        function = frame.f_code.co_name
        if function == "recompute_fn":
            return Stage.NEITHER if is_inside else Stage.AGAIN
        if function == "backward":  # a reentrant checkpoint builds its graph here
            break
        is_inside |= function == "checkpoint"
    return Stage.FIRST if is_inside else Stage.PLAIN


def arranged(rule: LayerRule, layer: nn.Module, args: tuple[Any, ...], keywords: dict[str, Any]) -> Inputs:
    """What a layer was called with, as its rule takes it, without a graph."""
    if len(keywords) > 1:  # in the order of the layer's forward
        order = list(inspect.signature(layer.forward).parameters)
        keywords = dict(sorted(keywords.items(), key=lambda item: (*order, item[0]).index(item[0])))
    with torch.no_grad():
        return tuple(t.detach() if isinstance(t, Tensor) else t for t in rule.arrange(layer, args, keywords))


def hook_gradient_of(output: Tensor, inputs: Inputs, function: Callable[[Tensor], None]) -> None:
    """Call a function with the gradient of what a layer returned, whatever is written into it later.

    A write in place into a view leaves the view's own hooks behind: gradients then go to the tensor under it by another
    way. Linear layers return views for three dims, so `relu_` after them would do this. The hook of a view that shows
    all of the tensor under it is therefore put on that tensor, if the layer made it.
    """
    base, shape, stride = output._base, output.shape, output.stride()
    is_whole = base is not None and base.numel() == output.numel() and base.is_contiguous()
    if base is None or base.grad_fn is None or not is_whole or _is_given(base, inputs):
        output.register_hook(function)
    else:
        base.register_hook(lambda grad: function(grad.contiguous().as_strided(shape, stride)))


def _is_given(base: Tensor, inputs: Inputs) -> bool:
    """Whether an input lies in the same memory, so that the gradient of the tensor may come from elsewhere too."""
    memory = base.untyped_storage().data_ptr()
    return any(isinstance(t, Tensor) and t.untyped_storage().data_ptr() == memory for t in inputs)
