"""How FSDP2 reduces gradients over ranks: which backwards it reduces, by what it divides, and what still waits.

FSDP2 has public setters for these, and no getters.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from torch import Tensor, nn

from sonde.parallel.gathered import fsdp_groups


@contextlib.contextmanager
def reduces_every_backward(model: nn.Module) -> Iterator[None]:
    """Every backward inside is reduced over ranks. On exit, FSDP2 reduces those that it reduced before.

    Args:
        model: with modules of FSDP2, or without.
    """
    groups = fsdp_groups(model)
    flags = [(group.reduce_grads, group.all_reduce_grads) for group in groups]
    try:
        for group in groups:
            group.reduce_grads = group.all_reduce_grads = True
        yield
    finally:
        for group, (reduces, all_reduces) in zip(groups, flags, strict=True):
            group.reduce_grads, group.all_reduce_grads = reduces, all_reduces


def check_nothing_waits(model: nn.Module) -> None:
    """Refuse a model whose last backward has not been reduced: the next reduction would add it.

    Raises:
        ValueError: when gradients wait inside FSDP2.
    """
    for group in fsdp_groups(model):
        waits = getattr(group, "_partial_reduce_output", None) is not None
        for parameter in group.fsdp_params:
            gathered = getattr(parameter, "_unsharded_param", None)
            waits |= parameter.unsharded_accumulated_grad is not None
            waits |= gathered is not None and gathered.grad is not None
        if waits:
            raise ValueError(
                "gradients of an earlier backward wait inside FSDP2 to be reduced over ranks, and a measurement would "
                "reduce them: measure before the first backward of a window, or after a backward with "
                "set_requires_gradient_sync(True)"
            )


def divisors_of(model: nn.Module, n_ranks: int) -> dict[Tensor, float]:
    """The divisor of the sum over ranks of each parameter that FSDP2 shards.

    Args:
        model: with modules of FSDP2, or without.
        n_ranks: over which FSDP2 reduces, which it divides by unless the user has set another divisor.
    """
    return {
        parameter.sharded_param: float(group.gradient_divide_factor or n_ranks)
        for group in fsdp_groups(model)
        for parameter in group.fsdp_params
    }
