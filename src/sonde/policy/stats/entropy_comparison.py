"""What several losses would do to the entropy: their forecasts on the same responses, and paired differences."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeVar

from sonde.policy.stats.attribution import Share, shares_by_prompt
from sonde.policy.stats.entropy_change import with_error
from sonde.policy.stats.entropy_forecast import EntropyForecast, why_no_support
from sonde.policy.stats.entropy_gradient import Responses
from sonde.policy.stats.importance import FiniteStep

T = TypeVar("T")


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

    @property
    def in_words(self) -> str:
        """What it says, in a few words."""
        if not self.is_valid:
            return self.reason
        if not self.is_resolved or self.difference is None:
            return "cannot be distinguished"
        return "more entropy" if self.difference > 0 else "less entropy"


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
            return self.differences[name].in_words
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
            change = with_error(forecast.delta, forecast.se)
            difference = "" if found is None else with_error(found.difference, found.se)
            lines.append(f"{name:<{width}}  {change:>22}  {difference:>22}  {self.in_words(name)}")
        return "\n".join(lines)

    def __str__(self) -> str:
        return self.table()


def comparison_of(
    found: Mapping[str, tuple[EntropyForecast, T | None]],
    baseline: str,
    between: Callable[[T, T], FiniteStep] | None = None,
    responses: Responses | None = None,
) -> EntropyComparison:
    """Forecasts of several steps on the same responses, with their paired differences.

    Args:
        found: by name, the forecast of a step and the scores after it; None if these are unknown.
        baseline: name of the step that the others are compared with.
        between: the change of the entropy from one step to another, by the scores after both.
        responses: the evaluation responses.
    """
    (of_baseline, start), differences = found[baseline], {}
    for name, (forecast, now) in found.items():
        if name == baseline:
            continue
        reasons = [forecast.reason, of_baseline.reason and f"the baseline: {of_baseline.reason}"]
        difference = EntropyDifference(None, None, None, None, next(filter(None, reasons), ""))
        if between is not None and responses is not None and start is not None and now is not None:
            step = between(start, now)
            change, shares = step.change, shares_by_prompt(step.change, responses)
            reason = next(filter(None, [*reasons, change.reason, why_no_support(step.support)]), "")
            difference = EntropyDifference(change.delta, change.se, change.low, change.high, reason, shares)
        differences[name] = difference
    return EntropyComparison(baseline, {name: forecast for name, (forecast, _) in found.items()}, differences)
