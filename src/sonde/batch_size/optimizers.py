"""Which optimizers step a model, and with which settings: what advice on the rate, and the study, know them by."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

_ADAM = "Adam or AdamW"
"""Their steps differ in weight decay alone, which the study does without."""
_VARIANTS = ("dampening", "nesterov", "amsgrad")
"""Options that change a step. Those that change only how it is computed (fused, foreach) are left out."""
_SETTINGS = ("lr", "momentum", "betas", "eps", "weight_decay")


def kind_of(optimizers: Iterable[Any]) -> str:
    """The optimizers that step a model together, by class, with the options that change their steps: "SGD (β = 0.9)".

    The name of the class decides, whoever wrote it. AdamW8bit has a name of its own: it rounds its moments, and was
    not in the study.

    Args:
        optimizers: of torch, or like those. Beside Muon, an Adam for vectors and embeddings is not named.

    Returns:
        For optimizers of the study, a name in `proxy.FACTORS`; without an optimizer, an empty text.
    """
    classes = [(type(getattr(each, "optim", each)).__name__, each.param_groups) for each in optimizers]  # inside ZeRO's
    kinds = {_in_words(name, group) for name, groups in classes for group in groups}
    if any(kind.startswith("Muon (") for kind in kinds):
        kinds = {kind for kind in kinds if not kind.startswith(_ADAM)}
    return " and ".join(sorted(kinds))


def settings_of(optimizers: Iterable[Any]) -> list[dict[str, object]]:
    """The settings of all groups of the optimizers, as JSON values; groups with the same settings once.

    A rate is the one that a schedule starts from, where there is a schedule. A setting that is a tensor on a device is
    left out, since reading it would wait for the device.

    Args:
        optimizers: of torch, or like those.
    """
    found: list[dict[str, object]] = []
    for each in optimizers:
        for group in each.param_groups:
            values = dict(group) | {"lr": group.get("initial_lr", group.get("lr"))}
            settings = {name: value for name in _SETTINGS if (value := _as_json(values.get(name))) is not None}
            flags = dict.fromkeys((name for name in (*_VARIANTS, "decoupled_weight_decay") if group.get(name)), True)
            named: dict[str, object] = {"name": type(getattr(each, "optim", each)).__name__, **settings, **flags}
            if named not in found:
                found.append(named)
    return found


def _as_json(value: Any) -> object:
    """A number, or a list of numbers; None for anything else."""
    if isinstance(value, tuple | list):
        numbers = [_as_json(each) for each in value]
        return None if None in numbers else numbers
    if getattr(getattr(value, "device", None), "type", "") == "cpu" and value.numel() == 1:
        value = value.item()
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if is_number and math.isfinite(value) else None


def _in_words(name: str, group: Mapping[str, Any]) -> str:
    betas = group.get("betas")
    beta = group.get("momentum", betas[0] if isinstance(betas, tuple | list) and betas else None)
    facts = [f"β = {beta:g}"] if isinstance(beta, int | float) else []
    facts += [option for option in _VARIANTS if group.get(option)]
    if name == "Adam" and group.get("weight_decay") and not group.get("decoupled_weight_decay"):
        facts.append("L2")  # adds the decay to the gradient
    elif name in ("Adam", "AdamW"):
        name = _ADAM
    return f"{name} ({', '.join(facts)})" if facts else name
