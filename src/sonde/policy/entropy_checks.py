"""Checks of an `EntropyChangeProbe`: it refuses models, optimizers and responses that would make its numbers wrong."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from sonde.call_site import stack_level
from sonde.parallel.process_groups import gather_from_all_ranks
from sonde.parallel.unwrap import unwrap_optimizer
from sonde.policy.scoring.checkpointing import can_checkpoint
from sonde.policy.scoring.rollouts import Rollouts


def check_model(model: nn.Module, parameters: Sequence[Tensor], *, has_checkpoints: bool) -> None:
    """Refuse a model without trainable parameters, or one whose checkpointing cannot be turned on."""
    if not parameters:
        raise ValueError(
            f"the model ({type(model).__name__}) has no trainable parameters, so no update changes it: set "
            "requires_grad on the parameters that are trained"
        )
    if has_checkpoints and not can_checkpoint(model):
        raise ValueError(
            f"checkpoint=True needs a model of transformers, got {type(model).__name__}: turn checkpointing on in "
            "your model, and leave checkpoint out"
        )


def check_optimizer(optimizer: Any, parameters: Sequence[Tensor]) -> None:
    """Refuse an optimizer of torch that holds none of the model's trainable parameters."""
    optimizer = unwrap_optimizer(optimizer)
    held = {id(p) for group in getattr(optimizer, "param_groups", ()) for p in group["params"]}
    if isinstance(optimizer, torch.optim.Optimizer) and not any(id(p) in held for p in parameters):
        raise ValueError(
            f"the optimizer ({type(optimizer).__name__}) holds none of the model's {len(parameters)} trainable "
            "parameters, so its step does not move them: pass the optimizer that trains this model, and not an "
            "optimizer of another model or of copies of its parameters"
        )


def check_responses(
    evaluation: Rollouts,
    update: Rollouts | None,
    temperature: float | None,
    group: dist.ProcessGroup | None,
    *,
    is_strict: bool,
) -> None:
    """Refuse responses that cannot be used, on every rank alike; and warn if E and U share prompts.

    Args:
        evaluation: this rank's part of E.
        update: this rank's part of U.
        temperature: at which responses are scored; None if the token statistics do not say.
        group: the ranks that hold different responses.
        is_strict: refuse shared prompts rather than warn.
    """

    scored_at = evaluation.temperature if temperature is None else temperature

    def check() -> dict[str, Tensor]:
        for rollouts in (evaluation, update):
            if rollouts is not None:
                rollouts.check_not_empty()
        if evaluation.is_truncated:
            raise ValueError(
                "the evaluation responses were sampled with top_p < 1 or the like, so their entropy is not the "
                "policy's: sample them untruncated"
            )
        for name, rollouts in (("evaluation", evaluation), ("update", update)):
            if rollouts is not None and rollouts.temperature != scored_at:
                raise ValueError(
                    f"{name} responses were sampled at temperature {rollouts.temperature}, and are scored at "
                    f"{scored_at}: token_statistics=CausalLMStatistics(temperature={rollouts.temperature})"
                )
        if update is not None and update.advantage is None:
            raise ValueError("update responses need their advantages: pass advantage= to Rollouts")
        no_prompts = torch.zeros(0, dtype=torch.long)
        return {"E": evaluation.prompt.cpu(), "U": no_prompts if update is None else update.prompt.cpu()}

    prompts = gather_from_all_ranks(group, check)
    shared = sorted(set(prompts["E"].tolist()) & set(prompts["U"].tolist()))
    if shared:
        message = (
            f"evaluation and update share prompts ({len(shared)}), {shared[:3]} among them. An update changes its own "
            "prompts more than others, so the forecast is biased: evaluate on other prompts"
        )
        if is_strict:
            raise ValueError(message)
        warnings.warn(message, stacklevel=stack_level())
