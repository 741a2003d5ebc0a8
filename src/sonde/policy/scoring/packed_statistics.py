"""Scores responses with a model that takes packed rows: sequences one after another, without padding."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from sonde.policy.scoring.rollouts import Rollouts
from sonde.policy.scoring.token_statistics import statistics_of_logits, temperature_of

PackedForward = Callable[[nn.Module, Tensor, Tensor, Tensor], Any]
"""Calls a model with `input_ids` and `position_ids`, [1, tokens] each, and `cu_seqlens`, where each sequence begins and
where the last one ends, [responses + 1]. Returns the logits of each next token, [1, tokens, vocabulary] or [tokens,
vocabulary]; or the log-probability of each next token and the entropy of its distribution, [1, tokens] or [tokens]
each, in nats at the temperature of sampling."""


def _transformers(model: nn.Module, input_ids: Tensor, position_ids: Tensor, cu_seqlens: Tensor) -> Tensor:
    """transformers tells sequences by their positions, if there is no attention mask."""
    logits: Tensor = model(input_ids=input_ids, position_ids=position_ids, use_cache=False).logits
    return logits


@dataclass(frozen=True)
class PackedLMStatistics:
    """Packs the responses into one row, for trainers whose models take no attention mask.

    `Rollouts.inputs` holds `input_ids`, [responses, length], with the prompt first; and with padding, `attention_mask`
    of the same shape. `Rollouts.from_packed` makes both of a trainer's packed rows.

    Args:
        forward: calls the model; see `PackedForward`. By default as models of transformers are called.
        temperature: temperature of the sampler, by which logits are divided. None, the default, takes that of the
            rollouts.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> ids = torch.tensor([[5, 6, 7, 2], [0, 5, 6, 2]])
        >>> rollouts = Rollouts(
        ...     {"input_ids": ids, "attention_mask": torch.tensor([[1, 1, 1, 1], [0, 1, 1, 1]])},
        ...     mask=torch.tensor([[1, 1], [0, 1]]), prompt=torch.tensor([3, 3]))
        >>> table = nn.Embedding(8, 8)  # logits that depend on the last token alone
        >>> statistics = PackedLMStatistics(lambda model, ids, positions, cu_seqlens: model(ids))
        >>> statistics(table, rollouts)[0].shape
        torch.Size([2, 2])
    """

    forward: PackedForward = _transformers
    temperature: float | None = None

    def __post_init__(self) -> None:
        if not callable(self.forward):
            raise ValueError(
                "forward must be a function of the model, input_ids, position_ids and cu_seqlens, got "
                f"{self.forward!r:.60}"
            )
        if self.temperature is not None and not self.temperature > 0:
            raise ValueError(f"temperature must be positive, got {self.temperature}")

    def __call__(self, model: nn.Module, rollouts: Rollouts, /) -> tuple[Tensor, Tensor]:
        """s_k and H_k in nats, fp32 or fp64, [responses, tokens]."""
        ids, n_tokens = rollouts.inputs["input_ids"], rollouts.mask.shape[1]
        is_token = rollouts.inputs.get("attention_mask", torch.ones_like(ids)).bool()
        before = slice(ids.shape[1] - n_tokens - 1, ids.shape[1] - 1)  # what comes before each column of the mask
        sampled = rollouts.mask.bool().to(ids.device)
        if n_tokens >= ids.shape[1] or bool((sampled & ~is_token[:, before]).any()):
            raise ValueError(
                "the mask belongs to the last columns of input_ids, and each sampled token needs a token before it: "
                "put the prompt first in input_ids, and correct the masks"
            )
        place = is_token.flatten().cumsum(0).view_as(ids) - 1
        positions = (is_token.long().cumsum(1) - 1)[is_token]
        ends = is_token.sum(1).cumsum(0)
        cu_seqlens = torch.nn.functional.pad(ends, (1, 0)).to(torch.int32)
        made = self.forward(model, ids[is_token][None], positions[None], cu_seqlens)
        index = torch.where(sampled, place[:, before], 0)
        if isinstance(made, tuple):
            s, h = (_flat(part, len(positions), 0)[index] for part in made)
            return s, h
        logits = _flat(made, len(positions), 1)[index]
        return statistics_of_logits(
            logits, ids[:, -n_tokens:], temperature=temperature_of(rollouts, self.temperature, logits)
        )


def _flat(values: Any, n_tokens: int, n_more: int) -> Tensor:
    """[tokens, …] of [1, tokens, …] or [tokens, …].

    Raises:
        ValueError: for anything else.
    """
    flat = values[0] if isinstance(values, Tensor) and values.dim() == 2 + n_more and len(values) == 1 else values
    if not isinstance(flat, Tensor) or flat.dim() != 1 + n_more or len(flat) != n_tokens:
        got = list(values.shape) if isinstance(values, Tensor) else type(values).__name__
        raise ValueError(
            f"forward= must return the logits of {n_tokens} tokens, [1, {n_tokens}, vocabulary], or a pair of "
            f"log-probability and entropy, [1, {n_tokens}] each, got {got}"
        )
    return flat
