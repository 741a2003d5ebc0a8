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

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from sonde.batch_size.module_hook import LiftableHooks, ModuleHook, put_on, takes_fast_path


class FastPaths:
    """Takes hooks off the layers of a model that have a fast path, and puts them on again.

    Args:
        model: with its hooks.
        handles: of the hooks.
    """

    def __init__(self, model: nn.Module, handles: Sequence[RemovableHandle]) -> None:
        layers = [layer for layer in model.modules() if takes_fast_path(layer)]
        parts = {part for layer in layers for part in layer.modules()}
        around = [m for m in model.modules() if parts and m not in parts and not parts.isdisjoint(m.modules())]
        hooks = [(layer, self._before_layer) for layer in layers] + [(m, self._before_parent) for m in around]
        self.handles = [put_on(m.register_forward_pre_hook, _Hook(function)) for m, function in hooks]
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


class _Hook(ModuleHook):
    """A hook that works in a trace and in a pass of sonde's own too: the layer would see others there."""

    def __init__(self, function: Callable[[nn.Module, object], None]) -> None:
        self._function = function

    def __call__(self, module: nn.Module, args: object) -> None:
        self._function(module, args)
