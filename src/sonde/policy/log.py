"""What is written down of a policy: one header, a record of each step that was measured, alerts, an end."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from sonde.policy.stats.attribution import Causes
from sonde.policy.stats.coverage import LEVEL
from sonde.policy.stats.entropy_forecast import EntropyForecast
from sonde.policy.stats.forecast_point import Point, forecast_point
from sonde.policy.stats.importance import Per
from sonde.policy.stats.policy_alerts import find_policy_alerts
from sonde.records import RecordWriter, Sink, logger

_PROMPTS_AT_MOST = 64
_LONGEST_TEXT = 200
"""Characters of a prompt: a record holds many."""


class PolicyLog:
    """Writes measurements of a policy to sinks, and says when its entropy collapses.

    Args:
        sinks: where records go, such as `JsonlSink(folder)`, of which `sonde report folder` makes a page; empty on
            other ranks than the first.
        run: the run's name.
        setup: what was found, for people; JSON values.
        metadata: the user's own, JSON values.

    Example:
        >>> from sonde import EntropyChangeProbe, JsonlSink
        >>> def trained(probe: EntropyChangeProbe, optimizer, windows, folder: str) -> None:
        ...     journal = PolicyJournal([JsonlSink(folder)], run="my policy")
        ...     for step, evaluation in enumerate(windows, start=1):
        ...         with probe.around_step(evaluation) as around:
        ...             optimizer.step()
        ...         journal.measured(step, around.forecast.metrics(), around.forecast, evaluation.texts)
        ...     journal.end("training ended")
    """

    def __init__(
        self,
        sinks: Sequence[Sink],
        *,
        run: str = "",
        setup: Mapping[str, object] | None = None,
        metadata: Mapping[str, object] | None = None,
    ) -> None:
        self.alerts: dict[str, str] = {}
        """What has looked wrong so far: the first message of each name."""
        self.points: list[Point] = []
        """What forecasts said and what was true, so far."""
        self._step = 0
        self._per: Per = "token"
        self._log = RecordWriter(sinks)
        self._log.begin(run=run, unit="prompts", setup=setup or {}, metadata=metadata or {})

    def measured(
        self,
        step: int,
        metrics: Mapping[str, float | None],
        forecast: EntropyForecast | None = None,
        texts: Mapping[int, str] | None = None,
    ) -> None:
        """Write down what was measured around one optimizer step.

        Args:
            step: its number, from 1.
            metrics: by name; None where not known.
            forecast: that of the entropy's change, whose metrics are among them; its reason and prompts are written.
            texts: of prompts, by their numbers.

        Raises:
            ValueError: for a forecast whose interval is not one of 95 %.
        """
        self._step = step
        if forecast is not None:
            if forecast.level != LEVEL:
                raise ValueError(
                    f"logs are of {LEVEL:.0%} intervals, got a forecast with one of {forecast.level:.0%}: "
                    f"EntropyChangeProbe(level={LEVEL})"
                )
            self._per = "response" if forecast.objective == "sequence" else "token"
            self.points.append(forecast_point(step, metrics, self._per, forecast.reason))
        now = find_policy_alerts(self.points)
        for name, message in now.items():
            if name not in self.alerts:
                self.alerts[name] = message
                logger.warning("sonde: %s", message)
                self._log.write("alert", window=step, name=name, message=message)
        self._log.write(
            "policy",
            window=step,
            metrics={name: _finite(value) for name, value in metrics.items()},
            reason="" if forecast is None else forecast.reason,
            per=self._per,
            shares=[] if forecast is None else _shares(forecast, texts or {}),
            causes=None if forecast is None or forecast.causes is None else _causes(forecast.causes, texts or {}),
            alerts=now,
        )

    def end(self, reason: str) -> None:
        """Write why the run ended, and close the sinks; once it has, nothing."""
        self._log.write("end", window=self._step, reason=reason)
        self._log.close()


def _shares(forecast: EntropyForecast, texts: Mapping[int, str]) -> list[dict[str, object]]:
    largest = sorted(forecast.shares, key=lambda share: -abs(share.change))[:_PROMPTS_AT_MOST]
    return [
        {
            "prompt": _text(share.prompt, texts),
            "change": _finite(share.change),
            "sharpening": _finite(share.sharpening),
            "drift": _finite(share.drift),
        }
        for share in sorted(largest, key=lambda share: share.change)
    ]


def _causes(causes: Causes, texts: Mapping[int, str]) -> dict[str, object]:
    largest = sorted(causes.prompts, key=lambda cause: -abs(cause.change))[:_PROMPTS_AT_MOST]
    return {
        "momentum": _finite(causes.momentum),
        "batch": _finite(causes.batch),
        "decay": _finite(causes.decay),
        "explained": _finite(causes.explained),
        "prompts": [
            {
                "prompt": _text(cause.prompt, texts),
                "change": _finite(cause.change),
                "from_rewarded": _finite(cause.from_rewarded),
                "from_penalised": _finite(cause.from_penalised),
            }
            for cause in sorted(largest, key=lambda cause: cause.change)
        ],
    }


def _text(prompt: int, texts: Mapping[int, str]) -> str:
    text = texts.get(prompt, f"prompt {prompt}")
    return text if len(text) <= _LONGEST_TEXT else f"{text[:_LONGEST_TEXT]}…"


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None
