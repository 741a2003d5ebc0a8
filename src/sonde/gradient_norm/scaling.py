"""The second half of a clip: gradients whose norm is known are scaled. Only here they change."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Iterable, Sequence
from numbers import Real
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from sonde.gradient_norm.agreement import first_names
from sonde.gradient_norm.global_norm import GlobalNorm
from sonde.gradient_norm.plan import Collected, NormPlan
from sonde.gradient_norm.power_sums import LARGEST_ORDER
from sonde.parallel.devices import is_at_hand, to_device, widened
from sonde.parallel.placements import from_local, local_tensor, spec_of

Nonfinite = Literal["ignore", "skip", "raise"]
"""What to do when the norm is not finite; `clip_grad_norm_` says what each means."""

_NONFINITE = get_args(Nonfinite)
_EPS = 1e-6  # torch's, so that clipped gradients equal torch's


def clip_measured_(
    plan: NormPlan,
    measured: GlobalNorm,
    max_norm: float | None,
    *,
    nonfinite: Nonfinite = "ignore",
) -> Tensor:
    """The second half of `clip_grad_norm_`: scale gradients whose norm is known. Call it under `no_grad`.

    Args:
        plan: the plan that was measured.
        measured: its norm.
        max_norm: checked already, as is `nonfinite`; see `check_options`.
        nonfinite: what to do when the norm is not finite.

    Returns:
        The norm, in fp32, or fp64 if a gradient is.

    Raises:
        ValueError: on a GPU, with nonfinite="raise", if another rank found an error or ranks disagree.
        RuntimeError: when asked for, if the norm is not finite.
    """
    # On the CPU, an error of another rank has been raised by now. A GPU is not waited for: it only learns of the error
    # here, by tensors. The norm is NaN and, further below, the coefficient 1, so that gradients stay as they are.
    norm = measured.rounded(measured.norm)
    # Whether to skip is decided on the device too: the mask is passed on, never read here.
    skip = ~measured.is_usable if nonfinite == "skip" else None
    # Before anything is written, so that gradients are unchanged if it fails.
    if nonfinite == "raise" and not bool(measured.is_usable):
        if error := measured.error_of_peers(plan):
            raise error
        raise RuntimeError(_where_not_finite(plan, measured, norm, max_norm))
    if max_norm is not None:
        _write_back(plan, measured.collected)
        coefficient = _coefficient(max_norm, measured, norm.dtype)
        for gradients in measured.collected:
            if gradients.locals:
                scale_(gradients.locals, coefficient, skip)
    return norm


def clip_coefficient(max_norm: float, norm: Tensor) -> Tensor:
    """What gradients of this norm are multiplied by, so that their norm is at most `max_norm`, finite: at most 1."""
    return torch.clamp(max_norm / (norm + _EPS), max=1.0)


def _coefficient(max_norm: float, measured: GlobalNorm, dtype: torch.dtype) -> Tensor | None:
    """What torch computes from the norm that is returned; None if it is known to be 1.

    The same bits on every rank, for any cut: in fp32, unless a rank has fp64 gradients, or the norm of finite gradients
    is too large for fp32.
    """
    exact = measured.norm
    if max_norm == math.inf:
        return None
    if is_at_hand(exact.device):
        number = _coefficient_at_hand(max_norm, exact.item(), is_double=bool(measured.is_double))
        return None if number == 1.0 else torch.scalar_tensor(number, dtype=dtype, device="cpu")
    rounded = exact.to(torch.float32)
    in_fp32 = widened(clip_coefficient(max_norm, rounded))
    uses_exact = rounded.isinf() | measured.is_double
    coefficient = torch.where(uses_exact, clip_coefficient(max_norm, exact), in_fp32).to(dtype)
    return torch.where(measured.failed, 1.0, coefficient)


def _coefficient_at_hand(max_norm: float, norm: float, *, is_double: bool) -> float:
    """`clip_coefficient` in Python numbers: its operations in fp32 on tensors would take longer than a small norm."""
    rounded = _in_fp32(norm)
    if is_double or math.isinf(rounded):
        product = max_norm * (1.0 / (norm + _EPS))
    else:
        product = _in_fp32(_in_fp32(max_norm) * _in_fp32(1.0 / _in_fp32(rounded + _in_fp32(_EPS))))
    return 1.0 if product > 1.0 else product  # NaN stays


def _in_fp32(number: float) -> float:
    return ctypes.c_float(number).value


def alike(gradients: Iterable[Tensor]) -> Iterable[list[Tensor]]:
    """This rank's parts of gradients, in lists of one device and dtype, which one kernel takes."""
    found: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for local in map(local_tensor, gradients):
        found.setdefault((local.device, local.dtype), []).append(local)
    return found.values()


