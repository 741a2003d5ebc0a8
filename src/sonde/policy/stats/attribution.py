"""The parts of a change of entropy: by evaluation prompt, by update prompt, and by source."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:  # a log is read where torch is not installed
    from torch import Tensor

    from sonde.policy.stats.entropy_change import EntropyChange
    from sonde.policy.stats.entropy_gradient import Coefficients, Responses

T = TypeVar("T")

_OFF_AT_MOST = 0.5
"""Part of the batch's change, or of the root of the sum of the prompts' squared parts, if that is larger, by which the
prompts' parts may miss the batch's. Clipped ratios and a small KL term stay below."""
_LEAST_COSINE = 0.85
"""That of half of the responses is 0.71, if all have gradients of one length that point anywhere."""
_OF_OTHER_TERMS = 0.05
"""Part of the batch's change from which a table names that of the loss's other terms."""
_TEXT_WIDTH = 40


@dataclass(frozen=True)
class Share:
    """One evaluation prompt's part of the change. δH is the sum of all prompts' parts.

    Attributes:
        prompt: the prompt's number; in a log, its text.
        change: its part in nats (a token, for the per-token objective).
        sharpening: the part of `change` from distributions that change at the same prefixes; None for the sequence
            objective.
        drift: the part of `change` from prefixes and lengths that become more or less likely; None for the sequence
            objective.
    """

    prompt: int | str
    change: float
    sharpening: float | None
    drift: float | None


@dataclass(frozen=True)
class Cause:
    """One update prompt's part of the change that this batch's gradient makes.

    Attributes:
        prompt: the prompt's number; in a log, its text.
        change: its part in nats (a token, for the per-token objective).
        from_rewarded: the part of `change` from tokens of positive advantage.
        from_penalised: the part of `change` from tokens of negative advantage.
    """

    prompt: int | str
    change: float
    from_rewarded: float
    from_penalised: float


@dataclass(frozen=True)
class Causes:
    """Where the change comes from.

    Attributes:
        momentum: the part from earlier batches' gradients, in nats; None with update="gradient", which has no momentum.
        batch: the part from this batch's gradient.
        decay: the part from weight decay.
        prompts: the update prompts, each with its part of `batch`; empty without their rollouts.
        terms: the parts of `batch` from other terms of the loss, by name: those of the rollouts' `terms`, and the
            "entropy bonus".
        explained: the sum of the prompts' and the terms' parts over `batch`. They are computed for a loss that is the
            mean of advantage × log-probability and these terms, without dropout: `explained` is 1 for this loss.
            `other` is what all else adds. None without the prompts' rollouts, or if `batch` is 0.
        cosine: cosine similarity of the loss's gradient and that of this loss, among the elements that it reaches. It
            is 1 for this loss, and negative if advantages have the wrong sign. None without the prompts' rollouts, or
            with update="gradient", which takes the gradient of this loss.
    """

    momentum: float | None
    batch: float
    decay: float
    prompts: tuple[Cause, ...]
    explained: float | None
    cosine: float | None = None
    terms: Mapping[str, float] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        delta: float,
        prompts: tuple[Cause, ...] | None = None,
        *,
        terms: Mapping[str, float] | None = None,
        cosine: float | None = None,
        momentum: float | None = None,
        decay: float = 0.0,
    ) -> Causes:
        """The causes of a change in nats, from the other attributes. What momentum and decay leave is this batch's."""
        rest, terms = delta - ((momentum or 0.0) + decay), terms or {}
        explained = None
        if prompts is not None and rest:
            explained = (sum(cause.change for cause in prompts) + sum(terms.values())) / rest
        return cls(momentum, rest, decay, prompts or (), explained, cosine, terms)

    @property
    def other(self) -> float | None:
        """The part of `batch` that is no prompt's and no named term's: of terms that the rollouts do not name, a value
        loss, clipped ratios, or dropout. None where `explained` is."""
        return unexplained(self.batch, self.explained)

    @property
    def doubt(self) -> str:
        """Why the prompts' parts are not to be trusted; empty if they are."""
        if self.cosine is not None and self.cosine < 0.0:
            return (
                f"the loss's gradient is against that of advantage × log-probability (cosine {self.cosine:.2f}): pass "
                "the advantages of this step, and terms= and entropy_bonus= if it has them, with the signs that lower "
                "the loss"
            )
        if self.cosine is not None and self.cosine < _LEAST_COSINE:
            return (
                f"the loss's gradient differs from that of advantage × log-probability (cosine {self.cosine:.2f}): "
                "pass all responses that this step learns from, and other terms of the loss, such as a KL penalty or "
                "an entropy bonus, by Rollouts(terms=, entropy_bonus=), in the unit of the advantages"
            )
        # Parts may cancel: an error that is small beside them is harmless.
        size = math.hypot(*(cause.change for cause in self.prompts), *self.terms.values())
        if self.other is None or abs(self.other) <= _OFF_AT_MOST * max(abs(self.batch), size):
            return ""
        return (
            f"the parts of prompts and terms add up to {self.batch - self.other:+.1e} nats, and the batch's part is "
            f"{self.batch:+.1e}: the rest is from terms other than advantage × log-probability, such as a KL penalty "
            "or an entropy bonus, which Rollouts(terms=, entropy_bonus=) would name, or from dropout"
        )


