"""The learning rate for another batch size, with everything that goes with it: a whole row of one rule, or none."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sonde.decision.law import FAR, FURTHEST, Range
from sonde.decision.rate_rules import adam_settings, rate_factor, scaled_decay, usual_rule
from sonde.wording import number

_ADAM = ("Adam", "AdamW")
_OF_ADAM = ("far below B_crit, where noise exceeds signal", "2205.10287; weight decay: arXiv:2405.13698")
_RULES = {
    **dict.fromkeys(_ADAM, _OF_ADAM),
    "SGD": ("on a quadratic loss", "1812.06162"),
    "Muon": ("in mean-field theory", "2602.03001"),
}
"""Where the usual rule is known to hold, and its source on arXiv, by the class of the optimizer."""


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
        batch: that the settings are for.
        settings: all of them, in order; empty where no rule is known.
        words: where the rule is known to hold, with its source; without settings, why there are none.
    """

    optimizer: str
    batch: float
    settings: tuple[Setting, ...]
    words: str


def rate_row(group: Mapping[str, Any], batch: float, present: float, critical: Range) -> RateRow:
    """The settings of a group of an optimizer with another batch size.

    Args:
        group: its settings, as `proxy.settings_of` lists them.
        batch: units of one optimizer step.
        present: the same of the run that the settings are of.
        critical: the critical batch size.
    """
    name, lr, is_adam = str(group["name"]), group.get("lr"), group["name"] in _ADAM
    if batch == present:
        return RateRow(name, batch, (), "The batch is kept, so keep the settings.")
    if why := why_no_rule(group):
        return RateRow(name, batch, (), f"The rate is not known: {why}.")
    kappa, ends = batch / present, (critical.low, critical.high)
    if max(kappa, 1 / kappa) > FURTHEST:
        return RateRow(name, batch, (), "The rate is not known: no rule was tried so far from the batch as it is.")
    likely = critical.middle if critical.middle is not None else ends[batch < present]  # else the smaller rate
    factor, *reach = (rate_factor(usual_rule(name, each), batch, present) for each in (likely, *ends))
    known_to = f"[{number(min(reach))} – {number(max(reach))}]"
    rate = Setting("learning rate", lr, lr and lr * factor, f"× {number(factor)} {known_to}")
    others = _of_adam(group, kappa, factor) if is_adam else [_kept(group, key) for key in ("momentum", "weight_decay")]
    warm_up = Setting("warm-up, in steps", None, None, f"× {number(1 / kappa, 3)}: as long in units as it was")
    where, source = _RULES[name]
    said = f"This rule is known to hold {where} (arXiv:{source})."
    if is_adam and batch * FAR > critical.low:
        said += f" This batch {'is' if batch > critical.high else 'may be'} too large for it."
    return RateRow(name, batch, (rate, *others, warm_up), said)


def why_no_rule(group: Mapping[str, Any]) -> str:
    """Why no rule covers an optimizer with its options; empty where one does."""
    name, options = str(group["name"]), [flag for flag in ("amsgrad", "dampening") if group.get(flag)]
    if name == "Adam" and group.get("weight_decay") and not group.get("decoupled_weight_decay"):
        options.append("weight decay that is added to the gradient")
    if name not in _RULES or options:
        return f"no rule covers {' and '.join([name, *options])}"
    is_said = name not in _ADAM or (isinstance(group.get("betas"), list) and group.get("eps") is not None)
    return "" if is_said else "the log does not say β₁, β₂ and ε"


def _of_adam(group: Mapping[str, Any], kappa: float, factor: float) -> list[Setting]:
    (beta1, beta2), eps, decay = group["betas"], group["eps"], group.get("weight_decay", 0.0)
    then = adam_settings(kappa, beta1=beta1, beta2=beta2, eps=eps)
    return [
        Setting("β₁", beta1, then["beta1"], "1 − κ(1 − β₁), but 0.5 or more"),
        Setting("β₂", beta2, then["beta2"], "1 − κ(1 − β₂), as far as β₁ falls"),
        Setting("ε", eps, then["eps"], "/ √κ"),
        Setting("weight decay", decay, scaled_decay(decay, kappa, factor), "× κ·η/η′: as fast in units"),
    ]


def _kept(group: Mapping[str, Any], key: str) -> Setting:
    return Setting(key.replace("_", " "), group.get(key), group.get(key), "kept: no rule is known")