def scale_(grads: list[Tensor], coefficient: Tensor | None, skip: Tensor | None = None) -> None:
    """Multiply gradients of one device, or set them to 0.

    Args:
        grads: changed in place.
        coefficient: 0-dim; None for 1: to multiply by 1 changes nothing and takes as long as the norm.
        skip: 0-dim bool; whether to set all to 0.
    """
    device = grads[0].device
    grads = [grad._values() if grad.is_sparse else grad for grad in grads]
    if coefficient is not None:
        torch._foreach_mul_(grads, to_device(coefficient, device))
    if skip is not None:
        skip = to_device(skip, device)
        for grad in grads:
            grad.masked_fill_(skip, 0.0)  # a product would not do: 0 times NaN is NaN


def _write_back(plan: NormPlan, collected: Sequence[Collected]) -> None:
    """Put summed gradients in place of partial ones: otherwise the optimizer would sum each of them again.

    That of a sharded parameter, which the optimizer redistributes anyway, is left partial, as torch's clip leaves it.
    """
    for gradients in collected:
        if gradients.key.is_partial:
            for index, gradient in zip(gradients.indices, gradients.gradients, strict=True):
                parameter = plan.parameters[index]
                if parameter.grad is not None:
                    is_cut = any(placement.is_shard() for placement in spec_of(parameter).placements)
                    parameter.grad = _as_partial(gradient, spec_of(parameter.grad)) if is_cut else gradient


def _as_partial(whole: Tensor, spec: Any) -> Tensor:
    """A summed gradient, placed as it was before the sum: the first rank along each axis holds it, the others zeros."""
    axes = [a for a, placement in enumerate(spec.placements) if placement.is_partial("sum")]
    is_first = all(spec.mesh.get_coordinate()[axis] == 0 for axis in axes)
    local = local_tensor(whole)
    return from_local(local if is_first else torch.zeros_like(local), spec)


def _where_not_finite(plan: NormPlan, measured: GlobalNorm, norm: Tensor, max_norm: float | None) -> str:
    bad_names = [
        plan.name_of(index)
        for gradients in measured.collected
        for index, local in zip(gradients.indices, gradients.locals, strict=True)
        if not bool(torch.isfinite(local._values() if local.is_sparse else local).all())
    ]
    otherwise = "nonfinite='skip'" if max_norm is not None else "nonfinite='ignore' (error_if_nonfinite=False)"
    if bad_names:
        where = f"not finite in {first_names(bad_names)}"
    elif measured.vector is None:
        where = f"every gradient is finite, but their norm overflows in {str(norm.dtype).removeprefix('torch.')}"
    else:
        where = "every gradient of this rank is finite: gradients of another rank are not, or it overflows in fp32"
    to = "" if max_norm is None else f", so gradients cannot be clipped to {max_norm:g}"
    return f"the gradient norm is {norm:g}{to}: {where}. Find the loss that is too large, or pass {otherwise}"


def check_max_norm(max_norm: object) -> float:
    """Refuse a threshold that cannot be used.

    Args:
        max_norm: a number, or a tensor of one element on the CPU. (To read one on a GPU would wait for it.)

    Returns:
        The threshold as a float.

    Raises:
        ValueError: when it is negative, NaN or not a number.
    """
    if type(max_norm) is float and max_norm >= 0:  # the usual case: to ask for a Real takes ten times as long
        return max_norm
    if isinstance(max_norm, Tensor) and is_at_hand(max_norm.device) and max_norm.numel() == 1:
        max_norm = max_norm.item()
    if isinstance(max_norm, bool) or not isinstance(max_norm, Real):
        raise ValueError(f"max_norm must be a number, got {max_norm!r}: convert it, for example by float()")
    max_norm = float(max_norm)
    if math.isnan(max_norm) or max_norm < 0:
        raise ValueError(f"max_norm must be ≥ 0, got {max_norm}: use math.inf to measure without clipping")
    return max_norm


def check_order(norm_type: object) -> float:
    """Refuse a p that cannot be used.

    Raises:
        ValueError: when it is neither a number from above 0 to 6 nor infinite.
    """
    try:
        order = float(norm_type)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError, RuntimeError):  # RuntimeError: a tensor of several elements
        order = math.nan
    if not order > 0:
        raise ValueError(f"norm_type must be > 0, got {norm_type!r}: use 2.0, or math.inf for the largest element")
    if LARGEST_ORDER < order < math.inf:
        raise ValueError(
            f"norm_type must be at most {LARGEST_ORDER:g}, or math.inf, got {norm_type!r}: higher powers of gradients "
            "overflow or vanish, even in fp64. Use math.inf for the largest element, which high powers approach"
        )
    return order


def check_options(max_norm: float | None, nonfinite: str) -> float | None:
    """Refuse options that cannot be used, before anything is read.

    Args:
        max_norm: None, or as `check_max_norm` takes it.
        nonfinite: one of `Nonfinite`.

    Returns:
        The threshold as a float, or None.

    Raises:
        ValueError: naming what is wrong and what would be right.
    """
    if max_norm is not None:
        max_norm = check_max_norm(max_norm)
    if nonfinite not in _NONFINITE:
        raise ValueError(f"nonfinite must be one of {', '.join(_NONFINITE)}, got {nonfinite!r}: use one of them")
    return max_norm
