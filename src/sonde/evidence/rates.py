"""How the learning rate follows the batch size, and how it is held there, whatever a training's schedule sets."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

RateRule = Literal["none", "linear", "sqrt", "adam"] | Mapping[int, float] | Callable[[float], float]
"""By name; or the multiple of the reference's rate, by batch size or as a function of batch / reference."""
_RULES: Mapping[str, Callable[[float], float]] = {
    "none": lambda ratio: 1.0,
    "linear": lambda ratio: ratio,
    "sqrt": math.sqrt,
    "adam": math.sqrt,
}
_WORDS = {
    "none": "the same rate for every batch",
    "linear": "rate × batch / {0:g}",
    "sqrt": "rate × √(batch / {0:g})",
    "adam": "rate × √(batch / {0:g}), with Adam's 1 − β × batch / {0:g} and ε / √(batch / {0:g})",
}


def usual_rule(optimizers: Sequence[torch.optim.Optimizer]) -> RateRule:
    """The rule that is usual for some optimizers: "linear" for SGD, "sqrt" for all that normalise their steps."""
    return "linear" if all(isinstance(optimizer, torch.optim.SGD) for optimizer in optimizers) else "sqrt"


def rule_in_words(rule: RateRule, reference: float) -> str:
    """What a rule does.

    Example:
        >>> rule_in_words("sqrt", 16)
        'rate × √(batch / 16)'
    """
    return _WORDS[rule].format(reference) if isinstance(rule, str) else "multiples of the rate given by the user"


def rate_factor(rule: RateRule, batch: int, reference: int) -> float:
    """The multiple of the reference's rate at a batch size.

    Args:
        rule: see `RateRule`.
        batch: units of one optimizer step.
        reference: likewise, of the batch size whose rate is kept.

    Raises:
        ValueError: for an unknown rule, a batch size that a mapping leaves out, or a multiple that is not positive.

    Example:
        >>> rate_factor("sqrt", 64, 16), rate_factor({64: 1.5}, 64, 16)
        (2.0, 1.5)
    """
    if batch == reference:
        return 1.0
    if isinstance(rule, Mapping):
        if batch not in rule:
            raise ValueError(f"rate_rule has no multiple for a batch of {batch}, got {dict(rule)}: add it")
        factor = float(rule[batch])
    elif callable(rule):
        factor = float(rule(batch / reference))
    elif rule in _RULES:
        factor = _RULES[rule](batch / reference)
    else:
        raise ValueError(
            f"rate_rule must be one of {', '.join(_RULES)}, a mapping or a function, got {rule!r}: pass "
            'rate_rule="sqrt" for Adam, "linear" for SGD'
        )
    if not 0 < factor < math.inf:
        raise ValueError(f"rate_rule gives {factor} times the rate for a batch of {batch}: it must be positive")
    return factor


def largest_rate(optimizers: Sequence[torch.optim.Optimizer]) -> float | None:
    """The largest learning rate of all groups; None without any."""
    rates = [float(group["lr"]) for each in optimizers for group in each.param_groups if "lr" in group]
    return max(rates, default=None)


def options_at(group: Mapping[str, Any], rule: RateRule, batch: int, reference: int) -> dict[str, Any]:
    """The options of a group of parameters that a rule changes, at a batch size.

    Args:
        group: of an optimizer, as it is at the reference.
        rule: see `RateRule`.
        batch: units of one optimizer step.
        reference: likewise, of the batch size whose options are kept.

    Raises:
        ValueError: as `rate_factor`; for the rule "adam" where 1 − β would pass 1.

    Reference:
        Malladi et al. 2022, arXiv:2205.10287, the square root scaling rule, for "adam".

    Example:
        >>> options_at({"lr": 0.25, "betas": (0.75, 0.9375), "eps": 2e-8}, "adam", 64, 16)
        {'lr': 0.5, 'betas': (0.0, 0.75), 'eps': 1e-08}
    """
    options: dict[str, Any] = {"lr": float(group["lr"]) * rate_factor(rule, batch, reference)}
    if rule == "adam" and "betas" in group:
        ratio = batch / reference
        betas = tuple(1 - ratio * (1 - float(beta)) for beta in group["betas"])
        if min(betas) < 0:
            raise ValueError(
                f'rate_rule="adam" gives betas of {betas} for a batch of {batch}: it holds where 1 − β is below '
                f'{1 / ratio:g}, so use smaller batches, or rate_rule="sqrt"'
            )
        options |= {"betas": betas, "eps": group["eps"] / math.sqrt(ratio)}
    return options


@contextlib.contextmanager
def held_rates(
    optimizers: Sequence[torch.optim.Optimizer], rule: RateRule, batch: int, reference: int
) -> Iterator[Callable[[float], None]]:
    """Every step inside is taken at the rule's rate, whatever a schedule or the training step has set.

    Args:
        optimizers: that step.
        rule: see `RateRule`.
        batch: units of one optimizer step.
        reference: likewise, of the batch size whose rate is kept.

    Yields:
        A function that takes a part of the rate from then on: 1 at first.
    """
    part = 1.0
    held = {
        optimizer: [options_at(group, rule, batch, reference) for group in optimizer.param_groups]
        for optimizer in optimizers
    }

    def hold(optimizer: torch.optim.Optimizer, args: object = (), kwargs: object = None) -> None:
        for group, options in zip(optimizer.param_groups, held[optimizer], strict=True):
            for name, value in (options | {"lr": part * options["lr"]}).items():
                if isinstance(group[name], Tensor):  # on the device, where a compiled step reads it
                    group[name].fill_(value)
                else:
                    group[name] = value

    def take(of_rate: float) -> None:
        nonlocal part
        part = of_rate
        for optimizer in optimizers:
            hold(optimizer)

    handles = [optimizer.register_step_pre_hook(hold) for optimizer in optimizers]
    try:
        take(part)
        yield take
    finally:
        for handle in handles:
            handle.remove()
