"""The optimizers that step a model together, and what each of them steps."""

from __future__ import annotations

import gc
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from sonde.parallel.living import kinds_of, living_of
from sonde.parallel.unwrap import unwrap_optimizer


def parameters_of(optimizer: Any) -> list[Tensor]:
    """All tensors of an optimizer."""
    return [p for group in optimizer.param_groups for p in group["params"]]


def optimizers_together(given: Any, parameters: Iterable[Tensor]) -> list[Any]:
    """The optimizers that step a model together, as Muon and AdamW do: the given one, and what steps other parameters.

    Another optimizer that shares a parameter with the given one is its predecessor, or wraps it.

    Args:
        given: one of torch's, perhaps in a wrapper such as Accelerate's.
        parameters: all that the model trains.

    Returns:
        The optimizers without their wrappers; empty if the given one steps none of these parameters.
    """
    given, wanted = unwrap_optimizer(given), {id(p) for p in parameters}
    held = {id(p) for p in parameters_of(given)}
    if held.isdisjoint(wanted):
        return []
    rest = wanted - held
    others = _others(held, rest)
    if others:
        del others
        gc.collect()  # optimizers that the user has let go of may live on in a cycle of references
        others = _others(held, rest)
    return [given, *sorted(others, key=lambda optimizer: type(optimizer).__name__)]


def _others(held: set[int], rest: set[int]) -> list[Any]:
    if not rest:
        return []
    found = {
        id(optimizer): optimizer for optimizer in map(unwrap_optimizer, living_of(kinds_of(torch.optim.Optimizer)))
    }
    stepped = [(optimizer, {id(p) for p in parameters_of(optimizer)}) for optimizer in found.values()]
    return [optimizer for optimizer, ids in stepped if ids.isdisjoint(held) and not ids.isdisjoint(rest)]
