"""Checks of an `EntropyChangeProbe`: it refuses models, optimizers and responses that would make its numbers wrong."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Sequence
from numbers import Real
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from sonde.console import stack_level
from sonde.parallel.placements import is_fsdp1, local_tensor, reshard
from sonde.parallel.process_groups import digest, gather_from_all_ranks
from sonde.parallel.unwrap import unwrap_optimizer
from sonde.policy.entropy_options import EntropyChangeOptions
from sonde.policy.scoring.rollouts import Rollouts, mask_doubt
from sonde.policy.scoring.scorer import Scored
from sonde.policy.scoring.token_statistics import check_scorable

_OUTSIDE_AT_MOST = 0.02
"""Part of the sampled tokens that may lie outside the truncated policy: a sampler of 16 bits rounds at the edge."""
_ROUNDING = 1e-3
"""Nats above 0 that a log-probability of 16 bits may have."""


def trainable(model: nn.Module) -> list[nn.Parameter]:
    """The parameters that training may move now: those that are cut over ranks, and not what a forward made of them.

    Raises:
        ValueError: if there is none.
    """
    reshard(model)
    if not (parameters := [p for p in model.parameters() if p.requires_grad]):
        raise ValueError(
            f"the model ({type(model).__name__}) has no trainable parameters, so no update changes it: set "
            "requires_grad on the parameters that are trained"
        )
    return parameters


def check_model(model: nn.Module, parameters: Sequence[Tensor]) -> None:
    """Refuse a model whose parameters are not trainable, not tied by name, or cut by FSDP's first version."""
    if any(is_fsdp1(type(m)) for m in model.modules()):
        raise ValueError("FSDP's first version does not tell how it cuts parameters: use fully_shard (FSDP2)")
    if _overlap(parameters):
        raise ValueError(
            f"two parameters of the model ({type(model).__name__}) share memory, so a step of one moves the other too, "
            "and no derivative knows that: tie them as one parameter, such as by a.weight = b.weight"
        )


def _overlap(parameters: Sequence[Tensor]) -> bool:
    """Whether two of them share elements in memory; of views with gaps it is not known."""
    spans = []
    for p in parameters:
        local = local_tensor(p.detach())
        if local.numel() and local.device.type != "meta" and local.is_contiguous():
            spans.append((str(local.device), local.data_ptr(), local.data_ptr() + local.nbytes))
    spans.sort()
    return any(a[0] == b[0] and b[1] < a[2] for a, b in itertools.pairwise(spans))


def check_optimizer(optimizer: Any, parameters: Sequence[Tensor]) -> None:
    """Refuse what is no optimizer, and an optimizer of torch that holds none of the model's trainable parameters."""
    if optimizer is not None and not hasattr(optimizer, "param_groups"):
        raise ValueError(
            f"the optimizer must have param_groups, as torch's have, got {optimizer!r:.60}: pass the optimizer that "
            "trains this model, or None to measure real steps by around_step()"
        )
    optimizer = unwrap_optimizer(optimizer)
    held = {id(p) for group in getattr(optimizer, "param_groups", ()) for p in group["params"]}
    if isinstance(optimizer, torch.optim.Optimizer) and not any(id(p) in held for p in parameters):
        raise ValueError(
            f"the optimizer ({type(optimizer).__name__}) holds none of the model's {len(parameters)} trainable "
            "parameters, so its step does not move them: pass the optimizer that trains this model, and not an "
            "optimizer of another model or of copies of its parameters"
        )


def check_sampler(sampler: object) -> None:
    """Refuse what cannot be called with a model; None is accepted."""
    if sampler is not None and not callable(sampler):
        raise ValueError(
            f"sampler must be a function of the model that returns fresh sonde.Rollouts, got a "
            f"{type(sampler).__name__}: responses that you have go to forecast() or around_step()"
        )


def as_factor(name: str, value: object) -> float:
    """A number, given as one or as a tensor of one element.

    Raises:
        ValueError: for anything else, naming the argument.
    """
    if isinstance(value, Tensor) and value.numel() == 1:
        return float(value)
    if isinstance(value, bool) or not isinstance(value, Real):
        got = f"{list(value.shape)}" if isinstance(value, Tensor) else f"{value!r:.60}"
        raise ValueError(f"{name} must be a number or a tensor of one element, got {got}")
    return float(value)


def check_is_model(model: object) -> None:
    """Refuse what is no module."""
    if not isinstance(model, nn.Module):
        raise ValueError(f"the model must be a torch.nn.Module, got a {type(model).__name__}: pass the policy first")


def check_evaluation(name: str, rollouts: Rollouts, statistics: object) -> None:
    """Refuse responses whose entropy is not the policy's."""
    check_scorable(name, rollouts, statistics)
    if rollouts.truncation and rollouts.log_prob is not None:
        raise ValueError(
            f"{name} have log_prob= and {_written(rollouts)}: another policy left out other tokens, so no "
            "weights make its responses this policy's: leave one out"
        )


