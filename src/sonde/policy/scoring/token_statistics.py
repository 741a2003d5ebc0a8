"""Log-probability and exact entropy of every sampled token, from the logits of a causal language model."""

from __future__ import annotations

import inspect
import itertools
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from sonde.parallel.unwrap import unwrap_model
from sonde.policy.scoring.rollouts import Rollouts, TokenStatistics

_ELEMENTS_AT_ONCE = 2**22
"""Number of logits converted to fp32 at a time, when nothing is kept for a backward."""


@dataclass(frozen=True)
class CausalLMStatistics:
    """Scores responses with a causal language model of transformers, or with a model that is called in the same way.

    `Rollouts.inputs` holds `input_ids`, [responses, length], with the prompt first: the mask belongs to the last
    columns. With padding, it also holds `attention_mask` of the same shape. All other inputs go to the model unchanged.
    Logits are divided by the rollouts' temperature.
    """

    def __call__(self, model: nn.Module, rollouts: Rollouts, /) -> tuple[Tensor, Tensor]:
        """s_k and H_k in nats, fp32 or fp64, [responses, tokens]."""
        self.check_inputs(rollouts)
        inputs: dict[str, Any] = dict(rollouts.inputs)
        ids, n_tokens = rollouts.inputs["input_ids"], rollouts.mask.shape[1]
        accepted = _parameters(model)
        if "attention_mask" in inputs and "position_ids" not in inputs and "position_ids" in accepted:
            # Positions as generation counts them: padding on the left does not count.
            inputs["position_ids"] = (inputs["attention_mask"].long().cumsum(1) - 1).clamp(min=0)
        if "logits_to_keep" in accepted:
            inputs["logits_to_keep"] = n_tokens + 1
        if "use_cache" in accepted:
            inputs["use_cache"] = False
        output: Any = model(**inputs)
        logits = output if isinstance(output, Tensor) else output.logits
        given = rollouts.temperature
        temperature = rollouts.per_token("temperature") if isinstance(given, Tensor) else given
        how = rollouts.truncation
        # The logits at a position are those of the next token.
        return statistics_of_logits(logits[:, -n_tokens - 1 : -1], ids[:, -n_tokens:], temperature=temperature, **how)

    def check_inputs(self, rollouts: Rollouts) -> None:
        """Refuse rollouts whose inputs cannot be scored. Probes ask before the first forward, on all ranks.

        Raises:
            ValueError: for inputs without `input_ids`, or of other shapes.
        """
        if "input_ids" not in rollouts.inputs:
            raise ValueError(
                f"inputs need 'input_ids' for a causal language model, got {sorted(rollouts.inputs)}: add it"
            )
        ids = rollouts.inputs["input_ids"]
        if ids.dim() != 2:
            raise ValueError(f"input_ids must be [responses, length], got {list(ids.shape)}: give each response a row")
        if ids.is_floating_point() or ids.is_complex():
            raise ValueError(f"input_ids must be whole numbers, the tokens of a vocabulary, got {ids.dtype}")
        n_tokens = rollouts.mask.shape[1]
        if n_tokens >= ids.shape[1]:
            raise ValueError(
                f"the mask belongs to the last columns of input_ids, and the first cannot have been sampled, got "
                f"{n_tokens} columns in the mask and {ids.shape[1]} in input_ids: put the prompt first in input_ids"
            )


def as_statistics(given: object) -> TokenStatistics:
    """What scores responses: what was given, or `CausalLMStatistics` for None.

    Raises:
        ValueError: for what cannot be called with a model and `Rollouts`.
    """
    if given is None:
        return CausalLMStatistics()
    if callable(given) and not isinstance(given, type):
        return cast(TokenStatistics, given)
    if isinstance(given, type):
        what = f"got the class {given.__name__}: pass an object of it, {given.__name__}()"
    else:
        what = f"got {given!r:.60}: see sonde.TokenStatistics"
    raise ValueError(f"token_statistics must be a function of a model and sonde.Rollouts, {what}")


def check_scorable(name: str, rollouts: object, statistics: object) -> None:
    """Refuse what cannot be scored: no rollouts, or empty ones.

    No forward runs: so an error on one rank leaves no other rank in a collective of a sharded model.

    Args:
        name: of the responses, for the message.
        rollouts: the responses.
        statistics: what scores them.

    Raises:
        ValueError: also of the statistics' own check.
    """
    if not isinstance(rollouts, Rollouts):
        raise ValueError(
            f"{name} must be sonde.Rollouts, got a {type(rollouts).__name__}: make Rollouts of the responses"
        )
    if not len(rollouts):
        raise ValueError(
            "a rank has no response, expected at least one on each rank: give it some of the other ranks' responses, "
            "or pass the ranks that have responses as process_group="
        )
    if isinstance(statistics, CausalLMStatistics):
        statistics.check_inputs(rollouts)


