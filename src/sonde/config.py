"""Probes from a mapping or a YAML file, for trainers that are set up by one."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, get_type_hints

import torch
from torch import nn

from sonde.batch_size.attach import GnsProbeConfig
from sonde.call_site import stack_level
from sonde.deprecation import refuse_unknown
from sonde.options import known_name, options_from, read_yaml
from sonde.policy.entropy_change import EntropyProbeConfig, Sampler
from sonde.policy.policy_entropy import PolicyEntropyProbeConfig
from sonde.policy.scoring.rollouts import TokenStatistics
from sonde.probe import Partners, Probe, ProbeConfig, RolloutProbe
from sonde.records import LogOrPlaces, log_of


@dataclass(frozen=True)
class ProbesConfig:
    """Which probes are wanted, and how; all are off by default. A further built-in probe is one more line here."""

    gns_probe: GnsProbeConfig = field(default_factory=GnsProbeConfig)
    entropy_probe: EntropyProbeConfig = field(default_factory=EntropyProbeConfig)
    policy_entropy_probe: PolicyEntropyProbeConfig = field(default_factory=PolicyEntropyProbeConfig)

    def attach(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        token_statistics: TokenStatistics | None = None,
        sampler: Sampler | None = None,
        log: LogOrPlaces = None,
        **deprecated: Any,
    ) -> dict[str, Probe | RolloutProbe]:
        """The probes that are enabled, by their keys.

        Args:
            model: to be measured.
            optimizer: its optimizer.
            token_statistics: scores responses; by default those of a causal language model, at a probe's temperature.
            sampler: draws fresh responses for the entropy probe.
            log: of the run, or what `RunLog` takes; by default one without sinks.
            **deprecated: `sinks` and `run`, which are arguments of `RunLog` now.
        """
        if log is not None or deprecated:
            log = log_of(log, deprecated, every=self.gns_probe.log_every)
            refuse_unknown(ProbesConfig.attach, deprecated)
        self.warn_if_nothing_is_on()
        partners = Partners(model, optimizer, log, token_statistics, sampler)
        configs: dict[str, ProbeConfig] = {f.name: getattr(self, f.name) for f in fields(self)}
        return {key: config.attach(partners) for key, config in configs.items() if config.enabled}

    def warn_if_nothing_is_on(self) -> None:
        """Say that no probe is on, since a run without measurements looks like one with them until it ends."""
        names = [f.name for f in fields(self)]
        if not any(getattr(self, name).enabled for name in names):
            message = (
                f"the configuration turns on no probe, so nothing is measured: write {names[0]}: {{enabled: true}}"
            )
            warnings.warn(f"{message}, or another of {', '.join(names)}", stacklevel=stack_level())


def probes_from_config(config: Mapping[str, Any] | str | Path) -> ProbesConfig:
    """Read which probes are wanted.

    Args:
        config: a mapping such as `{"gns_probe": {"enabled": True}}`, or the path of a YAML file of that form;
            docs/configuration.md has every key.

    Returns:
        The configuration, whose `attach` makes the probes.

    Raises:
        FileNotFoundError: when there is no such file.
        ValueError: for an unknown key, naming the nearest, or a value of another kind or outside its range.

    Example:
        >>> config = probes_from_config({"gns_probe": {"enabled": True, "unit": "prompts"}})
        >>> config.gns_probe.unit, config.entropy_probe.enabled
        ('prompts', False)
    """
    where: object = "the config"
    if isinstance(config, str | Path):
        where = config
        config = read_yaml(Path(config), "gns_probe: {enabled: true}")
    kinds = get_type_hints(ProbesConfig)
    configs = {}
    for key, options in config.items():
        name = known_name(key, list(kinds), where)
        if not isinstance(options, Mapping):
            raise ValueError(
                f"{name} in {where} must map options to values, got {options!r}: write {name}: {{enabled: true}}"
            )
        configs[name] = options_from(kinds[name], options, f"{name} of {where}")
    return ProbesConfig(**configs)
