"""Hooks on layers and on what they return, and what these see: a plain forward, or one of an activation checkpoint."""

from __future__ import annotations

import enum
import inspect
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from sonde.batch_size.module_hook import LiftableHooks, ModuleHook, is_in_graph, put_on, takes_fast_path
from sonde.batch_size.per_example.rules import Inputs, LayerRule
from sonde.parallel.own_passes import is_in_own_pass

_CHECKPOINTS = "torch.utils.checkpoint"


class LayerHook(ModuleHook):
    """A hook on a layer."""

    def __init__(self, function: Callable[..., None], *, always: bool = False) -> None:
        self._function, self._always = function, always

    def __call__(self, *args: Any) -> None:
        """Do nothing in a pass of sonde's own, nor in a graph that is being made, unless `always` is set.

        What the layer's parameters miss in a graph is noticed in backward.
        """
        if self._always or not (is_in_graph() or is_in_own_pass(args[0])):
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


class FastPaths:
    """Takes hooks off each `nn.TransformerEncoderLayer` of a model before torch looks for them, and puts them on again.

    In evaluation without a graph, the layer runs as one kernel, which gives other bits than its parts do one by one. It
    does not where any module in it has a hook, itself included: it looks for them when its forward begins. A hook that
    runs right before that forward knows best whether the kernel may be taken, and takes all hooks off, its own too.
    None is left then that could put them on again. So hooks on the modules around the layer do that, before they run it
    with a graph, and so does backward, since a checkpoint may run the layer again.

    torch.compile reads the layer's hooks before they run. There the hook of a module around takes them off, while that
    module is compiled: in its graph they would do nothing.

    Args:
        model: with its hooks.
        handles: of the hooks.
    """

    def __init__(self, model: nn.Module, handles: Sequence[RemovableHandle]) -> None:
        layers = [layer for layer in model.modules() if takes_fast_path(layer)]
        parts = {part for layer in layers for part in layer.modules()}
        around = [m for m in model.modules() if parts and m not in parts and not parts.isdisjoint(m.modules())]
        hooks = [(layer, self._before_layer) for layer in layers] + [(m, self._before_parent) for m in around]
        # The layer would see other hooks in a trace and in a pass of sonde's own too.
        self.handles = [put_on(m.register_forward_pre_hook, LayerHook(hook, always=True)) for m, hook in hooks]
        """Of the hooks that are put on here."""
        numbers = {handle.id for handle in (*handles, *self.handles)}
        self._hooks = {layer: LiftableHooks(layer, numbers) for layer in layers}
        self._lifted: list[LiftableHooks] = []

        def lift_all() -> int:
            for layer in layers:
                self._lift(layer)
            return 0

        # The compiler itself calls what it takes for a constant, when it comes here.
        self._lift_while_compiled = torch.compiler.assume_constant_result(lift_all)

    def put_back(self) -> None:
        """Put all hooks on again."""
        for hooks in reversed(self._lifted):
            hooks.put_back()
        self._lifted = []

    def _before_layer(self, layer: nn.Module, args: object) -> None:
        """Take its hooks off if it may take its fast path now."""
        # With a graph it takes the fast path only if it is frozen. A wrapper in it may hold trained parameters that the
        # layer does not look at, so one of them is no proof.
        has_graph = torch.is_grad_enabled() and all(p.requires_grad for p in layer.parameters())
        if not (torch.compiler.is_compiling() or layer.training or has_graph):
            self._lift(layer)

    def _before_parent(self, parent: nn.Module, args: object) -> None:
        if torch.compiler.is_compiling():
            self._lift_while_compiled()
        elif torch.is_grad_enabled():
            self.put_back()

    def _lift(self, layer: nn.Module) -> None:
        if (hooks := self._hooks[layer]) not in self._lifted:
            hooks.lift()
            self._lifted.append(hooks)
