"""The options of an optimizer at another batch size."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from sonde.decision.rate_rules import adam_settings, parsed_rule, rate_factor, usual_rule

RateRule = str | Mapping[int, float]
"""As of `rate_factor`, or "adam"; or the multiple of the reference's rate, by batch size."""
Options = list[dict[str, Any]]
"""What an optimizer's groups are to have, in their order."""


def usual_rule_of(optimizers: Sequence[torch.optim.Optimizer]) -> RateRule:
    """The rule that is usual for some optimizers, where B_crit is not known: that of SGD if all of them are SGD."""
    return usual_rule("SGD" if all(isinstance(optimizer, torch.optim.SGD) for optimizer in optimizers) else "")


def options_at(optimizer: torch.optim.Optimizer, rule: RateRule, batch: float, reference: float) -> Options:
    """The options that a rule changes, of each group of an optimizer, at a batch size.

    Args:
        optimizer: as it is at the reference.
        rule: see `RateRule`.
        batch: units of one optimizer step.
        reference: likewise, of the batch size whose options are kept.

    Raises:
        ValueError: for an unknown rule; a batch size that a table leaves out; a multiple that is not positive.

    Example:
        >>> optimizer = torch.optim.AdamW([torch.zeros(2)], lr=0.25)
        >>> options_at(optimizer, "sqrt", 64, 16), options_at(optimizer, {64: 3.0}, 64, 16)
        ([{'lr': 0.5}], [{'lr': 0.75}])
    """
    kappa, factor, options = batch / reference, factor_at(rule, batch, reference), Options()
    for group in optimizer.param_groups:
        options.append({"lr": group["lr"] * factor})  # a rate on the device stays there
        if rule == "adam" and "betas" in group:
            beta1, beta2 = map(float, group["betas"])
            values = adam_settings(kappa, beta1=beta1, beta2=beta2, eps=group["eps"])
            options[-1] |= {"betas": (values["beta1"], values["beta2"]), "eps": values["eps"]}
    return options


def factor_at(rule: RateRule, batch: float, reference: float) -> float:
    """The rate at a batch size over that at the reference. Arguments and errors are those of `options_at`."""
    if isinstance(rule, Mapping):
        factor = rule.get(int(batch), 1.0 if batch == reference else math.nan)
        if not 0 < factor < math.inf:
            raise ValueError(f"a positive multiple of the rate is needed for a batch of {batch:g}, got {rule}: add it")
        return factor
    if rule != "adam":
        parsed_rule(rule, ", adam, or a table of multiples such as {32: 1.4}")
    return rate_factor("sqrt" if rule == "adam" else rule, batch, reference)


def set_options(group: dict[str, Any], options: Mapping[str, Any]) -> None:
    """Give options to a group of an optimizer."""
    for name, value in options.items():
        if isinstance(group[name], Tensor):  # on the device, where a compiled step reads it
            group[name].copy_(value)
        else:
            group[name] = value
