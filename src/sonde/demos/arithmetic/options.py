"""Options of the entropy demo."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Self

from tyro.conf import arg

COMPLETIONS = 8
"""Completions of each prompt."""
_N_PROMPTS = 100  # sums of two digits


@dataclass(frozen=True)
class EntropyDemoOptions:
    """Train a tiny language model to add by GRPO, and forecast what each update does to its entropy.

    TRL's GRPOTrainer teaches a tiny model to add two digits, on the CPU. Every few steps, sonde forecasts what the
    optimizer's step will do to the policy's entropy, and then measures what it did. It needs TRL. Ctrl-C stops
    early and keeps the measurements.

    Attributes:
        steps: Optimizer steps.
        every: Optimizer steps from one forecast to the next.
        prompts: Prompts that a step learns from, with 8 completions each.
        evaluation_prompts: Prompts that evaluate a forecast and its truth.
        learning_rate: Learning rate of AdamW.
        seed: Seed of the weights and of sampling.
        out: New or empty folder for log and report.
        config: YAML file with any of these options; flags win over it.
    """

    steps: Annotated[int, arg(metavar="N")] = 120
    every: Annotated[int, arg(metavar="N")] = 5
    prompts: Annotated[int, arg(metavar="N")] = 8
    evaluation_prompts: Annotated[int, arg(metavar="N")] = 32
    learning_rate: Annotated[float, arg(metavar="RATE")] = 3e-3
    seed: Annotated[int, arg(metavar="N")] = 0
    out: Annotated[Path | None, arg(metavar="FOLDER", help_behavior_hint="(default: sonde-demo/DATE-TIME)")] = None
    config: Annotated[Path | None, arg(metavar="FILE", help_behavior_hint="(optional)")] = None

    @classmethod
    def from_file(cls, path: Path) -> Self:
        """The options of a YAML file; options that it lacks have their defaults.

        Raises:
            FileNotFoundError: if there is no such file.
            ValueError: if it is not a mapping of options to allowed values.
        """
        from sonde.options import options_from, read_yaml  # here: it imports torch, which `sonde report` does not need

        return options_from(cls, read_yaml(path, "steps: 100"), path, without=("config",))

    def check(self) -> None:
        """Refuse options out of range.

        Raises:
            ValueError: naming the option.
        """
        for name in ("steps", "every"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}: give a whole number from 1 up")
        if self.prompts < 2:
            raise ValueError(f"prompts must be at least 2, got {self.prompts}: noise is measured by comparing prompts")
        if self.prompts > _N_PROMPTS - 2:
            raise ValueError(
                f"prompts must be at most {_N_PROMPTS - 2}, got {self.prompts}: of {_N_PROMPTS} sums, at least 2 must "
                "evaluate the forecast"
            )
        if not 2 <= self.evaluation_prompts <= _N_PROMPTS - self.prompts:
            raise ValueError(
                f"evaluation_prompts must be from 2 to {_N_PROMPTS - self.prompts}, the number of sums that a step "
                f"does not learn from, got {self.evaluation_prompts}: pass --evaluation-prompts "
                f"{min(32, _N_PROMPTS - self.prompts)}"
            )
        if not 0 <= self.seed < 2**31:
            raise ValueError(f"seed must be at least 0 and less than 2³¹, got {self.seed}: choose another")
        if not 0 < self.learning_rate < math.inf:
            raise ValueError(f"learning_rate must be positive and finite, got {self.learning_rate}: try 0.003")
