"""The options of an `EntropyChangeProbe` in a configuration."""

from __future__ import annotations

from dataclasses import dataclass

from sonde.policy.entropy_change import EntropyChangeProbe
from sonde.policy.entropy_options import EntropyChangeOptions
from sonde.policy.scoring.optimizer_step import why_no_forecast
from sonde.policy.scoring.token_statistics import CausalLMStatistics
from sonde.probe import Partners
from sonde.stats.intervals import LEVEL


@dataclass(frozen=True)
class EntropyProbeConfig(EntropyChangeOptions):
    """`entropy_probe:` in a configuration.

    Attributes:
        enabled: whether the probe is wanted.
        every: as in `EntropyChangeOptions`.
        temperature: at which responses are scored, where `attach` is given no token statistics; None for that of the
            responses.
    """

    enabled: bool = False
    every: int = 10
    temperature: float | None = None

    def attach(self, partners: Partners) -> EntropyChangeProbe:
        """Make the probe, whose `step` a loop calls.

        Raises:
            ValueError: if `step` could not work: without a sampler, for an optimizer whose step cannot be forecast, or
                for update="gradient"; or if its intervals are not those that the log holds.
        """
        if self.update == "gradient":
            raise ValueError(
                "entropy_probe: {update: gradient} needs the update's responses, and step() has none: leave it out, or "
                "make sonde.EntropyChangeProbe in code and call forecast() with them"
            )
        if not callable(partners.sampler):
            raise ValueError(
                f"entropy_probe evaluates each step on fresh responses, got sampler={partners.sampler!r:.60}: pass "
                "sampler=, a function model -> sonde.Rollouts, or make sonde.EntropyChangeProbe in code and call "
                "forecast() with responses"
            )
        if self.level != LEVEL and partners.log is not None and partners.log.has_sinks:
            raise ValueError(
                f"entropy_probe: {{level: {self.level}}} cannot be logged, since a log holds {LEVEL:.0%} intervals: "
                "leave level out, or the log"
            )
        if why := why_no_forecast(partners.optimizer):
            raise ValueError(f"entropy_probe forecasts each step, and {why}; make sonde.EntropyChangeProbe in code")
        statistics = partners.token_statistics
        if statistics is None:
            statistics = CausalLMStatistics(self.temperature)
        return EntropyChangeProbe(
            partners.model,
            partners.optimizer,
            self,
            token_statistics=statistics,
            sampler=partners.sampler,
            grad_scaler=partners.grad_scaler,
            process_group=partners.process_group,
        )
