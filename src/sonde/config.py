"""Probes from a mapping or a YAML file, for trainers that are set up by one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from sonde.batch_size.probe import NoiseScaleProbe
from sonde.options import known_name, options_from, read_yaml
from sonde.policy.entropy_change import EntropyChangeProbe, Sampler
from sonde.policy.entropy_options import EntropyChangeOptions
from sonde.policy.policy_entropy import PolicyEntropyProbe
from sonde.policy.scoring.rollouts import TokenStatistics
from sonde.policy.scoring.token_statistics import CausalLMStatistics
from sonde.probe import Probe
from sonde.records import Sink


@dataclass(frozen=True)
class GnsProbeConfig:
    """`gns_probe:`, a `NoiseScaleProbe`; its docstring says what each means."""

    enabled: bool = False
    unit: str = "sequences"
    units_per_piece: float | None = None
    horizon: float = 100.0
    groups: Literal["blocks"] | None = "blocks"
    log_every: int = 10
    tap: Literal["auto", "leaf", "comm_hook"] = "auto"
    metric: Literal["euclidean", "adam"] = "euclidean"


@dataclass(frozen=True)
class EntropyProbeConfig:
    """`entropy_probe:`, an `EntropyChangeProbe`; its docstring says what each means."""

    enabled: bool = False
    every: int = 10
    objective: Literal["per_token", "sequence"] = "per_token"
    update: Literal["step", "gradient"] = "step"
    sequence_weights: Literal["one", "length"] = "one"
    step_size: float | None = None
    micro_batch_prompts: int = 2
    derivatives: Literal["auto", "forward", "central"] = "auto"
    weighting: Literal["snis", "clip"] = "snis"
    temperature: float = 1.0
    offload: bool = False
    checkpoint: bool = False
    strict: bool = False


@dataclass(frozen=True)
class PolicyEntropyProbeConfig:
    """`policy_entropy_probe:`, a `PolicyEntropyProbe`; its docstring says what each means."""

    enabled: bool = False
    micro_batch_prompts: int = 8
    temperature: float = 1.0


@dataclass(frozen=True)
class ProbesConfig:
    """Which probes are wanted, and how; all are off by default."""

    gns_probe: GnsProbeConfig = GnsProbeConfig()
    entropy_probe: EntropyProbeConfig = EntropyProbeConfig()
    policy_entropy_probe: PolicyEntropyProbeConfig = PolicyEntropyProbeConfig()

    def attach(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        token_statistics: TokenStatistics | None = None,
        sampler: Sampler | None = None,
        sinks: Sequence[Sink] = (),
        run: str = "",
    ) -> dict[str, Probe | PolicyEntropyProbe]:
        """The probes that are enabled, by their keys.

        Args:
            model: to be measured.
            optimizer: its optimizer.
            token_statistics: scores responses; by default those of a causal language model, at a probe's temperature.
            sampler: fresh responses for the entropy probe.
            sinks: where the noise scale's records go.
            run: the run's name in them.
        """
        probes: dict[str, Probe | PolicyEntropyProbe] = {}
        if (gns := self.gns_probe).enabled:
            probes["gns_probe"] = NoiseScaleProbe(model, optimizer, sinks=sinks, run=run, **options_of(gns))
        if (entropy := self.entropy_probe).enabled:
            statistics = token_statistics or CausalLMStatistics(entropy.temperature)
            probes["entropy_probe"] = EntropyChangeProbe(
                model,
                optimizer,
                EntropyChangeOptions(**options_of(entropy)),
                token_statistics=statistics,
                sampler=sampler,
            )
        if (policy := self.policy_entropy_probe).enabled:
            statistics = token_statistics or CausalLMStatistics(policy.temperature)
            probes["policy_entropy_probe"] = PolicyEntropyProbe(
                model, token_statistics=statistics, **options_of(policy)
            )
        return probes


def probes_from_config(config: Mapping[str, Any] | str | Path) -> ProbesConfig:
    """Read which probes are wanted.

    Args:
        config: a mapping such as `{"gns_probe": {"enabled": True}}`, or the path of a YAML file of that form.

    Returns:
        What `attach` then makes probes of.

    Raises:
        FileNotFoundError: when there is no such file.
        ValueError: for a key that is not known, naming the nearest, or a value of another kind.

    Example:
        >>> config = probes_from_config({"gns_probe": {"enabled": True, "unit": "prompts"}})
        >>> config.gns_probe.unit, config.entropy_probe.enabled
        ('prompts', False)
    """
    where: object = "the config"
    if isinstance(config, str | Path):
        where = config
        config = read_yaml(Path(config), "gns_probe: {enabled: true}")
    kinds: dict[str, Any] = {
        "gns_probe": GnsProbeConfig,
        "entropy_probe": EntropyProbeConfig,
        "policy_entropy_probe": PolicyEntropyProbeConfig,
    }
    found = {}
    for key, options in config.items():
        name = known_name(key, list(kinds), where)
        if not isinstance(options, Mapping):
            raise ValueError(
                f"{name} in {where} must map options to values, got {options!r}: write {name}: {{enabled: true}}"
            )
        found[name] = options_from(kinds[name], options, f"{name} of {where}")
    return ProbesConfig(**found)


def options_of(config: Any) -> dict[str, Any]:
    """What a probe takes of its part of the configuration."""
    return {name: value for name, value in vars(config).items() if name not in ("enabled", "temperature")}
