"""Hooks in `nn.TransformerEncoderLayer`, taken off before torch looks for them.

In evaluation without a graph, the layer runs as one kernel, which gives other bits than its parts do one by one. It
does not where any module in it has a hook, itself included: it looks for them when its forward begins. A hook that runs
right before that forward knows best whether the kernel may be taken, and takes all hooks off, its own too. None is left
then that could put them on again. So hooks on the modules around the layer do that, before they run it with a graph,
and so does backward, since a checkpoint may run the layer again.

torch.compile reads the layer's hooks before they run. There the hook of a module around takes them off, while that
module is compiled: in its graph they would do nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from sonde.batch_size.module_hook import LiftableHooks, ModuleHook, put_on
from sonde.batch_size.per_example.layer_hooks import LayerHook


class FastPaths:
    """Takes hooks off the layers of a model that have a fast path, and puts them on again.

    Args:
        model: with its hooks.
        layers: those of its modules that have a fast path.
        handles: of the hooks.
        before_layer: to be called before each such layer's forward, with the layer; it calls `lift`.
        before_parent: to be called before the forward of each module around them; it calls `put_back`.
    """

    def __init__(
        self,
        model: nn.Module,
        layers: Sequence[nn.Module],
        handles: Sequence[RemovableHandle],
        before_layer: Callable[..., None],
        before_parent: Callable[..., None],
    ) -> None:
        self.handles = [put_on(layer.register_forward_pre_hook, _BeforeLayer(before_layer)) for layer in layers]
        """Of the hooks that call the two functions."""
        numbers = {handle.id for handle in (*handles, *self.handles)}
        self._hooks = {layer: LiftableHooks(layer, numbers) for layer in layers}
        self._lifted: list[LiftableHooks] = []
        parts = {part for layer in layers for part in layer.modules()}
        for parent in model.modules():
            if parent not in parts and not parts.isdisjoint(parent.modules()):
                hook = _BeforeParent(before_parent, self._lift_all)
                self.handles.append(put_on(parent.register_forward_pre_hook, hook))

    def lift(self, layer: nn.Module) -> None:
        """Before a layer's forward: take its hooks off if it may take its fast path now."""
        # With a graph it takes the fast path only if it is frozen. A wrapper in it may hold trained parameters that the
        # layer does not look at, so one of them is no proof.
        if layer.training or (torch.is_grad_enabled() and all(p.requires_grad for p in layer.parameters())):
            return
        self._lift(self._hooks[layer])

    def _lift_all(self) -> None:
        for hooks in self._hooks.values():
            self._lift(hooks)

    def _lift(self, hooks: LiftableHooks) -> None:
        if hooks not in self._lifted:
            hooks.lift()
            self._lifted.append(hooks)

    def put_back(self) -> None:
        """Put all hooks on again."""
        for hooks in reversed(self._lifted):
            hooks.put_back()
        self._lifted = []


class _BeforeLayer(ModuleHook):
    """A hook before a layer's forward, also in a trace and in a pass of sonde's own: the layer would see it there."""

    def __init__(self, function: Callable[..., None]) -> None:
        self._function = function

    def __call__(self, layer: nn.Module, args: tuple[Any, ...]) -> None:
        if not torch.compiler.is_compiling():
            self._function(layer)


class _BeforeParent(LayerHook):
    """A hook before the forward of a module around such layers."""

    def __init__(self, function: Callable[..., None], lift_all: Callable[[], None]) -> None:
        super().__init__(function)

        def constant() -> int:
            lift_all()
            return 0

        # The compiler itself calls what it takes for a constant, when it comes here.
        self._while_compiled = torch.compiler.assume_constant_result(constant)

    def __call__(self, *args: Any) -> None:
        if torch.compiler.is_compiling():
            self._while_compiled()
        else:
            super().__call__(*args)