def unexplained(batch: float | None, explained: float | None) -> float | None:
    """The part of a batch's change that is no prompt's, in nats; None if unknown."""
    return None if batch is None or explained is None else batch * (1.0 - explained)


def shares_by_prompt(change: EntropyChange, responses: Responses) -> tuple[Share, ...]:
    """Each evaluation prompt's part. The prompt that lowers entropy most comes first."""
    n = responses.n_prompts
    sharpening: Sequence[float | None] = [None] * n
    if change.sharpening_per_prompt is not None:
        sharpening = change.sharpening_per_prompt.tolist()
    rows = zip(responses.prompts.tolist(), change.per_prompt.tolist(), sharpening, strict=True)
    shares = [
        Share(prompt, each / n, None if sharp is None else sharp / n, None if sharp is None else (each - sharp) / n)
        for prompt, each, sharp in rows
    ]
    return tuple(sorted(shares, key=lambda share: share.change))


def credit_by_sign(credit: Tensor) -> list[Coefficients]:
    """Coefficients of Σ credit·s over tokens of positive, and of negative credit; [responses, tokens] each."""
    from sonde.policy.stats.entropy_gradient import Coefficients

    zero = credit.new_zeros(credit.shape)
    return [Coefficients(zero, credit.clamp(min=0.0)), Coefficients(zero, credit.clamp(max=0.0))]


def causes_by_prompt(rewarded: Tensor, penalised: Tensor, responses: Responses, scale: float) -> tuple[Cause, ...]:
    """Each update prompt's part t_p = scale × Σ credit·D s, summed over the prompt's responses.

    Args:
        rewarded: Σ credit·D s of each prompt over tokens of positive credit, along the direction for which a gradient g
            changes the entropy by g·Δ; [prompts].
        penalised: the same over tokens of negative credit.
        responses: the update's.
        scale: nats per unit of credit·D s.

    Returns:
        The prompts. The prompt that lowers entropy most comes first.
    """
    rows = zip(responses.prompts.tolist(), (scale * rewarded).tolist(), (scale * penalised).tolist(), strict=True)
    return tuple(sorted((Cause(p, up + down, up, down) for p, up, down in rows), key=lambda cause: cause.change))


def attribution_table(shares: Sequence[Share], causes: Causes | None, texts: Mapping[Any, str], n: int) -> str:
    """The first and the last few prompts of each kind, as lines of text; changes in nats.

    Args:
        shares: the evaluation prompts; the prompt that lowers entropy most comes first.
        causes: where the change comes from, with the update prompts in the same order.
        texts: the prompts' texts, by their numbers.
        n: how many prompts at either end.
    """

    def line(title: str, *cells: str) -> str:
        return f"{title:<{_TEXT_WIDTH}}" + "".join(f"{cell:>12}" for cell in cells)

    def row(prompt: int | str, *values: float | None) -> str:
        name = " ".join(texts.get(prompt, f"prompt {prompt}").split())
        return line(name if len(name) <= _TEXT_WIDTH else f"{name[: _TEXT_WIDTH - 1]}…", *map(_signed, values))

    lines = []
    if causes is not None:
        sources = {"from this batch": causes.batch, "from earlier ones": causes.momentum, "from decay": causes.decay}
        lines += [", ".join(f"{_signed(value)} {name}" for name, value in sources.items() if value != 0.0), ""]
        terms = [f"{_signed(value)} from the term {name}" for name, value in causes.terms.items()]
        if causes.other is not None and abs(causes.other) > _OF_OTHER_TERMS * abs(causes.batch):
            terms.append(f"{_signed(causes.other)} from terms other than the advantages")
        if terms:
            lines[:1] = [f"{lines[0]}; in this batch's, {', '.join(terms)}"]
        if causes.prompts:
            lines.append(line("learning from", "change", "rewarded", "penalised"))
            lines += [row(c.prompt, c.change, c.from_rewarded, c.from_penalised) for c in _ends(causes.prompts, n)]
            lines.append("")
    lines.append(line("evaluated on", "change", "sharpening", "drift"))
    lines += [row(s.prompt, s.change, s.sharpening, s.drift) for s in _ends(shares, n)]
    return "\n".join(lines)


def _ends(rows: Sequence[T], n: int) -> list[T]:
    return list(rows) if len(rows) <= 2 * n else [*rows[:n], *rows[len(rows) - n :]]


def _signed(value: float | None) -> str:
    return "–" if value is None else f"{value:+.2e}"
