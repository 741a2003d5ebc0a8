"""The gradient of a sum over micro-batches, by one backward each, that leaves `.grad` and the ranks' peace alone."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from sonde.parallel.placements import is_fully_sharded
from sonde.parallel.process_groups import start_reduce
from sonde.policy.scoring.optimizer_step import Direction

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


@dataclass(frozen=True, eq=False)
class GradientSum:
    """A sum of gradients.

    Attributes:
        of: for each parameter its part, 0 where it was not used; sharded as the parameter.
        flat: the one buffer that all of these are views of; None under FSDP2, which has summed over ranks already.
    """

    of: Direction
    flat: Tensor | None

    def over_ranks(self, group: dist.ProcessGroup | None) -> Direction:
        """The sum over all ranks, by one all-reduce at most."""
        if self.flat is not None and (work := start_reduce(self.flat, group)):
            work.wait()
        return self.of


def summed_gradient(
    function: Callable[[Any], Tensor],
    model: nn.Module,
    batches: Sequence[Any],
    *,
    n_ranks: int = 1,
    dtype: torch.dtype = torch.float32,
) -> GradientSum:
    """∇ Σ function(batch), for every trainable parameter, over the batches of this rank.

    Each micro-batch is one backward. Under DDP none is reduced over ranks; under FSDP2 the last one is, by itself.

    Args:
        function: a 0-dim tensor from a micro-batch.
        model: plain, wrapped in DDP, or fully sharded.
        batches: this rank's; under FSDP2 as many on every rank.
        n_ranks: under FSDP2, over how many it reduces.
        dtype: of the buffer, except under FSDP2, which reduces as it was told.

    Raises:
        ValueError: for a dtype that is no floating point, or parameters that a hook of somebody's own consumes after
            accumulation, as an optimizer in the backward does.
    """
    if dtype not in DTYPES:
        raise ValueError(f"the buffer must be one of {', '.join(map(str, DTYPES))}, got {dtype}")
    parameters = [p for p in model.parameters() if p.requires_grad]
    if any(map(is_fully_sharded, model.modules())):
        _check_nobody_takes(parameters)
        with _set_aside(parameters):
            return GradientSum(_under_fsdp(function, model, parameters, batches, n_ranks), None)
    flat = torch.zeros(sum(p.numel() for p in parameters), dtype=dtype, device=parameters[0].device)
    views = flat.split([p.numel() for p in parameters])
    sums: Direction = {p: view.view(p.shape) for p, view in zip(parameters, views, strict=True)}

    def add(parameter: Tensor, grad: Tensor) -> None:
        sums[parameter].add_(grad)

    with gradients_taken(model, add):
        for batch in batches:
            function(batch).backward()
    return GradientSum(sums, flat)


@contextlib.contextmanager
def gradients_taken(model: nn.Module, take: Callable[[Tensor, Tensor], None]) -> Iterator[None]:
    """Backwards inside give each parameter's gradient to `take`, dense, and leave `.grad` and other ranks alone.

    Args:
        model: plain or in DDP.
        take: called with a parameter and what this backward adds to its gradient, which is freed afterwards.

    Raises:
        ValueError: for parameters that a hook of somebody's own consumes after accumulation.
    """
    parameters = [p for p in model.parameters() if p.requires_grad]
    _check_nobody_takes(parameters)

    def hook(parameter: Tensor) -> None:
        assert parameter.grad is not None
        grad, parameter.grad = parameter.grad, None
        take(parameter, grad.to_dense() if grad.is_sparse else grad)

    with _set_aside(parameters), contextlib.ExitStack() as stack:
        for parameter in parameters:
            stack.callback(parameter.register_post_accumulate_grad_hook(hook).remove)
        for module in model.modules():
            if isinstance(module, DistributedDataParallel):
                stack.enter_context(module.no_sync())
        yield


def _check_nobody_takes(parameters: Sequence[Tensor]) -> None:
    for parameter in parameters:
        # Private, as there is no public way to ask; what would run is worse.
        if getattr(parameter, "_post_accumulate_grad_hooks", None):
            raise ValueError(
                "a hook runs after each gradient is accumulated, perhaps an optimizer in the backward: it would take "
                "this backward for one of the training's; use update='step', which needs none"
            )


@contextlib.contextmanager
def _set_aside(parameters: Sequence[Tensor]) -> Iterator[None]:
    held = [p.grad for p in parameters]
    try:
        for parameter in parameters:
            parameter.grad = None
        yield
    finally:
        for parameter, grad in zip(parameters, held, strict=True):
            parameter.grad = grad


def _under_fsdp(
    function: Callable[[Any], Tensor],
    model: nn.Module,
    parameters: Sequence[Tensor],
    batches: Sequence[Any],
    n_ranks: int,
) -> Direction:
    """Only the last backward reduces."""
    sharded: list[Any] = [m for m in model.modules() if is_fully_sharded(m)]
    try:
        for i, batch in enumerate(batches):
            for module in sharded:
                module.set_requires_gradient_sync(i == len(batches) - 1, recurse=False)
            function(batch).backward()
    finally:
        for module in sharded:
            module.set_requires_gradient_sync(True, recurse=False)
    divisors = _divisors(sharded, n_ranks)
    return {p: torch.zeros_like(p) if p.grad is None else p.grad.mul_(divisors.get(p, 1.0)) for p in parameters}


def _divisors(sharded: Sequence[Any], n_ranks: int) -> dict[Tensor, float]:
    """What FSDP divides each parameter's sum over ranks by: their number, unless the user has set another."""
    divisors = {}
    for module in sharded:
        state = module._get_fsdp_state()  # private, as factors can be set but not read
        groups = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]
        for group in groups:
            for parameter in group.fsdp_params if group is not None else ():
                divisors[parameter.sharded_param] = float(group.gradient_divide_factor or n_ranks)
    return divisors
