"""The options of an `EntropyChangeProbe`, and its metrics."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from sonde.policy.scoring.precision import Precision
from sonde.policy.scoring.summed_gradient import DTYPES
from sonde.policy.stats.entropy_change import Objective, SequenceWeights
from sonde.record_values import whole_number

_SHORT = {"fp32": torch.float32, "fp64": torch.float64, "fp16": torch.float16, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class MeanGradients:
    """The textbook's update: η times the mean of the update prompts' gradients, preconditioned by Adam's second moment.

    The forecast is to first order. The scatter of the update prompts counts in its standard error too.

    Attributes:
        step_size: η; None for the optimizer's learning rate.
        buffer_dtype: dtype of summed gradients, also as "fp32" or "fp16".
        offload: keep summed gradients on the CPU while they are not needed.
        checkpoint: turn on gradient checkpointing during backwards; for models of transformers. A training that
            checkpoints is measured so in any case.

    Raises:
        ValueError: for an option outside its range.

    Example:
        >>> MeanGradients(buffer_dtype="fp16", offload=True).buffer_dtype
        torch.float16
    """

    step_size: float | None = None
    buffer_dtype: torch.dtype | str = torch.float32
    offload: bool = False
    checkpoint: bool = False

    def __post_init__(self) -> None:
        given = self.buffer_dtype
        if isinstance(given, str):
            object.__setattr__(self, "buffer_dtype", _SHORT.get(given, getattr(torch, given, given)))
        _check_choice("buffer_dtype", self.buffer_dtype, DTYPES)
        for name in ("offload", "checkpoint"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} must be True or False, got {getattr(self, name)!r}")
        if self.step_size is not None and not _is_between(0, self.step_size, math.inf):
            raise ValueError(f"step_size must be positive and finite, got {self.step_size!r}")


@dataclass(frozen=True)
class EntropyChangeOptions:
    """How an `EntropyChangeProbe` measures.

    Attributes:
        objective: which entropy: "per_token" for R = E[Σ H]/E[T], in nats a token; "sequence" for E[−Σ w s], in nats a
            response.
        sequence_weights: w of the "sequence" objective: "one", or one over the response's "length".
        update: which update: "step" for the optimizer's own step, of any size, from scores before and after it; or
            `MeanGradients`, with "gradient" for the defaults of it.
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
    update: Literal["step", "gradient"] | MeanGradients = "step"
    micro_batch_prompts: int = 2
    clip_at: float | None = None
    precision: Precision = "float32"
    every: int = 1
    budget: float | None = None

    def __post_init__(self) -> None:
        _check_choice("objective", self.objective, ("per_token", "sequence"))
        if not isinstance(self.update, MeanGradients) and self.update not in ("step", "gradient"):
            raise ValueError(f"update must be step, gradient or a sonde.MeanGradients(...), got {self.update!r:.60}")
        _check_choice("sequence_weights", self.sequence_weights, ("one", "length"))
        _check_choice("precision", self.precision, ("float32", "model"))
        for name, n in (("micro_batch_prompts", self.micro_batch_prompts), ("every", self.every)):
            object.__setattr__(self, name, whole_number(f"{name} must be a whole number", n))
        if self.clip_at is not None and not _is_between(1, self.clip_at, math.inf):
            raise ValueError(f"clip_at must be above 1, as a multiple of the mean weight, got {self.clip_at!r}")
        if self.budget is not None and not _is_between(0, self.budget, 1):
            raise ValueError(f"budget must be a part of the run's time, above 0 and below 1, got {self.budget!r}")

    @property
    def is_step(self) -> bool:
        """Whether the update is the optimizer's own step."""
        return self.update == "step"

    @property
    def gradients(self) -> MeanGradients:
        """How gradients are summed."""
        return self.update if isinstance(self.update, MeanGradients) else MeanGradients()

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
