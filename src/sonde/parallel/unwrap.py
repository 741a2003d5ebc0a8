"""The model, its parameters and its optimizers, inside the wrappers that trainers put around them."""

from __future__ import annotations

import functools
import itertools
import math
import operator
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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


# Which optimizers step a model, and with which settings: what advice on the rate, and the study, know them by.

_ADAM = "Adam or AdamW"
"""Their steps differ in weight decay alone, which the study does without."""
_VARIANTS = ("dampening", "nesterov", "amsgrad")
"""Options that change a step. Those that change only how it is computed (fused, foreach) are left out."""
_SETTINGS = ("lr", "momentum", "betas", "eps", "weight_decay")


def kind_of(optimizers: Iterable[Any]) -> str:
    """The optimizers that step a model together, by class, with the options that change their steps: "SGD (β = 0.9)".

    The name of the class decides, whoever wrote it. AdamW8bit has a name of its own: it rounds its moments, and was
    not in the study.

    Args:
        optimizers: of torch, or like those. Beside Muon, an Adam for vectors and embeddings is not named.

    Returns:
        For optimizers of the study, a name in `proxy.FACTORS`; without an optimizer, an empty text.
    """
    classes = [(type(getattr(each, "optim", each)).__name__, each.param_groups) for each in optimizers]  # inside ZeRO's
    kinds = {_in_words(name, group) for name, groups in classes for group in groups}
    if any(kind.startswith("Muon (") for kind in kinds):
        kinds = {kind for kind in kinds if not kind.startswith(_ADAM)}
    return " and ".join(sorted(kinds))


def settings_of(optimizers: Iterable[Any]) -> list[dict[str, object]]:
    """The settings of all groups of the optimizers, as JSON values; groups with the same settings once.

    A rate is the one that a schedule starts from, where there is a schedule. A setting that is a tensor on a device is
    left out, since reading it would wait for the device.

    Args:
        optimizers: of torch, or like those.
    """
    found: list[dict[str, object]] = []
    for each in optimizers:
        for group in each.param_groups:
            values = dict(group) | {"lr": group.get("initial_lr", group.get("lr"))}
            settings = {name: value for name in _SETTINGS if (value := _as_json(values.get(name))) is not None}
            flags = dict.fromkeys((name for name in (*_VARIANTS, "decoupled_weight_decay") if group.get(name)), True)
            named: dict[str, object] = {"name": type(getattr(each, "optim", each)).__name__, **settings, **flags}
            if named not in found:
                found.append(named)
    return found


def _as_json(value: Any) -> object:
    """A number, or a list of numbers; None for anything else."""
    if isinstance(value, tuple | list):
        numbers = [_as_json(each) for each in value]
        return None if None in numbers else numbers
    if getattr(getattr(value, "device", None), "type", "") == "cpu" and value.numel() == 1:
        value = value.item()
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if is_number and math.isfinite(value) else None


def _in_words(name: str, group: Mapping[str, Any]) -> str:
    betas = group.get("betas")
    beta = group.get("momentum", betas[0] if isinstance(betas, tuple | list) and betas else None)
    facts = [f"β = {beta:g}"] if isinstance(beta, int | float) else []
    facts += [option for option in _VARIANTS if group.get(option)]
    if name == "Adam" and group.get("weight_decay") and not group.get("decoupled_weight_decay"):
        facts.append("L2")  # adds the decay to the gradient
    elif name in ("Adam", "AdamW"):
        name = _ADAM
    return f"{name} ({', '.join(facts)})" if facts else name
