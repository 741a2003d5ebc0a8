"""How far B_simple was from the critical batch size: in sonde's study, by optimizer and metric, and in published runs.

The tables at the end are written by `python -m evidence.figures`, from the results of the study.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from sonde.wording import interval, number

_ADAM = "Adam or AdamW"
"""Their steps differ in weight decay alone, which the study does without."""
_VARIANTS = ("dampening", "nesterov", "amsgrad")
"""Options that change a step. Those that change only how it is computed (fused, foreach) are left out."""
_SETTINGS = ("lr", "momentum", "betas", "eps", "weight_decay")
_OF_95 = 1.645 / 1.96
"""Length of a 90 % interval over that of a 95 % interval."""


@dataclass(frozen=True)
class Factor:
    """The critical batch size of whole trainings, over B_simple averaged over each training.

    Attributes:
        median: over the trainings; None where nothing says what is usual.
        low: 5 % of the trainings are below it.
        high: 5 % are above it.
        n_trainings: in which B_simple was measured.
        n_tasks: that were trained.
    """

    median: float | None
    low: float
    high: float
    n_trainings: int
    n_tasks: int


@dataclass(frozen=True)
class Range:
    """A number as far as it is known.

    Attributes:
        middle: the best guess; None where only one end is known.
        low: lower end.
        high: upper end; may be infinite.
    """

    middle: float | None
    low: float
    high: float

    @property
    def likely(self) -> float:
        """The middle; where there is none, the end that is known, or the worse end of a cost."""
        if self.middle is not None:
            return self.middle
        return self.low if math.isinf(self.high) else self.high

    def times(self, factor: float) -> Range:
        """The same in another unit."""
        return Range(None if self.middle is None else self.middle * factor, self.low * factor, self.high * factor)

    def in_words(self, unit: str) -> str:
        """With its unit, such as "38.1 sequences [31.2 – 46.9]" or "more than 120 sequences"."""
        return in_units(self.middle, self.low, self.high, unit)


def in_units(middle: float | None, low: float | None, high: float | None, unit: str) -> str:
    """A number as far as it is known, with its unit.

    Example:
        >>> in_units(38.1, 31.2, 46.9, "sequences"), in_units(None, 120.0, math.inf, "sequences")
        ('38.1 sequences [31.2 – 46.9]', 'more than 120 sequences')
    """
    if middle is not None:
        return f"{number(middle)} {unit} [{number(low)} – {number(high)}]"
    return f"{interval(low, high)} {unit}"


PUBLISHED = Factor(None, 0.1, 20.0, 0, 0)
"""Of runs that others published: McCandlish et al. 2018, arXiv:1812.06162."""
OF_BRANCHES: Mapping[str, Factor] = {
    "SGD (β = 0)": Factor(2.3, 0.15, 5.2, 36, 3),
    "SGD (β = 0.9)": Factor(0.99, 0.29, 4.9, 36, 3),
    "Adam or AdamW (β = 0.9)": Factor(0.58, 0.053, 1.8, 36, 3),
    "Muon (β = 0.95, nesterov)": Factor(0.55, 0.094, 1.7, 35, 3),
}
"""The branched critical batch size over B_simple at the same weights, from `evidence/tables.md`: a branch shows what a
batch does from there on, at the usual rule of the rate."""
IN_RL: Mapping[str, Factor] = {"SGD": Factor(1.2, 0.66, 1.6, 8, 2), "Adam": Factor(2.3, 1.8, 3.0, 8, 2)}
"""The same for policies trained by GRPO, both batches in prompts: smallest, median and largest of 8 cases of the study,
from `evidence/tables.md`."""


def factor_of(optimizer: str, metric: str, *, from_here_on: bool = False) -> Factor | None:
    """How the critical batch size follows from B_simple; None for an optimizer or a metric that was not in the study.

    Args:
        optimizer: as `kind_of` names it.
        metric: of B_simple.
        from_here_on: for what follows, from B_simple now; otherwise for a whole run, from its average.
    """
    if from_here_on:
        return OF_BRANCHES.get(optimizer) if metric == "euclidean" else None
    return FACTORS.get((optimizer, metric))


def factor_for(unit: str, optimizer: str, metric: str, *, from_here_on: bool) -> Factor:
    """How the critical batch size follows from B_simple: as the study found, or else as in published runs.

    Args:
        unit: plural name of the unit, or "effective " and that name.
        optimizer: as `kind_of` names it.
        metric: of B_simple.
        from_here_on: as of `factor_of`.
    """
    if unit.endswith("prompts"):
        studied = [factor for name, factor in IN_RL.items() if optimizer.startswith(name) and metric == "euclidean"]
        return studied[0] if studied else PUBLISHED
    return factor_of(optimizer, metric, from_here_on=from_here_on) or PUBLISHED


def critical_range(b_simple: float | None, low: float, high: float, factor: Factor) -> Range:
    """The critical batch size B_crit = B_simple × factor, as a range with about 90 % of the probability.

    Two errors are combined: of B_simple, and of the factor. They have nothing to do with each other and both are errors
    of logarithms, so on each side of the middle their lengths are added in quadrature. The 95 % interval of B_simple is
    first made one of 90 %, which the factor's range is. Where only a bound of B_simple is known, or no usual factor,
    the ends are multiplied.

    Args:
        b_simple: the estimate; None where only a bound is known.
        low: lower end of its 95 % interval, 0 for an upper bound.
        high: upper end, infinite for a lower bound.
        factor: of the optimizer.

    Example:
        >>> found = critical_range(40.0, 32.0, 50.0, Factor(1.5, 0.84, 2.8, 40, 4))
        >>> round(found.middle), round(found.low), round(found.high)
        (60, 33, 115)
    """
    if b_simple is None or factor.median is None:
        return Range(None, low * factor.low, high * factor.high)
    down = math.hypot(_OF_95 * _log(b_simple, low), _log(factor.median, factor.low))
    up = math.hypot(_OF_95 * _log(high, b_simple), _log(factor.high, factor.median))
    middle = b_simple * factor.median
    return Range(middle, middle * math.exp(-down), middle * math.exp(up))


def _log(above: float, below: float) -> float:
    return math.inf if below <= 0 or math.isinf(above) else math.log(above / below)


def kind_of(optimizers: Iterable[Any]) -> str:
    """The optimizers that step a model together, by class, with the options that change their steps: "SGD (β = 0.9)".

    The name of the class decides, whoever wrote it. AdamW8bit has a name of its own: it rounds its moments, and was
    not in the study.

    Args:
        optimizers: of torch, or like those. Beside Muon, an Adam for vectors and embeddings is not named.

    Returns:
        For optimizers of the study, a name in `FACTORS`; without an optimizer, an empty text.
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


