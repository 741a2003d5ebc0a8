"""How far B_simple was from the critical batch size: in sonde's study, by optimizer and metric, and in published runs.

The tables at the end are written by `python -m evidence.figures`, from the results of the study.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from sonde.wording import number

_ADAM = "Adam or AdamW"
"""Their steps differ in weight decay alone, which the study does without."""
_VARIANTS = ("dampening", "nesterov", "amsgrad")
"""Options that change a step. Those that change only how it is computed (fused, foreach) are left out."""


@dataclass(frozen=True)
class Factor:
    """The critical batch size of whole trainings, over B_simple averaged over each training.

    Attributes:
        median: over the trainings.
        low: 5 % of the trainings are below it.
        high: 5 % are above it.
        n_trainings: in which B_simple was measured.
        n_tasks: that were trained.
    """

    median: float
    low: float
    high: float
    n_trainings: int
    n_tasks: int


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


def proxy_in_words(optimizer: str, metric: str) -> str:
    """What B_simple is worth as a proxy.

    Args:
        optimizer: as `kind_of` names it; empty where it is not known.
        metric: of B_simple.
    """
    found, of_metric = FACTORS.get((optimizer, metric)), "" if metric == "euclidean" else f" in metric {metric!r}"
    text = "B_simple is a proxy for the critical batch size. "
    if found is not None:
        low, median, high = (number(end, 2) for end in (found.low, found.median, found.high))
        text += (
            f"With {optimizer}, the critical batch size was {low} to {high} times the run's average{of_metric} in 90 % "
            f"of {found.n_trainings} trainings of {found.n_tasks} small tasks; the median was {median} times "
            "(sonde's study). "
        )
    return (
        f"{text}In published runs the critical batch size was 0.1 to 20 times B_simple"
        f"{' in the euclidean metric' if of_metric else ''} (McCandlish et al. 2018, arXiv:1812.06162)."
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
