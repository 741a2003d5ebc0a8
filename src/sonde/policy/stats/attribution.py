"""Which prompts a change of entropy comes from, and what else."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from sonde.policy.stats.entropy_change import EntropyChange
from sonde.policy.stats.entropy_gradient import Responses

T = TypeVar("T")
_TEXT_WIDTH = 40


@dataclass(frozen=True)
class Share:
    """One evaluation prompt's part of the change: δH is the sum of all prompts'.

    Attributes:
        prompt: its number.
        change: in nats (a token, for the per-token objective).
        sharpening: what of it comes from distributions that change where they are; NaN for the sequence objective.
        drift: what comes from other prefixes, and lengths, becoming likelier.
    """

    prompt: int
    change: float
    sharpening: float
    drift: float


@dataclass(frozen=True)
class Cause:
    """One update prompt's part of what this batch's gradient does to the entropy.

    Attributes:
        prompt: its number.
        change: in nats (a token, for the per-token objective).
        from_rewarded: what of it is from tokens of positive advantage.
        from_penalised: what is from those of negative advantage.
    """

    prompt: int
    change: float
    from_rewarded: float
    from_penalised: float


@dataclass(frozen=True)
class Causes:
    """Where the change comes from.

    Attributes:
        momentum: earlier batches' gradients, in nats; NaN with update="gradient", which has none.
        batch: this batch's gradient.
        decay: weight decay.
        prompts: of the update, each with its part of `batch`; empty without their rollouts.
        explained: the sum of these parts over `batch`: 1 where the loss is the mean of advantage × log-probability
            that they are told by; less where clipped ratios or a KL term have a share.
    """

    momentum: float
    batch: float
    decay: float
    prompts: tuple[Cause, ...]
    explained: float


def shares_of(change: EntropyChange, responses: Responses) -> tuple[Share, ...]:
    """Each evaluation prompt's part, the one that lowers entropy most first."""
    n = responses.n_prompts
    rows = zip(
        responses.prompts.tolist(), change.per_prompt.tolist(), change.sharpening_per_prompt.tolist(), strict=True
    )
    shares = [Share(prompt, each / n, sharp / n, (each - sharp) / n) for prompt, each, sharp in rows]
    return tuple(sorted(shares, key=lambda share: share.change))


def causes_by_prompt(
    d_log_prob: Tensor, credit: Tensor, responses: Responses, scale: float
) -> tuple[tuple[Cause, ...], float]:
    """Each update prompt's part t_p = scale × Σ credit·D s over its responses, and their sum.

    Args:
        d_log_prob: D_Δ s_k along what the entropy's gradient weighs a gradient by, [responses, tokens].
        credit: advantage × weight of each token, likewise.
        responses: which tokens count.
        scale: nats for one of these.

    Returns:
        The prompts, the one that lowers entropy most first; and the sum over all.
    """
    parts = scale * responses.tokens("credit", credit) * responses.tokens("d_log_prob", d_log_prob)

    def summed(per_token: Tensor) -> list[float]:
        total: Tensor = responses.per_prompt(per_token.sum(1) / responses.share)
        return total.tolist()

    zero = torch.zeros_like(parts)
    rewarded, penalised = (summed(torch.where(which, parts, zero)) for which in (credit > 0, credit < 0))
    rows = zip(responses.prompts.tolist(), rewarded, penalised, strict=True)
    causes = sorted((Cause(p, up + down, up, down) for p, up, down in rows), key=lambda cause: cause.change)
    return tuple(causes), sum(cause.change for cause in causes)


def attribution_table(shares: Sequence[Share], causes: Causes | None, texts: Mapping[int, str], n: int) -> str:
    """The first and the last few of each, as lines of text; changes in nats.

    Args:
        shares: of evaluation prompts, the one that lowers entropy most first.
        causes: where the change comes from, with the update's prompts, sorted likewise.
        texts: of prompts, by their numbers.
        n: prompts at either end.
    """

    def row(prompt: int, *values: float) -> str:
        name = " ".join(texts.get(prompt, f"prompt {prompt}").split())
        name = name if len(name) <= _TEXT_WIDTH else f"{name[: _TEXT_WIDTH - 1]}…"
        return f"{name:<{_TEXT_WIDTH}}" + "".join(f"{_signed(value):>12}" for value in values)

    def head(title: str, *columns: str) -> str:
        return f"{title:<{_TEXT_WIDTH}}" + "".join(f"{column:>12}" for column in columns)

    lines = []
    if causes is not None:
        of = {"from this batch": causes.batch, "from earlier ones": causes.momentum, "from decay": causes.decay}
        lines += [", ".join(f"{_signed(value)} {name}" for name, value in of.items() if value), ""]
        if causes.prompts:
            lines.append(head("learning from", "change", "rewarded", "penalised"))
            lines += [row(c.prompt, c.change, c.from_rewarded, c.from_penalised) for c in _ends(causes.prompts, n)]
            lines.append("")
    lines.append(head("evaluated on", "change", "sharpening", "drift"))
    lines += [row(s.prompt, s.change, s.sharpening, s.drift) for s in _ends(shares, n)]
    return "\n".join(lines)


def _ends(rows: Sequence[T], n: int) -> list[T]:
    return list(rows) if len(rows) <= 2 * n else [*rows[:n], *rows[len(rows) - n :]]


def _signed(value: float) -> str:
    return "–" if math.isnan(value) else f"{value:+.2e}"
