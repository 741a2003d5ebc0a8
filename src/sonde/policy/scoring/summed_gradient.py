"""The gradient of a sum over micro-batches, one backward each, without changing `.grad` or starting collectives."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from sonde.parallel.model_state import preserve_gradients
from sonde.parallel.placements import fsdp_groups, is_fully_sharded
from sonde.policy.scoring.optimizer_step import Direction


def summed_gradient(
    function: Callable[[Any], Tensor],
    model: nn.Module,
    batches: Sequence[Any],
    *,
    n_ranks: int = 1,
) -> tuple[Direction, Tensor | None]:
    """∇ Σ function(batch), for every trainable parameter, over the batches of this rank.

    Each micro-batch takes one backward. Under DDP no backward reduces over ranks; under FSDP2 the last backward does.

    Args:
        function: makes a 0-dim tensor of a micro-batch.
        model: plain, wrapped in DDP, or fully sharded.
        batches: this rank's micro-batches; under FSDP2 as many on every rank.
        n_ranks: under FSDP2, the number of ranks that it reduces over.

    Returns:
        Each parameter's part, sharded as the parameter, 0 if it was not used; and the buffer that all parts are views
        of, fp32, to be summed over ranks: None under FSDP2, which has summed over them in the dtype of its own mixed
        precision.

    Raises:
        ValueError: for parameters whose gradient another hook consumes after accumulation, as an optimizer in the
            backward does.
    """
    parameters = [p for p in model.parameters() if p.requires_grad]
    if any(map(is_fully_sharded, model.modules())):
        check_no_other_hook(parameters)
        check_nothing_waits(model)
        with preserve_gradients(parameters):
            return _under_fsdp(function, model, parameters, batches, n_ranks), None
    flat = torch.zeros(sum(p.numel() for p in parameters), dtype=torch.float32, device=parameters[0].device)
    views = flat.split([p.numel() for p in parameters])
    sums: Direction = {p: view.view(p.shape) for p, view in zip(parameters, views, strict=True)}

    def add(index: int, grad: Tensor) -> None:
        sums[parameters[index]].add_(grad)

    with gradients_taken(model, parameters, add):
        for batch in batches:
            function(batch).backward()
    return sums, flat


@contextlib.contextmanager
def gradients_taken(model: nn.Module, leaves: Sequence[Tensor], take: Callable[[int, Tensor], None]) -> Iterator[None]:
    """Backwards inside give each leaf's gradient to `take`, dense. They leave `.grad` and other ranks alone.

    Args:
        model: plain, in DDP, or cut over ranks.
        leaves: its trainable parameters; under FSDP2, the whole parameters that FSDP2 gathers.
        take: called with a leaf's index and the gradient that this backward adds; the gradient is freed afterwards.

    Raises:
        ValueError: for parameters whose gradient another hook consumes after accumulation.
    """
    check_no_other_hook(leaves)

    def hook(index: int, leaf: Tensor) -> None:
        assert leaf.grad is not None
        # autograd adds into an empty .grad, so this is the gradient of this backward alone.
        grad, leaf.grad = leaf.grad, None
        take(index, grad.to_dense() if grad.is_sparse else grad)

    with preserve_gradients(leaves), contextlib.ExitStack() as stack:
        for index, leaf in enumerate(leaves):
            stack.callback(leaf.register_post_accumulate_grad_hook(functools.partial(hook, index)).remove)
        # The forward ran on the module inside DDP; no_sync() keeps DDP's own hooks from reducing.
        for module in model.modules():
            if isinstance(module, DistributedDataParallel):
                stack.enter_context(module.no_sync())
        yield


def check_no_other_hook(parameters: Sequence[Tensor]) -> None:
    """Refuse parameters whose gradient another hook consumes after accumulation.

    Raises:
        ValueError: with the likely cause.
    """
    for parameter in parameters:
        # A private attribute, since there is no public way to ask: running such a hook would change the training.
        if getattr(parameter, "_post_accumulate_grad_hooks", None):
            raise ValueError(
                "a hook runs after each gradient is accumulated, perhaps an optimizer in the backward. It would take "
                "this backward for one of the training's: leave out what needs a backward, which is causes=True, "
                "update='gradient', compare() and HoldEntropy"
            )


def _under_fsdp(
    function: Callable[[Any], Tensor],
    model: nn.Module,
    parameters: Sequence[Tensor],
    batches: Sequence[Any],
    n_ranks: int,
) -> Direction:
    """The sum in `.grad`, which only the last backward reduces over ranks."""
    sharded: list[Any] = [m for m in model.modules() if is_fully_sharded(m)]
    with reduces_every_backward(model):
        for i, batch in enumerate(batches):
            for module in sharded:
                module.set_requires_gradient_sync(i == len(batches) - 1, recurse=False)
            function(batch).backward()
    # FSDP divides the reduced sum, since training averages over ranks: multiplying makes it a sum again.
    divisors = divisors_of(model, n_ranks)
    return {p: torch.zeros_like(p) if p.grad is None else p.grad.mul_(divisors.get(p, 1.0)) for p in parameters}


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
