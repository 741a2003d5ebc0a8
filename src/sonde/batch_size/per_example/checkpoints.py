"""Layers in activation checkpoints: what they were called with is not kept, but taken when backward runs them again.

A non-reentrant checkpoint (`use_reentrant=False`) builds its graph in the first forward, whose outputs get the hooks,
and throws the activations away. In backward it runs the forward again, for the activations alone. The first call's
input is then taken from the second call. A reentrant checkpoint builds its graph in backward, and needs none of this.

A checkpoint runs its own calls again, in the order of the first forward, and backward comes to the last checkpoint
first. So k calls of a layer that are run again are the last k of those without an input. Where that is wrong, as in
branches that backward takes in another order, the check of the gradients' sum shows it.
"""

from __future__ import annotations

import enum
import sys
import weakref
from dataclasses import dataclass, field

from torch import Tensor, nn

from sonde.batch_size.per_example.call import Call, versions_of
from sonde.batch_size.per_example.rules import Inputs

_CHECKPOINTS = "torch.utils.checkpoint"


class Stage(enum.Enum):
    """How a layer's forward stands to activation checkpoints."""

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


@dataclass
class _Layer:
    """Calls of one layer.

    Attributes:
        missing: calls without an input, in the order of the first forward.
        again: what the layer was called with when it was run again, not yet given to calls.
    """

    missing: list[weakref.ref[Call]] = field(default_factory=list)
    again: list[Inputs] = field(default_factory=list)


class Checkpoints:
    """Gives calls in checkpoints their inputs once these are computed again."""

    def __init__(self) -> None:
        self._layers: dict[nn.Module, _Layer] = {}
        self._is_new = False
        self._early: list[tuple[Call, Tensor]] = []

    def expect(self, call: Call) -> None:
        """Note a call whose input will come in backward."""
        self._layers.setdefault(call.layer, _Layer()).missing.append(weakref.ref(call))

    def run_again(self, layer: nn.Module, inputs: Inputs) -> None:
        """Take what a layer is called with in backward."""
        if layer in self._layers:
            self._layers[layer].again.append(inputs)
            self._is_new = True

    def keep_gradient(self, call: Call, grad: Tensor) -> None:
        """Keep the output's gradient of a call: backward runs a checkpoint's last layer again only after its hook."""
        self._early.append((call, grad))

    def settle(self) -> list[tuple[Call, Tensor]]:
        """Give inputs to calls, now that no checkpoint is being run again.

        Returns:
            Calls that have their input now, and whose gradient came earlier.
        """
        if not self._is_new:
            return []
        self._is_new = False
        for layer in self._layers.values():
            missing = [call for reference in layer.missing if (call := reference()) is not None and call.inputs is None]
            n = min(len(layer.again), len(missing))
            for call, inputs in zip(missing[len(missing) - n :], layer.again[len(layer.again) - n :], strict=True):
                call.inputs, call.versions, call.is_run_again = inputs, versions_of(inputs), False
            layer.missing = [weakref.ref(call) for call in missing if call.inputs is None]
            layer.again = []
        ready = [(call, grad) for call, grad in self._early if call.inputs is not None]
        self._early = [(call, grad) for call, grad in self._early if call.inputs is None]
        return ready

    def forget_gradients(self) -> list[Call]:
        """Let go of gradients whose layers were not run again, at the end of a piece: their calls."""
        calls = [call for call, _ in self._early]
        self._early = []
        return calls

    def forget(self) -> None:
        """Let go of everything."""
        self._layers, self._early, self._is_new = {}, [], False
