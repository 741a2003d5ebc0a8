"""The model, its parameters and its optimizers, inside the wrappers that trainers put around them."""

from __future__ import annotations

import functools
import itertools
import operator
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ParamSpec, TypeAlias, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel


def unwrap_model(model: nn.Module) -> nn.Module:
    """The module inside DDP and torch.compile, in any nesting. Calling it issues none of DDP's collectives."""
    while True:
        if isinstance(model, DistributedDataParallel):
            model = model.module
        elif (inner := dict(model.named_children()).get("_orig_mod")) is not None:
            model = inner
        else:
            return model


def unwrap_optimizer(optimizer: Any) -> Any:
    """The optimizer inside a wrapper such as Accelerate's, which steps only when a step is due."""
    while isinstance(inner := getattr(optimizer, "optimizer", None), torch.optim.Optimizer):
        optimizer = inner
    return optimizer


Optimizers: TypeAlias = torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None
"""An optimizer, or several that step a model together, as Muon and AdamW do."""


def parameters_of(*optimizers: Any) -> list[Tensor]:
    """All tensors of some optimizers."""
    return [p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]]


def given_optimizers(given: Optimizers) -> list[Any]:
    """The optimizers that a user has passed, without wrappers such as Accelerate's: one, several in a list, or None."""
    if given is None:
        return []
    return [unwrap_optimizer(each) for each in (given if isinstance(given, Sequence) else [given])]


def check_grad_scaler(grad_scaler: object) -> None:
    """Refuse what is no GradScaler; None is accepted.

    Raises:
        ValueError: naming the argument `grad_scaler`.
    """
    if grad_scaler is not None and (isinstance(grad_scaler, type) or not hasattr(grad_scaler, "is_enabled")):
        raise ValueError(
            f"grad_scaler must be a torch.amp.GradScaler, got {grad_scaler!r:.60}: pass the scaler of the loop, or "
            "leave out grad_scaler= if there is none"
        )


def loss_scale(grad_scaler: torch.amp.GradScaler | None, optimizer: Any) -> float:
    """The scale of the gradients in `.grad` now: 1 without an enabled scaler, and after its `unscale_`.

    Args:
        grad_scaler: the scaler of the loop.
        optimizer: whose gradients are meant.
    """
    if grad_scaler is None or not grad_scaler.is_enabled():
        return 1.0
    # unscale_() leaves a mark for each optimizer, which step() and update() take away. No public method tells it.
    marks = grad_scaler._per_optimizer_states.get(id(unwrap_optimizer(optimizer)))
    if marks is not None and marks["stage"].name != "READY":
        return 1.0
    return float(grad_scaler.get_scale())


class Inventory:
    """A model's parameters by name, looked up again only if modules or parameters were added, removed or replaced."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._named: dict[str, nn.Parameter] = {}
        self._seen: list[nn.Module] = []
        self._held_then: tuple[list[int], list[object]] = ([], [])

    def parameters(self) -> dict[str, nn.Parameter]:
        """All parameters that the model has now; the same dictionary until they change."""
        if not self._seen or not self._is_unchanged():
            self._named = dict(self._model.named_parameters())
            self._seen = list(self._model.modules())
            sizes, held = _held(self._seen)
            self._held_then = sizes, list(held)
        return self._named

    def _is_unchanged(self) -> bool:
        sizes, held = _held(self._seen)
        return sizes == self._held_then[0] and all(map(operator.is_, held, self._held_then[1]))


def _held(modules: Sequence[nn.Module]) -> tuple[list[int], Iterator[object]]:
    """How many parameters and children each module holds, and these: without Python code for each of them."""
    dictionaries = [m._parameters for m in modules] + [m._modules for m in modules]
    return list(map(len, dictionaries)), itertools.chain.from_iterable(map(_VALUES, dictionaries))


_VALUES = operator.methodcaller("values")


P = ParamSpec("P")
T = TypeVar("T")


def outside_graphs(function: Callable[P, T]) -> Callable[P, T]:
    """The function, never traced by torch.compile: around a call of it, the graph breaks.

    `torch.compiler.disable` alone would do. It imports the compiler, which takes longer than to import torch.
    """
    untraced: list[Callable[P, T]] = []

    @functools.wraps(function)
    def called(*args: P.args, **kwargs: P.kwargs) -> T:
        if "torch._dynamo" not in sys.modules:
            return function(*args, **kwargs)
        if not untraced:
            untraced.append(torch.compiler.disable(function))
        return untraced[0](*args, **kwargs)

    return called
