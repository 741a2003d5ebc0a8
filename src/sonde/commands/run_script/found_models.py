"""Finds the model that an optimizer steps: from the module that the script calls, or among all living modules."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from sonde.parallel.placements import is_dtensor
from sonde.parallel.refused_models import kinds_of, living_of
from sonde.parallel.unwrap import parameters_of

_ENOUGH = 0.99
"""Part of an optimizer's elements that its model must hold. The rest may be a temperature, or an entropy's weight."""


class ModelOfOptimizers(NamedTuple):
    """A model as the script calls it, and the optimizers that step it, in the order in which they were made."""

    model: nn.Module
    optimizers: tuple[Any, ...]


def trainable(tensors: Iterable[Tensor]) -> dict[int, int]:
    """The number of elements of each tensor that is trained, by its identity."""
    return {id(t): t.numel() for t in tensors if t.requires_grad}


def stepped_by(optimizer: Any) -> dict[int, int]:
    """The number of elements of each tensor that an optimizer steps, by its identity."""
    return trainable(parameters_of(optimizer))


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
    parts = [(part, o) for o in inside if (part := _model_of(o, modules)) is not None]
    outer = dict.fromkeys(part for part, _ in parts if not any(_is_inside(part, other) for other, _ in parts))
    return [
        ModelOfOptimizers(model, tuple(o for part, o in parts if part is model or _is_inside(part, model)))
        for model in outer
    ]


def model_among_living(optimizer: Any) -> nn.Module | None:
    """The model of an optimizer, of all modules that are alive: the smallest that holds its parameters, or its wrapper.

    This looks at every living object, which takes some hundredths of a second.
    """
    return _model_of(optimizer, list(living_of(kinds_of(nn.Module))))


def _model_of(optimizer: Any, modules: Sequence[nn.Module]) -> nn.Module | None:
    """The module with the fewest trained elements of those that hold an optimizer's; of equals the outermost.

    The outermost is DDP's, or that of `torch.compile`.
    """
    wanted = stepped_by(optimizer)
    holding = [(m, held) for m in modules if _holds(held := trainable(m.parameters()), wanted)]
    if not holding:
        return None
    smallest, own = min(holding, key=lambda each: sum(each[1].values()))
    alike = [m for m, held in holding if held.keys() == own.keys()]
    return next((m for m in alike if not any(_is_inside(m, other) for other in alike)), smallest)


def _holds(held: dict[int, int], wanted: dict[int, int]) -> bool:
    """Whether of the wanted tensors nearly all elements are held."""
    n_held = sum(n for key, n in wanted.items() if key in held)
    return n_held > 0 and n_held >= _ENOUGH * sum(wanted.values())


def _is_inside(module: nn.Module, other: nn.Module) -> bool:
    return module is not other and any(m is module for m in other.modules())


def is_reduced_by_hand(model: nn.Module) -> bool:
    """Whether neither DDP nor FSDP2 averages the gradients of a model, or of a part of it, over the ranks of a job."""
    if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
        return False
    has_ddp = any(isinstance(module, DistributedDataParallel) for module in model.modules())
    return not has_ddp and not any(map(is_dtensor, model.parameters()))


def enabled_grad_scaler() -> torch.amp.GradScaler | None:
    """The GradScaler that the script uses; None without one.

    Raises:
        ValueError: when there are several, since nothing shows which of them scales a model's loss.
    """
    scalers = [scaler for scaler in living_of(kinds_of(torch.amp.GradScaler)) if scaler.is_enabled()]
    if len(scalers) > 1:
        raise ValueError(
            f"the script uses {len(scalers)} GradScalers, and nothing shows which of them scales this model's loss: "
            "use one for all models, as torch allows, or attach by sonde.attach(grad_scaler=...)"
        )
    return scalers[0] if scalers else None


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
