"""The options of an `EntropyChangeProbe`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from sonde.policy.scoring.precision import Precision
from sonde.policy.scoring.summed_gradient import DTYPES
from sonde.policy.stats.entropy_change import Objective
from sonde.policy.stats.entropy_forecast import Update
from sonde.policy.stats.prefix_weights import CLIPPED_AT, Weighting
from sonde.policy.stats.sequence_entropy import SequenceWeights
from sonde.record_values import whole_number


@dataclass(frozen=True)
class EntropyChangeOptions:
    """How an `EntropyChangeProbe` measures.

    Attributes:
        objective: which entropy: "per_token" for R = E[Σ H]/E[T], in nats a token; "sequence" for E[−Σ w s], in nats a
            response.
        update: which update: "step" for the optimizer's own step, of any size, from scores before and after it;
            "gradient" for η times the mean of the update prompts' gradients, preconditioned by Adam's second moment, to
            first order. With "gradient", the scatter of the update prompts counts in the standard error too.
        sequence_weights: w of the "sequence" objective: "one"; one over the response's "length"; one over the "longest"
            length among the prompt's responses; or a function of the mask, [responses, tokens], and the prompts,
            [responses], that returns [responses, tokens]. What a function depends on is found out by calling it with
            other masks.
        step_size: η of update="gradient"; None for the optimizer's learning rate.
        micro_batch_prompts: number of prompts scored at a time.
        first_order: with update="step", also take the derivative along the step, as a check. `causes` take it anyway.
        coefficient_to_hold: with update="step", also compute the entropy coefficient that would hold the entropy; this
            takes two backwards of E and four more forwards.
        entropy_coefficient: that of the bonus which the loss has already, for `coefficient_to_hold`.
        weighting: weights of responses after the step: "snis" (self-normalised), or "clip" for less variance and some
            bias.
        clip_at: largest weight with weighting="clip", as a multiple of the mean weight at its position.
        precision: "float32" scores responses in 32 bits: autocast is off, and parameters of 16 bits are converted while
            they are used, a layer at a time. "model" scores as the model computes.
        every: `step` makes a forecast in every so many windows.
        buffer_dtype: dtype of summed gradients, where backwards are needed.
        offload: keep summed gradients on the CPU while they are not needed.
        checkpoint: turn on gradient checkpointing during measurements; for models of transformers.
        strict: refuse E and U that share prompts, rather than warn.
        level: confidence level of the intervals.

    Raises:
        ValueError: for an option outside its range.

    Example:
        >>> EntropyChangeOptions(objective="sequence", micro_batch_prompts=8).update
        'step'
    """

    objective: Objective = "per_token"
    update: Update = "step"
    sequence_weights: SequenceWeights = "one"
    step_size: float | None = None
    micro_batch_prompts: int = 2
    first_order: bool = False
    coefficient_to_hold: bool = False
    entropy_coefficient: float = 0.0
    weighting: Weighting = "snis"
    clip_at: float = CLIPPED_AT
    precision: Precision = "float32"
    every: int = 1
    buffer_dtype: torch.dtype = torch.float32
    offload: bool = False
    checkpoint: bool = False
    strict: bool = False
    level: float = 0.95

    def __post_init__(self) -> None:
        _check_choice("objective", self.objective, ("per_token", "sequence"))
        _check_choice("update", self.update, ("step", "gradient"))
        if not callable(self.sequence_weights):
            _check_choice("sequence_weights", self.sequence_weights, ("one", "length", "longest"))
        _check_choice("precision", self.precision, ("float32", "model"))
        _check_choice("weighting", self.weighting, ("snis", "clip"))
        _check_choice("buffer_dtype", self.buffer_dtype, DTYPES)
        for name, n in (("micro_batch_prompts", self.micro_batch_prompts), ("every", self.every)):
            object.__setattr__(self, name, whole_number(f"{name} must be a whole number", n))
        for name in ("first_order", "coefficient_to_hold", "checkpoint", "offload", "strict"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} must be True or False, got {getattr(self, name)!r}")
        if self.coefficient_to_hold and self.update == "gradient":
            raise ValueError(
                "coefficient_to_hold=True asks for the optimizer's answer to an entropy bonus, which update='gradient' "
                "does not follow: leave one of the two out"
            )
        if not _is_between(1, self.clip_at, math.inf):
            raise ValueError(f"clip_at must be above 1, as a multiple of the mean weight, got {self.clip_at!r}")
        if not _is_between(0, self.level, 1):
            raise ValueError(f"level must be between 0 and 1, got {self.level!r}")
        if not _is_between(-math.inf, self.entropy_coefficient, math.inf):
            raise ValueError(f"entropy_coefficient must be finite, got {self.entropy_coefficient!r}")
        if self.step_size is not None and not _is_between(0, self.step_size, math.inf):
            raise ValueError(f"step_size must be positive and finite, got {self.step_size!r}")

    def needs_own_responses(self, *, causes: bool = False) -> str:
        """The option, if there is one, for which evaluation responses must be the policy's own, without `log_prob=`.

        Args:
            causes: whether the change is also split into its causes.

        Returns:
            The option as it is written, or "".
        """
        if self.update == "gradient":
            return "update='gradient'"
        if self.objective == "sequence":  # its gradient has no prefix weights
            wanted = {
                "causes": causes,
                "first_order": self.first_order,
                "coefficient_to_hold": self.coefficient_to_hold,
            }
            return next((f"{name}=True of objective='sequence'" for name, is_on in wanted.items() if is_on), "")
        return ""


def _is_between(low: float, value: object, high: float) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and low < value < high


def _check_choice(name: str, got: object, choices: Sequence[object]) -> None:
    if got not in choices:
        raise ValueError(f"{name} must be one of {', '.join(map(str, choices))}, got {got!r}")
