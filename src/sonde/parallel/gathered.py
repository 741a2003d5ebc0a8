"""The whole parameters that FSDP2 gathers for forward and backward: the leaves whose gradients backward makes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from sonde.parallel.placements import fsdp_modules, reshard


def gathered_parameters(model: nn.Module) -> dict[int, nn.Parameter]:
    """The gathered parameter that stands in for each sharded one, by the `id` of the sharded one.

    FSDP2 makes a gathered parameter at its first gathering and keeps it: later it only frees and refills its memory. So
    a hook on it sees the gradient of every backward on this rank, before FSDP2 adds it up or reduces it.

    Each module of FSDP2 is gathered once, one after another. All ranks have to call this. Afterwards the model shows
    its sharded parameters.

    Raises:
        ValueError: for parameters on the meta device.
    """
    modules = fsdp_modules(model)
    if modules and (meta := next((name for name, p in model.named_parameters() if p.is_meta), None)):
        raise ValueError(f"{meta!r} is on the meta device, which holds no values: attach after to_empty() and loading")
    reshard(model)  # after a forward, the outermost module shows its gathered parameters
    gathered: dict[int, nn.Parameter] = {}
    for module in modules:
        sharded = list(_own_parameters(module))
        module.unshard()
        try:
            shown = list(_own_parameters(module))
        finally:
            module.reshard()
        gathered |= {id(old): new for old, new in zip(sharded, shown, strict=True) if new is not old}
    return gathered


def reduction_dtypes(model: nn.Module) -> list[torch.dtype]:
    """The dtypes in which FSDP2 reduces gradients over ranks, where a policy sets them."""
    # A private path, since torch has no public one; a test guards it.
    policies = [state._mp_policy for state in fsdp_states(model)]
    return list(dict.fromkeys(p.reduce_dtype for p in policies if p.reduce_dtype is not None))


def shown_after_forward(model: nn.Module) -> dict[int, nn.Parameter]:
    """The sharded parameter in whose place FSDP2 shows another since a forward, by the `id` of the one that it shows.

    Where `reshard_after_forward` is a number of ranks, each forward leaves new parameters in the model, cut over that
    many ranks, until FSDP2 gathers again.
    """
    # A record gets this private attribute at the first such forward; a test guards it.
    shown = {
        record.sharded_param: getattr(record, "_sharded_post_forward_param", None)
        for group in fsdp_groups(model)
        for record in group.fsdp_params
    }
    return {id(parameter): own for own, parameter in shown.items() if parameter is not None}


def fsdp_groups(model: nn.Module) -> list[Any]:
    """FSDP2's own records of the parameters that it gathers together."""
    # Private paths, since torch has no public ones; tests guard them.
    groups: list[Any] = []
    for state in fsdp_states(model):
        groups += getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]
    return [group for group in groups if group is not None]


def fsdp_states(model: nn.Module) -> list[Any]:
    """FSDP2's own records of the modules that `fully_shard` was called on."""
    return [module._get_fsdp_state() for module in fsdp_modules(model)]


def _own_parameters(module: nn.Module) -> Iterator[nn.Parameter]:
    """The parameters of a module and its descendants, except those of modules of FSDP2 inside it."""
    yield from module.parameters(recurse=False)
    for child in module.children():
        if not hasattr(child, "unshard"):
            yield from _own_parameters(child)
