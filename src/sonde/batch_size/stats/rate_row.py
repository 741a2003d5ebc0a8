"""The learning rate for another batch size, with everything that goes with it: a whole row of one rule, or none."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sonde.batch_size.stats.proxy import Range
from sonde.batch_size.stats.rate_rules import adam_settings, rate_factor, scaled_decay
from sonde.wording import number

_TESTED = 4.0
"""Up to so many times the batch, the best rate is hardly known better than the rule changes it: arXiv:1811.03600."""


@dataclass(frozen=True)
class Setting:
    """One setting of an optimizer.

    Attributes:
        name: such as "learning rate".
        now: its value; None where the log does not say it.
        then: with the other batch size; None where `now` is.
        rule: in words.
    """

    name: str
    now: float | None
    then: float | None
    rule: str


@dataclass(frozen=True)
class RateRow:
    """What an optimizer needs with another batch size.

    Attributes:
        optimizer: by class, such as "AdamW".
        settings: all of them, in order; empty where no rule is known.
        holds: where the rule is known to hold; where there is none, why.
        source: of the rule.
    """

    optimizer: str
    settings: tuple[Setting, ...]
    holds: str
    source: str = ""


def rate_row(group: Mapping[str, Any], batch: float, present: float, critical: Range) -> RateRow:
    """The settings of a group of an optimizer with another batch size.

    Args:
        group: its settings, as `proxy.settings_of` lists them.
        batch: units of one optimizer step.
        present: the same of the run that the settings are of.
        critical: the critical batch size.
    """
    name, kappa = str(group["name"]), batch / present
    if kappa == 1:
        return RateRow(name, (), "the batch is the same, so the settings are")
    variants = [flag for flag in ("amsgrad", "dampening") if group.get(flag)]
    if name == "Adam" and group.get("weight_decay") and not group.get("decoupled_weight_decay"):
        variants.append("weight decay that is added to the gradient")
    if name not in ("Adam", "AdamW", *_BY_CRITICAL) or variants:
        return RateRow(name, (), f"no rule is known for {' and '.join([name, *variants])}")
    row = (_by_critical if name in _BY_CRITICAL else _adam)(group, batch, present, critical)
    if not row.settings:
        return row
    units = Setting("warm-up, in steps", None, None, f"× {number(1 / kappa, 3)}: as long in units as it was")
    wide = ""
    if 1 / _TESTED <= kappa <= _TESTED:
        wide = f"; up to {_TESTED:g} times the batch, the best rate is hardly known better than this change"
    return RateRow(name, (*row.settings, units), row.holds + wide, row.source)


def _adam(group: Mapping[str, Any], batch: float, present: float, critical: Range) -> RateRow:
    name, kappa, factor = str(group["name"]), batch / present, rate_factor("sqrt", batch, present)
    betas, eps, decay = group.get("betas"), group.get("eps"), group.get("weight_decay", 0.0)
    if not isinstance(betas, list) or eps is None:
        return RateRow(name, (), "the log does not say β₁, β₂ and ε")
    try:
        then = adam_settings(kappa, beta1=betas[0], beta2=betas[1], eps=eps)
    except ValueError:
        most = number(present / (1 - min(betas[:2])))
        return RateRow(name, (), f"a step would have more units than Adam remembers: the rule ends at {most}")
    settings = (
        _scaled("learning rate", group.get("lr"), factor),
        Setting("β₁", betas[0], then["beta1"], "1 − κ(1 − β₁)"),
        Setting("β₂", betas[1], then["beta2"], "1 − κ(1 − β₂)"),
        Setting("ε", eps, then["eps"], "/ √κ"),
        Setting("weight decay", decay, scaled_decay(decay, kappa, factor), "× κ·η/η′: as fast in units"),
    )
    holds = f"where noise is far above signal: for batches far below B_crit{_where(batch, critical)}"
    return RateRow(name, settings, holds, "arXiv:2205.10287; weight decay: arXiv:2405.13698")


def _by_critical(group: Mapping[str, Any], batch: float, present: float, critical: Range) -> RateRow:
    """A rule that knows B_crit, and says nothing of momentum and weight decay."""
    rule, holds, source = _BY_CRITICAL[str(group["name"])]
    low, factor, high = (_rise(rule, batch, present, end) for end in (critical.low, critical.likely, critical.high))
    rate = _scaled("learning rate", group.get("lr"), factor, f" [{number(low)} – {number(high)}]")
    kept = [Setting(key.replace("_", " "), group.get(key), group.get(key), "kept: no rule is known") for key in _KEPT]
    return RateRow(str(group["name"]), (rate, *kept), f"{holds}{_where(batch, critical)}", source)


_KEPT = ("momentum", "weight_decay")
_BY_CRITICAL = {
    "SGD": ("sgd", "on a quadratic, where it is nearly κ far below B_crit", "arXiv:1812.06162"),
    "Muon": ("sign", "in mean-field theory: √κ far below B_crit, the same rate far above", "arXiv:2602.03001"),
}
"""The rule, where it holds, and its source, by the name of the class."""


def _rise(rule: str, batch: float, present: float, critical: float) -> float:
    """The factor of the rate by a rule that knows B_crit, also at its ends 0 and infinity."""
    if critical <= 0:
        return 1.0
    if math.isinf(critical):
        return rate_factor("linear" if rule == "sgd" else "sqrt", batch, present)
    return rate_factor(f"{rule}={critical!r}", batch, present)


def _scaled(name: str, now: float | None, factor: float, also: str = "") -> Setting:
    return Setting(name, now, None if now is None else now * factor, f"× {number(factor)}{also}")


def _where(batch: float, critical: Range) -> str:
    """Where the batch lies."""
    if batch > critical.high:
        return ", which this batch is not"
    return "" if batch < critical.low else ", which this batch may not be"
