"""The learning rate of each batch size in a loop, held there, whatever the training's schedule sets."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from sonde.decision.rate_rules import (
    WITH_BETAS,
    adam_settings,
    parsed_rule,
    rate_factor,
    rule_in_words,
    scaled_decay,
    usual_rule,
)
from sonde.parallel.unwrap import outside_graphs

RateRule = str | Mapping[int, float]
"""As of `rate_factor`, or "adam"; or the multiple of the reference's rate, by batch size."""
Options = list[dict[str, Any]]
"""What an optimizer's groups are to have, in their order."""


def usual_rule_of(optimizers: Sequence[torch.optim.Optimizer]) -> RateRule:
    """The rule that is usual for some optimizers, where B_crit is not known: that of SGD if all of them are SGD."""
    return usual_rule("SGD" if all(isinstance(optimizer, torch.optim.SGD) for optimizer in optimizers) else "")


def in_words(rule: RateRule) -> str:
    """What a rule does.

    Example:
        >>> in_words("sqrt")
        'learning rate ∝ √batch'
    """
    if isinstance(rule, Mapping):
        return "learning rates from a table"
    return rule_in_words("sqrt") + WITH_BETAS if rule == "adam" else rule_in_words(rule)


def options_at(
    optimizer: torch.optim.Optimizer, rule: RateRule, batch: float, reference: float, *, scale_decay: bool = False
) -> Options:
    """The options that a rule changes, of each group of an optimizer, at a batch size.

    Args:
        optimizer: as it is at the reference.
        rule: see `RateRule`.
        batch: units of one optimizer step.
        reference: likewise, of the batch size whose options are kept.
        scale_decay: whether weight decay follows the batch and the rate, so that it acts as fast per unit.

    Raises:
        ValueError: for an unknown rule; a batch size that a table leaves out; a multiple that is not positive; for the
            rule "adam" where no β would do.

    Example:
        >>> optimizer = torch.optim.AdamW([torch.zeros(2)], lr=0.25)
        >>> options_at(optimizer, "sqrt", 64, 16), options_at(optimizer, {64: 3.0}, 64, 16)
        ([{'lr': 0.5}], [{'lr': 0.75}])
    """
    return [scaled(group, rule, batch, reference, scale_decay=scale_decay) for group in optimizer.param_groups]


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


def scaled(
    group: Mapping[str, Any], rule: RateRule, batch: float, reference: float, *, scale_decay: bool = False
) -> dict[str, Any]:
    """The options of one group that a rule changes, as of `options_at`. A rate on the device stays there."""
    kappa, factor = batch / reference, factor_at(rule, batch, reference)
    options = {"lr": group["lr"] * factor}
    if rule == "adam" and "betas" in group:
        beta1, beta2 = map(float, group["betas"])
        values = adam_settings(kappa, beta1=beta1, beta2=beta2, eps=group["eps"])
        options |= {"betas": (values["beta1"], values["beta2"]), "eps": values["eps"]}
    if scale_decay and "weight_decay" in group:
        options["weight_decay"] = scaled_decay(group["weight_decay"], kappa, factor)
    return options


def set_options(group: dict[str, Any], options: Mapping[str, Any]) -> None:
    """Give options to a group of an optimizer."""
    for name, value in options.items():
        if isinstance(group[name], Tensor):  # on the device, where a compiled step reads it
            group[name].copy_(value)
        else:
            group[name] = value


@contextlib.contextmanager
def held(options: Mapping[torch.optim.Optimizer, Options]) -> Iterator[Callable[[float], None]]:
    """Every step inside is taken with these options, whatever a schedule or the training step has set.

    Yields:
        A function that takes a part of each rate from then on: 1 at first.
    """
    part = 1.0

    @outside_graphs  # of a compiled step, which would be compiled anew at every change
    def hold(optimizer: torch.optim.Optimizer, args: object = (), kwargs: object = None) -> None:
        for group, wanted in zip(optimizer.param_groups, options[optimizer], strict=True):
            set_options(group, wanted | {"lr": part * wanted["lr"]})

    def take(of_rate: float) -> None:
        nonlocal part
        part = of_rate
        for optimizer in options:  # for a training step that reads the rate itself
            hold(optimizer)

    handles = [optimizer.register_step_pre_hook(hold) for optimizer in options]
    try:
        take(part)
        yield take
    finally:
        for handle in handles:
            handle.remove()
