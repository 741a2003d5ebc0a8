"""The records of a policy's probes: a record for each measured step, and alerts."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from sonde.policy.stats.attribution import Cause, Causes, Share
from sonde.policy.stats.columns import METRICS
from sonde.policy.stats.entropy_comparison import EntropyComparison, EntropyDifference
from sonde.policy.stats.entropy_forecast import EntropyForecast
from sonde.policy.stats.forecast_point import ComparedLoss, Per, forecast_point
from sonde.policy.stats.policy_alerts import PolicyAlerts
from sonde.policy.stats.policy_entropy import PolicyEntropy
from sonde.record_values import as_json, metric_values, step_number
from sonde.records import LogOrPlaces, log_of, logger

P = TypeVar("P", Share, Cause)

_PROMPTS_AT_MOST = 64
"""Prompts in a record, those with the largest parts first."""
_LONGEST_TEXT = 200
"""Characters of a prompt's text in a record."""


class PolicyLog:
    """Writes measurements of a policy to the log of its run, and says when the policy's entropy collapses.

    Args:
        log: of the run, or what `RunLog` takes, for a log of its own.
        setup: how the probes measure, for people; JSON values. A report computes with the counts `ranks`, `parameters`
            and `log_every`, and with the number `level`.

    Example:
        >>> import sonde
        >>> def trained(probe: sonde.EntropyChangeProbe, optimizer, windows, folder: str) -> None:
        ...     log = sonde.PolicyLog(sonde.RunLog(sonde.JsonlSink(folder), run="my policy"))
        ...     for step, evaluation in enumerate(windows, start=1):
        ...         with probe.around_step(evaluation) as around:
        ...             optimizer.step()
        ...         log.measured(step, around.forecast.metrics(), around.forecast, evaluation.texts)
        ...     log.end("training ended")
    """

    def __init__(self, log: LogOrPlaces, *, setup: Mapping[str, object] | None = None) -> None:
        self.alerts: dict[str, str] = {}
        """Alerts so far: the first message of each name."""
        self._alerts = PolicyAlerts()
        self._step = 0
        self._per: Per = "token"
        self._log = log_of(log)
        self._has_ended = False
        self._log.begin("policy", unit="prompts", setup=setup or {}, metrics=METRICS)

    def measured(
        self,
        step: int,
        metrics: Mapping[str, float | None],
        forecast: EntropyForecast | None = None,
        texts: Mapping[int, str] | None = None,
        entropy: PolicyEntropy | None = None,
    ) -> None:
        """Write the measurements around one optimizer step; nothing once the log has ended.

        Args:
            step: number of the optimizer step, from 0 up.
            metrics: numbers by metric name, also of numpy's or torch's types; None where one is not known. Those of
                `forecast` among them.
            forecast: of the entropy's change; its reason, shares and causes are written too.
            texts: of prompts, by their numbers: those of the update too, where there are causes.
            entropy: of the responses that the step learns from. Where there is no forecast, the entropies by position
                are theirs.

        Raises:
            ValueError: for a step or a metric that is no number.
        """
        if self._has_ended:
            return
        step, metrics = step_number("step", step), metric_values(metrics)
        if forecast is not None:
            self._per = "response" if forecast.objective == "sequence" else "token"
        self._step = step
        point = forecast_point(step, metrics, self._per, "" if forecast is None else forecast.reason)
        if forecast is not None or point.entropy is not None:
            self._alerts.add(point)
        positions = () if forecast is None else forecast.by_position
        if not positions and entropy is not None:
            positions = entropy.by_position
        alerts = self._alerts.messages()
        for name, message in alerts.items():
            self.alert(name, message)
        self._log.write(
            "policy",
            window=step,
            metrics=metrics,
            reason="" if forecast is None else forecast.reason,
            per=self._per,
            shares=[] if forecast is None else as_json(_largest(forecast.shares, texts or {})),
            causes=as_json(forecast and forecast.causes and _causes(forecast.causes, texts or {})),
            positions=as_json(positions),
            alerts=alerts,
        )
        self.alerts |= self._log.alerts  # of a sink that has failed

    def compared(self, step: int, comparison: EntropyComparison) -> None:
        """Write a comparison of losses; nothing once the log has ended.

        Args:
            step: number of the optimizer step that was compared, from 0 up.
            comparison: by `EntropyChangeProbe.compare`.

        Raises:
            ValueError: for a step that is no number.
        """
        step = step_number("step", step)
        if self._has_ended:
            return
        per = {forecast.objective for forecast in comparison.forecasts.values()}
        self._log.write(
            "comparison",
            window=step,
            baseline=_shortened(comparison.baseline),
            per="response" if per == {"sequence"} else "token",
            options=as_json(_options(comparison)),
        )

    def alert(self, name: str, message: str, *, details: str = "") -> None:
        """Write an alert of something that went wrong, once for each name; nothing once the log has ended.

        Args:
            name: of the alert.
            message: in plain words.
            details: more for the log, such as a traceback.
        """
        if self._has_ended or name in self.alerts:
            return
        self.alerts[name] = message
        logger.warning("sonde: %s", message)
        self._log.write("alert", window=self._step, name=name, message=message, details=details)

    def end(self, reason: str) -> None:
        """End this part of the run's log. A second call does nothing.

        Args:
            reason: why, for the log.
        """
        if not self._has_ended:
            self._has_ended = True
            self._log.leave("policy", reason, window=self._step)


def _largest(parts: Sequence[P], texts: Mapping[Any, str]) -> list[P]:
    """The prompts with the largest parts, by their texts; the prompt that lowers entropy most comes first."""

    def named(part: P) -> P:
        return dataclasses.replace(part, prompt=_shortened(texts.get(part.prompt, f"prompt {part.prompt}")))

    largest = sorted(parts, key=lambda part: -abs(part.change))[:_PROMPTS_AT_MOST]
    return sorted(map(named, largest), key=lambda part: part.change)


def _options(comparison: EntropyComparison) -> list[ComparedLoss]:
    unknown = EntropyDifference(None, None, None, None, "")  # the baseline has none
    options = []
    for name, forecast in comparison.forecasts.items():
        found = comparison.differences.get(name, unknown)
        is_valid = forecast.is_valid if name == comparison.baseline else found.is_valid
        numbers = (forecast.delta, forecast.se, found.difference, found.low, found.high)
        options.append(ComparedLoss(_shortened(name), *numbers, comparison.in_words(name), is_valid))
    return options


def _causes(causes: Causes, texts: Mapping[int, str]) -> Causes:
    terms = {_shortened(name): value for name, value in causes.terms.items()}
    return dataclasses.replace(causes, prompts=tuple(_largest(causes.prompts, texts)), terms=terms)


def _shortened(text: str) -> str:
    return text if len(text) <= _LONGEST_TEXT else f"{text[:_LONGEST_TEXT]}…"
