"""Models whose micro-batches no hook can measure, refused by name with what works there."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from sonde.parallel.placements import is_dtensor, is_fsdp1

_INSTEAD = "sonde.attach measures DDP, FSDP2 (fully_shard) and DTensors"
_STAGES = "torch.distributed.pipelining.stage"


_FSDP1 = (
    f"FSDP's first version does not show the gradients of micro-batches: {_INSTEAD}, and FSDP's own clip_grad_norm_ "
    "measures the norm"
)
_DATA_PARALLEL = (
    "nn.DataParallel copies the model to every GPU in each forward, and adds up their gradients before a hook sees "
    "them: start one process for each GPU (torchrun, accelerate launch), or show the process a single GPU by "
    "CUDA_VISIBLE_DEVICES=0"
)


def refuse_hidden_gradients(model: nn.Module) -> None:
    """Refuse wrappers that do not show the gradients of micro-batches.

    Raises:
        ValueError: for `nn.DataParallel`, FSDP's first version, DeepSpeed, and Megatron's own parallelism.
    """
    for module in model.modules():
        if isinstance(module, nn.DataParallel):
            raise ValueError(_DATA_PARALLEL)
        if is_fsdp1(type(module)):
            raise ValueError(_FSDP1)
        if _is_of_deepspeed(type(module)):
            raise ValueError(_deepspeed(type(module).__name__))
    for name, parameter in model.named_parameters():
        if hasattr(parameter, "ds_id"):
            raise ValueError(_deepspeed(f"ZeRO-3 holds {name!r} in parts"))
        # Megatron's DDP leaves .grad empty, and so do fused layers for it.
        if getattr(parameter, "main_grad", None) is not None:
            raise ValueError(
                f"the gradient of {name!r} is added up in .main_grad, as Megatron's own DDP and fused layers do, where "
                f"no hook sees micro-batches: {_INSTEAD}, and Megatron's own clip_grad measures the norm"
            )
        if getattr(parameter, "tensor_model_parallel", False) and not is_dtensor(parameter):
            raise ValueError(
                f"{name!r} is a shard of Megatron's tensor parallelism, and a plain tensor does not show over which "
                f"ranks: {_INSTEAD}; sonde.clip_grad_norm_ with mesh= and replicas= measures the norm"
            )


def refuse_inner_module(model: nn.Module) -> None:
    """Refuse a plain module that another module wraps: its gradients are reduced, and the module does not show how.

    Trainers hand the inner module to their callbacks.

    Raises:
        ValueError: when a living DDP module, one of FSDP's first version or a DeepSpeed engine holds the module.
    """
    wrapper = wrapper_around(model)
    if wrapper is None:
        return
    if is_fsdp1(type(wrapper)):
        raise ValueError(f"the model is inside a module of FSDP's first version. {_FSDP1}")
    if not isinstance(wrapper, DistributedDataParallel):
        raise ValueError(_deepspeed(type(wrapper).__name__))
    raise ValueError(
        "the model is inside a DistributedDataParallel module, which averages its gradients over ranks: pass that "
        "module, as trainer.model_wrapped or the result of accelerator.prepare (or process_group=, if you reduce "
        "the gradients yourself and that module is no longer used)"
    )


def refuse_stage_alone(model: nn.Module, instead: str) -> None:
    """Refuse a pipeline's stage whose other stages are not known: its own norm and noise are not the model's.

    Args:
        model: that may be, or hold, a part of a pipeline.
        instead: what the user can do.

    Raises:
        ValueError: when a living stage of `torch.distributed.pipelining`, one of several, runs a part of the model.
    """
    if not dist.is_initialized() or _STAGES not in sys.modules or _stage_in(model) is None:
        return
    gc.collect()  # stages that the user has let go of may live on in a cycle of references
    if (stage := _stage_in(model)) is not None:
        relation = "is" if stage.submod is model else "holds"
        raise ValueError(
            f"the model {relation} stage {stage.stage_index} of a pipeline of {stage.num_stages} stages, and its own "
            f"gradient is not that of the whole model: {instead}"
        )


def _stage_in(model: nn.Module) -> Any:
    """A living stage, one of several, that runs a part of the model; None without one."""
    own = {id(module) for module in model.modules()}
    stages = living_of(kinds_of(sys.modules[_STAGES].PipelineStage.__base__))  # also stages cut out by a tracer
    return next((stage for stage in stages if stage.num_stages > 1 and id(stage.submod) in own), None)


def wrapper_around(model: nn.Module) -> nn.Module | None:
    """The living DDP module, module of FSDP's first version or DeepSpeed engine that holds a module; None without one.

    This looks at every living object, which takes some hundredths of a second.
    """
    if not dist.is_initialized():  # as all of them need it
        return None
    ddp = kinds_of(DistributedDataParallel)
    wraps = [*ddp, *(kind for kind in kinds_of(nn.Module) if is_fsdp1(kind) or _is_of_deepspeed(kind))]
    for candidate in living_of(wraps):
        if candidate is not model and any(m is model for m in candidate.modules()):
            return candidate
    return None


def _is_of_deepspeed(kind: type) -> bool:
    return kind.__module__.split(".")[0] == "deepspeed"


def _deepspeed(what: str) -> str:
    return (
        f"DeepSpeed ({what}) does not show the gradients of micro-batches: {_INSTEAD}, and "
        "engine.get_global_grad_norm() has the norm"
    )


T = TypeVar("T")


def living_of(kinds: Sequence[type[T]]) -> Iterator[T]:
    """Every living object of these types, but not of types derived from them."""
    # Each object refers to its type, and the garbage collector finds referrers in C: to look at each object in Python
    # takes much longer. By type(), since some objects make up their __class__, or import modules to know it; by id,
    # since a type may have no hash.
    ids = {id(kind) for kind in kinds}
    return (each for each in gc.get_referrers(*kinds) if id(type(each)) in ids)


def kinds_of(kind: type[T]) -> list[type[T]]:
    """A type, and every type derived from it."""
    found = {id(kind): kind}
    to_look_at = [kind]
    while to_look_at:
        derived = [each for each in type.__subclasses__(to_look_at.pop()) if id(each) not in found]
        found.update((id(each), each) for each in derived)
        to_look_at += derived
    return list(found.values())