def proxy_in_words(unit: str, optimizer: str, metric: str, *, of_run: bool = True) -> str:
    """What B_simple is worth as a proxy.

    Args:
        unit: plural name of the unit.
        optimizer: as `kind_of` names it; empty where it is not known.
        metric: of B_simple.
        of_run: whether a run's average is known too, not only B_simple now.

    Example:
        >>> proxy_in_words("images", "SGD (β = 0.9)", "euclidean", of_run=False)[69:]
        "that was 0.29 to 4.9 times B_simple now (median 0.99) in 90 % of 36 branches of sonde's study."
    """
    in_metric = "" if metric == "euclidean" else f" (metric {metric!r})"
    text, said = f"B_simple{in_metric} is a proxy for the critical batch size", list[str]()
    for from_here_on in (False, True) if of_run and not unit.endswith("prompts") else (True,):
        factor = factor_for(unit, optimizer, metric, from_here_on=from_here_on)
        if factor == PUBLISHED:
            continue
        of = "B_simple now" if from_here_on else "the run's average"
        where = f"90 % of {factor.n_trainings} {'branches' if from_here_on else 'trainings'}"
        if factor in IN_RL.values():
            of, where = "B_simple", f"{factor.n_trainings} cases of GRPO"
        low, median, high = (number(end, 2) for end in (factor.low, factor.median, factor.high))
        said.append(f"{low} to {high} times {of} (median {median}) in {where}")
    if said:
        return f"{text}. With {optimizer}, that was {' and '.join(said)} of sonde's study."
    return (
        f"{text}, which was 0.1 to 20 times B_simple in published runs (McCandlish et al. 2018, arXiv:1812.06162). "
        "`sonde branch` measures it."
    )


def law_in_words() -> str:
    """How well the law of the trade-off was found to hold, whatever the optimizer."""
    n, of = LAW_FITS_BETTER
    return (
        "This law is taken for all optimizers: in sonde's study of SGD, AdamW and Muon, it fitted better than the law "
        f"for steps of signs in {n} of {of} cases."
    )


# From here on written by `python -m evidence.figures`.

FACTORS: Mapping[tuple[str, str], Factor] = {
    ("SGD (β = 0)", "euclidean"): Factor(median=0.9, low=0.31, high=1.5, n_trainings=40, n_tasks=4),
    ("SGD (β = 0)", "sign"): Factor(median=0.74, low=0.23, high=2.5, n_trainings=40, n_tasks=4),
    ("SGD (β = 0.9)", "euclidean"): Factor(median=1.7, low=0.77, high=4.5, n_trainings=40, n_tasks=4),
    ("SGD (β = 0.9)", "sign"): Factor(median=1.6, low=0.79, high=4.8, n_trainings=40, n_tasks=4),
    ("Adam or AdamW (β = 0.9)", "euclidean"): Factor(median=1.5, low=0.84, high=2.8, n_trainings=40, n_tasks=4),
    ("Adam or AdamW (β = 0.9)", "adam"): Factor(median=1.1, low=0.17, high=2.6, n_trainings=40, n_tasks=4),
    ("Adam or AdamW (β = 0.9)", "sign"): Factor(median=1.7, low=0.32, high=5.9, n_trainings=40, n_tasks=4),
    ("Muon (β = 0.95, nesterov)", "euclidean"): Factor(median=1.6, low=0.46, high=3.3, n_trainings=40, n_tasks=4),
}
"""By the optimizer in words, and the metric; without ranges of more than 20 times."""
LAW_FITS_BETTER = (42, 48)
"""Cases (optimizer, task, target) that 1 + B/B_crit fits better than the law of signs, and all cases."""
