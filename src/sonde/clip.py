"""Clipping by the global norm: the one file that changes gradients."""

from __future__ import annotations

import math
from collections.abc import Iterable
from numbers import Real

import torch
from torch import Tensor

from sonde.measure.norms import sq_norms
from sonde.measure.placements import is_dtensor


def clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor], max_norm: float, *, error_if_nonfinite: bool = False
) -> Tensor:
    """Scale gradients in place so that their joint 2-norm is at most `max_norm`.

    As `torch.nn.utils.clip_grad_norm_`, for gradients that are whole on this rank (one process, or DDP). The norm is
    accumulated in fp64, so that large gradients on the CPU are not misjudged by up to 1e-3 as torch's are.

    Args:
        parameters: a tensor or tensors; those without a gradient are skipped, repeated ones count once.
        max_norm: the largest norm allowed, ≥ 0; 0 zeroes the gradients, `math.inf` only measures.
        error_if_nonfinite: raise when the norm is not finite; waits for the device.

    Returns:
        The norm before clipping, a 0-dim fp32 (fp64 for fp64 gradients) tensor.

    Raises:
        ValueError: when `max_norm` is negative or NaN, or a gradient is a DTensor.
        RuntimeError: with `error_if_nonfinite`, when the norm is not finite; gradients are as they were.
    """
    check_max_norm(max_norm)
    unique = {id(p): p for p in ([parameters] if isinstance(parameters, Tensor) else parameters)}
    with_grad = [p for p in unique.values() if p.grad is not None]
    grads = [p.grad for p in with_grad if p.grad is not None]
    if any(map(is_dtensor, grads)):
        raise ValueError("clip_grad_norm_ takes gradients that are whole on this rank, got a DTensor: use torch's")
    if not grads:
        return torch.tensor(0.0)
    device = grads[0].device
    by_device = [sq_norms([g for g in grads if g.device == d]).sum() for d in dict.fromkeys(g.device for g in grads)]
    total = torch.stack([of_device.to(device) for of_device in by_device]).sum().sqrt()
    return clip_with_norm_(with_grad, max_norm, total, error_if_nonfinite=error_if_nonfinite)


def clip_with_norm_(
    parameters: list[Tensor], max_norm: float, total_norm: Tensor, *, error_if_nonfinite: bool = False
) -> Tensor:
    """Scale gradients in place, given their joint norm.

    Args:
        parameters: tensors whose gradients are scaled by max_norm/(total_norm + 1e-6) where that is below 1.
        max_norm: checked already, see `check_max_norm`.
        total_norm: 0-dim tensor.
        error_if_nonfinite: as in `clip_grad_norm_`.

    Returns:
        `total_norm` in the gradients' dtype, fp32 at least.

    Raises:
        RuntimeError: with `error_if_nonfinite`, when the norm is not finite.
    """
    if error_if_nonfinite and not bool(torch.isfinite(total_norm)):
        raise RuntimeError(
            f"the gradient norm is {total_norm:g}, so gradients cannot be clipped to {max_norm:g}: "
            "find the loss that is not finite, or pass error_if_nonfinite=False"
        )
    double = any(p.dtype == torch.float64 for p in parameters)
    total_norm = total_norm.to(torch.float64 if double else torch.float32)
    if max_norm < math.inf:
        torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, total_norm)
    return total_norm


def check_max_norm(max_norm: float) -> None:
    """Refuse a threshold that is not one.

    Raises:
        ValueError: when it is negative, NaN or no number; a tensor is none, since its value may have to be waited for.
    """
    if isinstance(max_norm, bool) or not isinstance(max_norm, Real):
        raise ValueError(f"max_norm must be a number, got {max_norm!r}: use math.inf to measure without clipping")
    if math.isnan(max_norm) or max_norm < 0:
        raise ValueError(f"max_norm must be ≥ 0, got {max_norm}: use math.inf to measure without clipping")
