"""How the learning rate, and what goes with it, follow the batch size. κ is a batch over the reference batch."""

from __future__ import annotations

import math
from collections.abc import Mapping

RULES = ("sqrt", "linear", "none")
"""Rate ∝ √κ (Adam), ∝ κ (SGD far below the critical batch), or the same for all batches."""
IN_WORDS = {
    "sqrt": "learning rate ∝ √batch",
    "linear": "learning rate ∝ batch",
    "none": "learning rate the same for all batches",
}
WITH_BETAS = " with β₁, β₂ and ε"
DECAYED = (0.5, 0.7, 1.0)
"""Parts of the units at whose end the rate has fallen to 0: the losses there make the curve of such a branch."""


def rate_factor(rule: str, kappa: float) -> float:
    """By what the learning rate of the reference is multiplied.

    Args:
        rule: one of `RULES`.
        kappa: batch over the reference batch.

    Raises:
        ValueError: for another rule.

    Reference:
        sqrt: Malladi et al. 2022, arXiv:2205.10287. linear: McCandlish et al. 2018, arXiv:1812.06162.

    Example:
        >>> rate_factor("sqrt", 4.0), rate_factor("linear", 4.0), rate_factor("none", 4.0)
        (2.0, 4.0, 1.0)
    """
    if rule not in RULES:
        raise ValueError(f"the rule of the rate must be one of {', '.join(RULES)}, got {rule!r}")
    return {"sqrt": math.sqrt(kappa), "linear": kappa, "none": 1.0}[rule]


def adam_settings(kappa: float, *, beta1: float, beta2: float, eps: float) -> Mapping[str, float]:
    """Adam's other settings at a batch κ times the reference, where its rate is √κ times that of the reference.

    βᵢ' = 1 − κ(1 − βᵢ) keeps the memory of both averages equally long in units, and ε' = ε/√κ.

    Args:
        kappa: batch over the reference batch.
        beta1: of the reference.
        beta2: of the reference.
        eps: of the reference.

    Returns:
        "beta1", "beta2" and "eps".

    Raises:
        ValueError: where a step has more units than an average remembers, so that no β would do.

    Reference:
        Malladi et al. 2022, arXiv:2205.10287, the square root scaling rule of Adam.

    Example:
        >>> adam_settings(4.0, beta1=0.9, beta2=0.99, eps=1e-8)
        {'beta1': 0.6, 'beta2': 0.96, 'eps': 5e-09}
    """
    for name, beta in (("beta1", beta1), ("beta2", beta2)):
        if not kappa * (1 - beta) < 1:
            raise ValueError(
                f"the rule of Adam needs κ(1 − {name}) < 1, got κ = {kappa:g} and {name} = {beta:g}: leave out batches "
                f"of more than {1 / (1 - beta):.4g} times the reference, or the placeholder {{{name}}}"
            )
    betas = {name: round(1 - kappa * (1 - beta), 12) for name, beta in (("beta1", beta1), ("beta2", beta2))}
    return betas | {"eps": eps / math.sqrt(kappa)}
