"""What several losses would do to the entropy: their forecasts on the same responses, and paired differences."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from sonde.policy.stats.attribution import Share, shares_by_prompt
from sonde.policy.stats.entropy_forecast import EntropyForecast, why_no_support
from sonde.policy.stats.entropy_gradient import Responses
from sonde.policy.stats.finite_step import FiniteStep


@dataclass(frozen=True)
class EntropyDifference:
    """The entropy after a loss's step minus the entropy after the baseline's step, from the same responses.

    Attributes:
        difference: in nats, of the unit of the forecasts; None if unknown.
        se: its standard error, by the jackknife over evaluation prompts; None if unknown.
        low: lower end of its 95 % interval, by Student's t; None if unknown.
        high: upper end; None if unknown.
        reason: why a number is unknown, or not to be trusted; empty otherwise.
        shares: every evaluation prompt's part of `difference`. The most negative part comes first.
    """

    difference: float | None
    se: float | None
    low: float | None
    high: float | None
    reason: str
    shares: tuple[Share, ...] = ()

    @property
    def is_valid(self) -> bool:
        """Whether `reason` is empty."""
        return not self.reason

    @property
    def is_resolved(self) -> bool:
        """Whether the difference is to be trusted, and its interval does not contain 0."""
        return self.is_valid and self.low is not None and self.high is not None and not self.low <= 0.0 <= self.high

    def in_words(self, baseline: str) -> str:
        """What it says, in a few words."""
        if not self.is_valid:
            return self.reason
        if not self.is_resolved or self.difference is None:
            return f"cannot be distinguished from {baseline}"
        return f"{'more' if self.difference > 0 else 'less'} entropy than {baseline}"


def entropy_difference(
    of: EntropyForecast, baseline: EntropyForecast, found: FiniteStep | None, responses: Responses | None
) -> EntropyDifference:
    """The paired difference of two forecasts.

    Args:
        of: an option's forecast.
        baseline: the baseline's, of the same responses.
        found: the change from the baseline's step to the option's; None if either is unknown.
        responses: the evaluation responses.
    """
    reasons = (of.reason, baseline.reason and f"the baseline: {baseline.reason}")
    if found is None or responses is None:
        return EntropyDifference(None, None, None, None, next(filter(None, reasons)))
    change = found.change
    reason = next(filter(None, (*reasons, change.reason, why_no_support(found.support))), "")
    shares = shares_by_prompt(change, responses)
    return EntropyDifference(change.delta, change.se, change.low, change.high, reason, shares)


@dataclass(frozen=True)
class EntropyComparison:
    """What each of several losses would do to the policy's entropy, on one update batch and one evaluation batch.

    Attributes:
        baseline: name of the loss that the others are compared with.
        forecasts: the forecast of each loss, by its name.
        differences: of each other loss, from the baseline. They are paired, so they are known better than the
            forecasts.
    """

    baseline: str
    forecasts: Mapping[str, EntropyForecast]
    differences: Mapping[str, EntropyDifference]

    def in_words(self, name: str) -> str:
        """What the comparison says of a loss, in a few words."""
        if name != self.baseline:
            return self.differences[name].in_words(self.baseline)
        reason = self.forecasts[name].reason
        return f"the baseline; {reason}" if reason else "the baseline"

    def table(self) -> str:
        """A line for each loss: its forecast, its difference from the baseline, and what this says in words."""
        width = max(20, *map(len, self.forecasts))
        per = "a token" if next(iter(self.forecasts.values())).objective == "per_token" else "a response"
        head = f"{f'loss (nats {per})':<{width}}  {'change':>22}  {'difference, paired':>22}"
        lines = [head]
        for name, forecast in self.forecasts.items():
            found = self.differences.get(name)
            change = _with_error(forecast.delta, forecast.se)
            difference = "" if found is None else _with_error(found.difference, found.se)
            lines.append(f"{name:<{width}}  {change:>22}  {difference:>22}  {self.in_words(name)}")
        return "\n".join(lines)

    def __str__(self) -> str:
        return self.table()


def _with_error(value: float | None, se: float | None) -> str:
    if value is None:
        return "unknown"
    return f"{value:+.2e} ± {'unknown' if se is None else f'{se:.1e}'}"