def _written(rollouts: Rollouts) -> str:
    return ", ".join(f"{name}={value:g}" for name, value in rollouts.truncation.items())


def check_scored(scored: Scored) -> None:
    """Refuse what scores show: another truncated policy, or log-probabilities that are none. Warn of a doubtful mask.

    A sampler's rounding leaves some tokens outside the truncated policy.
    """
    if scored.outside is not None:
        n_outside, n = int(scored.outside.sum()), int(scored.responses.length.sum())
        if n_outside > _OUTSIDE_AT_MOST * n:
            raise ValueError(
                f"{n_outside:,} of {n:,} sampled tokens of the evaluation responses are left out by "
                f"{_written(scored.rollouts) or 'their truncation'}: pass the top_p=, top_k=, min_p= "
                "and temperature= of sampling, of the policy as it is now"
            )
    if scored.sampled_log_prob is not None:
        mask = scored.responses.mask
        highest, own = float(scored.sampled_log_prob[mask].max()), float(scored.log_prob[mask].max())
        if highest > _ROUNDING >= own:  # those of tokens are never above 0, and the policy's own are not
            raise ValueError(
                f"log_prob= of the evaluation responses is up to {highest:.3g}, and a token's log-probability is never "
                "above 0: pass the logarithm of the probability in nats, not its negative and not the probability"
            )
    if doubt := mask_doubt(scored.rollouts, scored.own(scored.log_prob)):
        warnings.warn(doubt, stacklevel=stack_level())


def check_responses(
    evaluation: Rollouts,
    update: Rollouts | None,
    statistics: object,
    group: dist.ProcessGroup | None,
    *,
    options: EntropyChangeOptions,
    causes: bool,
    is_beside: bool = False,
) -> int:
    """Refuse responses that cannot be used, on every rank alike; and warn if E and U share prompts.

    Args:
        evaluation: this rank's part of E.
        update: this rank's part of U.
        statistics: what scores them.
        group: the ranks that hold different responses.
        options: the probe's options, which must be the same on all ranks.
        causes: whether the change is split into its causes.
        is_beside: whether something is measured beside it.

    Returns:
        The number of update prompts on all ranks; 0 without U.
    """
    needs_own = options.needs_own_responses(causes=causes)
    needs_derivatives = "causes=True" if causes else "beside=" if is_beside else "" if options.is_step else needs_own
    check_evaluation("evaluation responses", evaluation, statistics)
    if update is not None:
        check_scorable("update responses", update, statistics)
        if not options.is_step and update.other_terms():
            raise ValueError(
                "update='gradient' follows the advantages alone, and the update responses have terms= or "
                "entropy_bonus=: leave them out, or forecast the step, by update='step'"
            )
    if evaluation.log_prob is not None and needs_own:
        raise ValueError(
            f"the evaluation responses have log_prob=, the sampler's own log-probabilities, and {needs_own} needs "
            "responses of the policy as it is: leave that option out, or sample new responses and leave log_prob= "
            "out"
        )
    if evaluation.truncation and needs_derivatives:
        raise ValueError(
            f"the evaluation responses have {_written(evaluation)}, and {needs_derivatives} needs derivatives, "
            "which do not see tokens that enter or leave what is sampled: leave that option out, or sample "
            "untruncated"
        )
    if update is not None and update.advantage is None:
        raise ValueError("update responses need their advantages: pass advantage= to Rollouts")
    own = {
        "E": evaluation.prompt.cpu(),
        "U": torch.zeros(0, dtype=torch.long) if update is None else update.prompt.cpu(),
        "given": torch.tensor([[evaluation.log_prob is not None, update is not None, bool(causes)]]),
        "options": torch.tensor([digest(options)]),
        "terms": torch.tensor([digest(() if update is None else sorted(update.other_terms()))]),
    }
    prompts = gather_from_all_ranks(group, lambda: own)
    if len(prompts["options"].unique()) > 1:
        raise ValueError("the ranks' probes have different options: make the probes alike on all ranks")
    names = ("log_prob= of the evaluation responses", "update=", "causes=True")
    for name, given in zip(names, prompts["given"].T, strict=True):
        if bool(given.any()) and not bool(given.all()):
            raise ValueError(f"some ranks gave {name}, and others did not: give it on all ranks or on none")
    if len(prompts["terms"].unique()) > 1:
        raise ValueError("the ranks' update responses have other terms of the loss: pass the same names on all ranks")
    shared = sorted(set(prompts["E"].tolist()) & set(prompts["U"].tolist()))
    if shared:
        warnings.warn(
            f"evaluation and update share prompts ({len(shared)}), {shared[:3]} among them. An update changes its own "
            "prompts more than others, so the forecast is biased: evaluate on other prompts",
            stacklevel=stack_level(),
        )
    return len(prompts["U"].unique())
