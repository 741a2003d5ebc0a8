"""How the learning rate, and what goes with it, follow the batch size: rules, and rows of all settings by one of them.

κ is a batch over the batch that the settings are of.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sonde.decision.law import FAR, FURTHEST, Range
from sonde.wording import number

_ADAM = ("Adam", "AdamW")
_OF_ADAM = ("far below B_crit, where noise exceeds signal", "2205.10287; weight decay: arXiv:2405.13698")
_RULES = {
    **dict.fromkeys(_ADAM, _OF_ADAM),
    "SGD": ("on a quadratic loss", "1812.06162"),
    "Muon": ("in mean-field theory", "2602.03001"),
}
"""Where the usual rule is known to hold, and its source on arXiv, by the class of the optimizer."""
WITH_BETAS = " with β₁, β₂ and ε"
WITH_DECAY = ", weight decay as fast per unit"
FALLING = ", falling to 0 in each branch"
_IN_WORDS = {
    "sqrt": "learning rate ∝ √batch",
    "linear": "learning rate ∝ batch",
    "none": "learning rate the same for all batches",
    "sgd": "learning rate ∝ 1/(1 + {noise:g}/batch)",
    "sign": "learning rate ∝ 1/√(1 + {noise:g}/batch)",
}
_LEAST_MEMORY = 2.0
"""Steps that an average of Adam remembers at least, 1/(1 − β), unless it remembers fewer already."""
DECAYED = (0.5, 0.7, 1.0)
"""Parts of the units at whose end the rate has fallen to 0: the losses there make the curve of such a branch."""


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


# Rules.


def rate_factor(rule: str, batch: float, reference: float) -> float:
    """By what the learning rate of the reference is multiplied.

    Args:
        rule: "sqrt" (Adam), "linear" (SGD far below the noise scale), "none", "sgd=120" (SGD at a noise scale of 120
            units) or "sign=120" (likewise, of optimizers whose steps have a fixed size, such as Muon).
        batch: units of one optimizer step.
        reference: likewise.

    Raises:
        ValueError: for another rule.

    Reference:
        sqrt: Malladi et al. 2022, arXiv:2205.10287. linear and sgd: McCandlish et al. 2018, arXiv:1812.06162. sign:
        Naganuma et al. 2026, arXiv:2602.03001.

    Example:
        >>> [rate_factor(rule, 64, 16) for rule in ("sqrt", "linear", "none", "sgd=64")]
        [2.0, 4.0, 1.0, 2.5]
    """
    name, noise = parsed_rule(rule)
    kappa, rise = batch / reference, (1 + noise / reference) / (1 + noise / batch)
    return {"sqrt": math.sqrt(kappa), "linear": kappa, "none": 1.0, "sgd": rise, "sign": math.sqrt(rise)}[name]


def usual_rule(optimizer: str, critical: float = math.inf) -> str:
    """The usual rule of an optimizer, as of `rate_factor`: of SGD, or of steps whose size the gradient does not change.

    Args:
        optimizer: by class.
        critical: the critical batch size, which the rules take for the noise scale. Infinite where it is not known:
            then their limit for batches far below it is taken.

    Example:
        >>> usual_rule("SGD", 120.0), usual_rule("SGD"), usual_rule("AdamW", 120.0), usual_rule("AdamW")
        ('sgd=120.0', 'linear', 'sign=120.0', 'sqrt')
    """
    rule, limit = ("sgd", "linear") if optimizer == "SGD" else ("sign", "sqrt")
    if math.isinf(critical):
        return limit
    return f"{rule}={critical!r}" if critical > 0 else "none"


def rule_in_words(rule: str) -> str:
    """What a rule does.

    Example:
        >>> rule_in_words("sqrt"), rule_in_words("sign=120")
        ('learning rate ∝ √batch', 'learning rate ∝ 1/√(1 + 120/batch)')
    """
    name, noise = parsed_rule(rule)
    return _IN_WORDS[name].format(noise=noise)


def parsed_rule(rule: object, others: str = "") -> tuple[str, float]:
    """The name of a rule, and its noise scale, 0 without.

    Args:
        rule: as of `rate_factor`.
        others: what the caller takes beside such rules, for the message.

    Raises:
        ValueError: for another rule.
    """
    name, _, text = rule.partition("=") if isinstance(rule, str) else ("", "", "")
    with contextlib.suppress(ValueError):
        if rule in ("sqrt", "linear", "none") or (name in ("sgd", "sign") and 0 < float(text) < math.inf):
            return name, float(text or 0)
    known = "sqrt, linear, none, sgd=N, sign=N"
    raise ValueError(f"the rule of the rate must be {known}{others}, got {rule!r}: choose one; N is a noise scale")


def adam_settings(kappa: float, *, beta1: float, beta2: float, eps: float) -> Mapping[str, float]:
    """Adam's other settings at a batch κ times the reference, where its rate is √κ times that of the reference.

    βᵢ' = 1 − κ(1 − βᵢ) keeps the memory of both averages equally long in units, and ε' = ε/√κ. An average is of two
    steps or more, or as it was: beyond the κ that makes it so, both β stay, and only the rate goes on.

    Args:
        kappa: batch over the reference batch.
        beta1: of the reference.
        beta2: of the reference.
        eps: of the reference.

    Returns:
        "beta1", "beta2" and "eps".

    Reference:
        Malladi et al. 2022, arXiv:2205.10287, the square root scaling rule of Adam.

    Example:
        >>> adam_settings(4.0, beta1=0.9, beta2=0.99, eps=1e-8), adam_settings(16.0, beta1=0.9, beta2=0.99, eps=1e-8)
        ({'beta1': 0.6, 'beta2': 0.96, 'eps': 5e-09}, {'beta1': 0.5, 'beta2': 0.95, 'eps': 2.5e-09})
    """
    shorter = min(kappa, max(1 / (_LEAST_MEMORY * (1 - min(beta1, beta2))), 1.0))
    betas = {name: round(1 - shorter * (1 - beta), 12) for name, beta in (("beta1", beta1), ("beta2", beta2))}
    return betas | {"eps": eps / math.sqrt(kappa)}


def scaled_decay(decay: float, kappa: float, factor: float) -> float:
    """Weight decay λ' = λ κ η/η', whose part per unit, η λ/B, is the same for all batches.

    Args:
        decay: of the reference.
        kappa: batch over the reference batch.
        factor: learning rate over that of the reference.

    Reference:
        Wang and Aitchison 2024, arXiv:2405.13698: the time scale of AdamW.

    Example:
        >>> scaled_decay(0.1, 4.0, 2.0)
        0.2
    """
    return decay * kappa / factor