def checked_scores(scores: object, mask: Tensor) -> tuple[Tensor, Tensor]:
    """What token statistics have returned.

    Raises:
        ValueError: for anything but two tensors of the mask's shape.
    """
    outputs = scores if isinstance(scores, (tuple, list)) else (scores,)
    shapes = [tuple(t.shape) if isinstance(t, Tensor) else type(t).__name__ for t in outputs]
    if shapes != [tuple(mask.shape)] * 2:
        raise ValueError(
            "token statistics must be log-probability and entropy, each of the mask's shape "
            f"{tuple(mask.shape)}, got {shapes}: see sonde.TokenStatistics"
        )
    return outputs[0], outputs[1]


def statistics_of_logits(
    logits: Tensor,
    tokens: Tensor,
    *,
    temperature: float | Tensor = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """s and H of softmax(logits/temperature) in nats, truncated and normalised again if sampling was.

    A gradient is that at fixed sets of tokens: it does not see tokens enter or leave them.

    Args:
        logits: [responses, tokens, vocabulary], any dtype; −inf for tokens that cannot be sampled.
        tokens: the sampled tokens, [responses, tokens].
        temperature: the temperature of sampling; a number, or [responses, tokens].
        top_k: as for `Rollouts`; so are `top_p` and `min_p`.

    Returns:
        The log-probability of each token and the entropy of its distribution, fp32 or fp64, [responses, tokens]. It is
        −inf for a token that cannot be sampled.
    """
    each = temperature
    if isinstance(temperature, Tensor):  # outside the mask it may be 0 or less, and its scores are not used
        each = temperature.to(logits.device).clamp(min=1e-6).expand_as(tokens)[..., None]
    how = top_k, top_p, min_p
    if torch.is_grad_enabled() and logits.requires_grad:
        return _statistics(logits, tokens, each, *how)
    at_once = max(_ELEMENTS_AT_ONCE // (logits.shape[0] * logits.shape[2]), 1)
    pieces = [
        _statistics(*parts, *how)
        for parts in zip(
            logits.split(at_once, 1),
            tokens.split(at_once, 1),
            each.split(at_once, 1) if isinstance(each, Tensor) else itertools.repeat(each),
            strict=False,
        )
    ]
    s, h = zip(*pieces, strict=True)
    return torch.cat(s, 1), torch.cat(h, 1)


def _statistics(
    logits: Tensor, tokens: Tensor, temperature: float | Tensor, top_k: int, top_p: float, min_p: float
) -> tuple[Tensor, Tensor]:
    z = logits if logits.dtype == torch.float64 else logits.float()
    z = z / (temperature.to(z.dtype) if isinstance(temperature, Tensor) else temperature)
    z = _truncated(z, top_k, top_p, min_p)
    # H = log Σe^z − Σ p z is a difference that loses digits if z is large: shift the largest logit to 0.
    z = z - z.detach().amax(-1, keepdim=True)
    log_sum = z.logsumexp(-1)
    s = z.gather(-1, tokens[..., None])[..., 0] - log_sum
    p = (z - log_sum[..., None]).exp()
    # 0·log 0 = 0: without the fill, p z would be NaN for tokens that cannot be sampled.
    return s, log_sum - (p * z.masked_fill(z == -torch.inf, 0.0)).sum(-1)


def _truncated(z: Tensor, top_k: int, top_p: float, min_p: float) -> Tensor:
    """−inf in the place of tokens that are left out, by the rules of transformers and in their order."""
    if top_k:
        least = z.detach().topk(min(top_k, z.shape[-1])).values[..., -1:]
        z = z.masked_fill(z.detach() < least, -torch.inf)
    if top_p < 1.0:
        rising, order = z.detach().sort(-1)
        is_out = rising.softmax(-1).cumsum(-1) <= 1.0 - top_p
        is_out[..., -1] = False  # the likeliest token stays, however small top_p is
        z = z.masked_fill(torch.empty_like(is_out).scatter_(-1, order, is_out), -torch.inf)
    if min_p:
        p = z.detach().softmax(-1)
        z = z.masked_fill(p < min_p * p.amax(-1, keepdim=True), -torch.inf)
    return z


def _parameters(model: nn.Module) -> frozenset[str]:
    """Names of the arguments of the forward of the model inside its wrappers."""
    model = unwrap_model(model)
    if callable(get_base_model := getattr(model, "get_base_model", None)):  # PEFT's wrapper takes any argument
        model = get_base_model()
    return frozenset(inspect.signature(model.forward).parameters)
