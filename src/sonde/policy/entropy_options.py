"""The options of an `EntropyChangeProbe`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from sonde.policy.scoring.precision import Precision
from sonde.policy.stats.entropy_change import Objective, SequenceWeights
from sonde.policy.stats.entropy_forecast import Update
from sonde.record_values import whole_number


@dataclass(frozen=True)
class EntropyChangeOptions:
    """How an `EntropyChangeProbe` measures.

    Attributes:
        objective: which entropy: "per_token" for R = E[Σ H]/E[T], in nats a token; "sequence" for E[−Σ w s], in nats a
            response.
        sequence_weights: w of the "sequence" objective: "one", or one over the response's "length".
        update: which update: "step" for the optimizer's own step, of any size, from scores before and after it; or
            "gradient" for the textbook's: η times the mean of the update prompts' gradients, preconditioned by Adam's
            second moment. It is forecast to first order, and the scatter of the update prompts counts in its standard
            error too.
        step_size: η of "gradient"; None for the optimizer's learning rate.
        micro_batch_prompts: number of prompts scored at a time.
        clip_at: largest weight of a response after the step, as a multiple of the mean weight at its position: less
            variance and some bias. None leaves the weights self-normalised.
        precision: "float32" scores responses in 32 bits: autocast is off, and parameters of 16 bits are converted while
            they are used, a layer at a time. "model" scores as the model computes.
        every: `step` makes a forecast in every so many windows at most.
        budget: part of the run's time that `step` may take; None for no limit.

    Raises:
        ValueError: for an option outside its range.

    Example:
        >>> EntropyChangeOptions(objective="sequence", micro_batch_prompts=8).update
        'step'
    """

    objective: Objective = "per_token"
    sequence_weights: SequenceWeights = "one"
    update: Update = "step"
    step_size: float | None = None
    micro_batch_prompts: int = 2
    clip_at: float | None = None
    precision: Precision = "float32"
    every: int = 1
    budget: float | None = None

    def __post_init__(self) -> None:
        _check_choice("objective", self.objective, ("per_token", "sequence"))
        _check_choice("update", self.update, ("step", "gradient"))
        _check_choice("sequence_weights", self.sequence_weights, ("one", "length"))
        _check_choice("precision", self.precision, ("float32", "model"))
        for name, n in (("micro_batch_prompts", self.micro_batch_prompts), ("every", self.every)):
            object.__setattr__(self, name, whole_number(f"{name} must be a whole number", n))
        if self.step_size is not None and not _is_between(0, self.step_size, math.inf):
            raise ValueError(f"step_size must be positive and finite, got {self.step_size!r}")
        if self.clip_at is not None and not _is_between(1, self.clip_at, math.inf):
            raise ValueError(f"clip_at must be above 1, as a multiple of the mean weight, got {self.clip_at!r}")
        if self.budget is not None and not _is_between(0, self.budget, 1):
            raise ValueError(f"budget must be a part of the run's time, above 0 and below 1, got {self.budget!r}")

    @property
    def is_step(self) -> bool:
        """Whether the update is the optimizer's own step."""
        return self.update == "step"

    def needs_own_responses(self, *, causes: bool = False) -> str:
        """The option, if there is one, for which evaluation responses must be the policy's own, without `log_prob=`.

        Args:
            causes: whether the change is also split into its causes.

        Returns:
            The option as it is written, or "".
        """
        if not self.is_step:
            return "update='gradient'"
        # The gradient of whole responses has no prefix weights.
        return "causes=True of objective='sequence'" if causes and self.objective == "sequence" else ""


def _is_between(low: float, value: object, high: float) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and low < value < high


def _check_choice(name: str, got: object, choices: Sequence[object]) -> None:
    if got not in choices:
        raise ValueError(f"{name} must be one of {', '.join(map(str, choices))}, got {got!r}")
