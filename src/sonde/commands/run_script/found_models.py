"""Finds the model that an optimizer steps: from the module that the script calls, or among all living modules."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from sonde.parallel.living import kinds_of, living_of
from sonde.parallel.optimizers import parameters_of
from sonde.parallel.placements import is_dtensor

_ENOUGH = 0.99
"""Part of an optimizer's elements that its model must hold. The rest may be a temperature, or an entropy's weight."""


@dataclass(frozen=True)
class ModelOfOptimizers:
    """A model, and the optimizers that step it together.

    Attributes:
        model: as the script calls it, wrappers included.
        optimizers: in the order in which they were made.
    """

    model: nn.Module
    optimizers: tuple[Any, ...]


def trainable(tensors: Iterable[Tensor]) -> dict[int, int]:
    """The number of elements of each tensor that is trained, by its identity."""
    return {id(t): t.numel() for t in tensors if t.requires_grad}


def stepped_by(optimizer: Any) -> dict[int, int]:
    """The number of elements of each tensor that an optimizer steps, by its identity."""
    return trainable(parameters_of(optimizer))


def why_not_reduced(model: nn.Module, *, by_hand: bool) -> str:
    """Why a model cannot be measured in this job of several processes; empty if it can.

    Args:
        model: as the script calls it.
        by_hand: whether the script averages gradients over all ranks by itself.
    """
    n_ranks = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
    if n_ranks == 1 or by_hand or is_reduced(model):
        return ""
    return (
        f"the model is neither in DDP nor cut by FSDP2, and this is a job of {n_ranks} processes: pass "
        "--reduced-by-hand if the script averages or adds up the gradients over all of them by itself"
    )


def is_reduced(model: nn.Module) -> bool:
    """Whether DDP or FSDP2 averages the gradients of a model, or of a part of it."""
    has_ddp = any(isinstance(module, DistributedDataParallel) for module in model.modules())
    return has_ddp or any(map(is_dtensor, model.parameters()))


def models_in(called: nn.Module, optimizers: Sequence[Any]) -> list[ModelOfOptimizers]:
    """The models of those optimizers whose parameters a module holds.

    If the optimizers step all of the module, it is the model of all of them. Otherwise each has the smallest part of
    the module that holds its parameters. If one of two such parts is inside the other, their optimizers share the outer
    one, as Muon and AdamW share a model.

    Args:
        called: the outermost module that the script calls with any of their parameters.
        optimizers: in the order in which they were made.
    """
    held = trainable(called.parameters())
    inside = [o for o in optimizers if _holds(held, stepped_by(o))]
    stepped: dict[int, int] = {}
    for optimizer in inside:
        stepped |= stepped_by(optimizer)
    if inside and _holds(stepped, held):
        return [ModelOfOptimizers(called, tuple(inside))]
    modules = list(called.modules())
    parts = [(part, o) for o in inside if (part := _smallest(modules, stepped_by(o))) is not None]
    return _merged([(_outermost_alike(part, modules), o) for part, o in parts])


def model_among_living(optimizer: Any) -> nn.Module | None:
    """The model of an optimizer, of all modules that are alive: the smallest that holds its parameters, or its wrapper.

    This looks at every living object, which takes some hundredths of a second.
    """
    modules = list(living_of(kinds_of(nn.Module)))
    stepped = stepped_by(optimizer)
    smallest = _smallest(modules, stepped)
    return None if smallest is None else _outermost_alike(smallest, modules)


def _holds(held: dict[int, int], wanted: dict[int, int]) -> bool:
    """Whether of the wanted tensors nearly all elements are held."""
    n_held = sum(n for key, n in wanted.items() if key in held)
    return n_held > 0 and n_held >= _ENOUGH * sum(wanted.values())


def _smallest(modules: Iterable[nn.Module], wanted: dict[int, int]) -> nn.Module | None:
    """The module with the fewest trained elements of those that hold the wanted ones; the first of equals."""
    best: nn.Module | None = None
    n_best = 0
    for module in modules:
        held = trainable(module.parameters())
        n = sum(held.values())
        if (best is None or n < n_best) and _holds(held, wanted):
            best, n_best = module, n
    return best


def _outermost_alike(module: nn.Module, modules: Iterable[nn.Module]) -> nn.Module:
    """The module around which all others are that train the same parameters: DDP's, or that of `torch.compile`."""
    own = trainable(module.parameters()).keys()
    alike = [m for m in modules if trainable(m.parameters()).keys() == own]
    inner = {id(child) for m in alike for child in m.modules() if child is not m}
    return next((m for m in alike if id(m) not in inner), module)


def _merged(parts: Sequence[tuple[nn.Module, Any]]) -> list[ModelOfOptimizers]:
    """One model for optimizers whose parts lie inside each other."""
    merged: list[tuple[nn.Module, list[Any]]] = []
    for module, optimizer in parts:
        around = next(
            (i for i, (other, _) in enumerate(merged) if _is_in(module, other) or _is_in(other, module)), None
        )
        if around is None:
            merged.append((module, [optimizer]))
        else:
            other, optimizers = merged[around]
            merged[around] = (module if _is_in(other, module) else other, [*optimizers, optimizer])
    return [ModelOfOptimizers(module, tuple(optimizers)) for module, optimizers in merged]


def _is_in(module: nn.Module, other: nn.Module) -> bool:
    return any(m is module for m in other.modules())


def enabled_grad_scalers() -> list[torch.amp.GradScaler]:
    """The GradScalers of the script that are in use."""
    return [scaler for scaler in living_of(kinds_of(torch.amp.GradScaler)) if scaler.is_enabled()]


def reshard(called: nn.Module) -> bool:
    """Let FSDP2 show the parameters that optimizers step: after a forward, its outermost module shows others.

    Returns:
        Whether the module has any of FSDP2's.
    """
    fsdp = sys.modules.get("torch.distributed.fsdp")
    cut = [] if fsdp is None else [m for m in called.modules() if isinstance(m, fsdp.FSDPModule)]
    for module in cut:
        module.reshard()  # the forward that follows gathers again
    return bool(cut)
