"""FSDP2 gathers parameters in 32 bits while responses are scored, whatever its mixed precision."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from sonde.parallel.gathered import fsdp_groups, fsdp_states
from sonde.parallel.placements import reshard
from sonde.policy.scoring.precision import NARROW

_KEPT = ("all_gather_outputs", "_unsharded_param", "_unsharded_inner_tensors", "_sharded_param_data")
"""What FSDP2 gathers, and what it keeps of that until the next time; private, since torch has no public names."""


def gathers_narrow(model: nn.Module) -> bool:
    """Whether FSDP2 gathers some of the model's parameters in 16 bits."""
    return any(_gathered_dtype(p) in NARROW for p in _parameters(model))


def why_not_in_float32(model: nn.Module) -> str:
    """Why FSDP2 cannot gather the model's parameters in 32 bits; empty if it can."""
    if any(hasattr(p.sharded_param.to_local(), "fsdp_post_all_gather") for p in _parameters(model)):
        return "FSDP2 gathers parameters of their own kind, such as float8"
    return ""


def has_run(model: nn.Module) -> bool:
    """Whether FSDP2 has run the model: in the first forward it decides on dtypes."""
    return all(hasattr(p, "param_dtype") for p in _parameters(model))


@contextlib.contextmanager
def gathered_in_float32(model: nn.Module, residuals: Mapping[Tensor, Tensor] | None = None) -> Iterator[None]:
    """Forwards inside gather parameters of 16 bits in 32, and cast neither inputs nor outputs to 16.

    On exit, FSDP2 has its own gathered parameters again, with whatever hooks they have.

    Args:
        model: with modules of FSDP2, that `why_not_in_float32` says nothing against.
        residuals: what is added to this rank's parts of parameters before they are gathered: the part of a step that 16
            bits do not hold.
    """
    from torch.distributed.fsdp import MixedPrecisionPolicy

    reshard(model)
    states = fsdp_states(model)
    policies = [state._mp_policy for state in states]
    changed = [p for p in _parameters(model) if _gathered_dtype(p) in NARROW]
    kept = [(p.param_dtype, {name: vars(p)[name] for name in _KEPT if name in vars(p)}) for p in changed]
    try:
        for state, policy in zip(states, policies, strict=True):
            if policy.param_dtype in NARROW or policy.output_dtype in NARROW:
                state._mp_policy = MixedPrecisionPolicy(param_dtype=torch.float32)
        for p in changed:
            p.param_dtype = None if p.orig_dtype == torch.float32 else torch.float32
            if residuals and (rest := residuals.get(p.sharded_param)) is not None:
                p.param_dtype = None
                # Flat; only parameters that are cut along their first dim have padding, and have it at the end.
                p._sharded_param_data = p._sharded_param_data.float()
                p._sharded_param_data[: rest.numel()].add_(rest.flatten())
            p.all_gather_outputs, p._unsharded_inner_tensors = [], []
            vars(p).pop("_unsharded_param", None)
        yield
    finally:
        reshard(model)
        for p, (dtype, gathered) in zip(changed, kept, strict=True):
            p.param_dtype = dtype
            for name in _KEPT:
                vars(p).pop(name, None)
            vars(p).update(gathered)
        for state, policy in zip(states, policies, strict=True):
            state._mp_policy = policy


def _parameters(model: nn.Module) -> list[Any]:
    """FSDP2's records of the parameters that it gathers."""
    return [p for group in fsdp_groups(model) for p in group.fsdp_params]


def _gathered_dtype(record: Any) -> torch.dtype:
    """The dtype in which FSDP2 gathers a parameter."""
    dtype: torch.dtype = getattr(record, "param_dtype", None) or record.sharded_param.dtype
    return dtype
