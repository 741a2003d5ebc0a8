"""Scores responses with a model that takes packed rows: sequences one after another, without padding."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from sonde.policy.scoring.rollouts import CheckedStatistics, Rollouts
from sonde.policy.scoring.token_statistics import input_ids_of, statistics_of_logits, temperature_of

PackedForward = Callable[[nn.Module, Tensor, Tensor, Tensor], Any]
"""Calls a model with `input_ids` and `position_ids`, [1, tokens] each, and `cu_seqlens`, where each sequence begins and
where the last one ends, [responses + 1]. Returns the logits of each next token, [1, tokens, vocabulary] or [tokens,
vocabulary]; or the log-probability of each next token and the entropy of its distribution, [1, tokens] or [tokens]
each, in nats at the temperature of sampling."""

_ROUNDING, _ROUNDING_OF_16_BITS = 0.01, 0.2
"""Nats. Another order of sums changes scores by less."""
_MIXED, _CERTAIN = 0.3, 0.1
"""A model mixes the responses of a row if another one changes scores by this part of what it does as the same sequence.
The answer is certain if rounding is below a tenth of that."""


def _transformers(model: nn.Module, input_ids: Tensor, position_ids: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Most models of transformers tell sequences by their positions, if there is no attention mask."""
    logits: Tensor = model(input_ids=input_ids, position_ids=position_ids, use_cache=False).logits
    return logits


@dataclass(frozen=True)
class PackedLMStatistics(CheckedStatistics):
    """Packs the responses into one row, for trainers whose models take no attention mask.

    A model must tell the sequences of a row apart, and not all architectures of transformers tell them by their
    positions. Probes ask `check_model` before their first number. To change the scores, make a class of this one: in a
    function of your own, probes would not find that check.

    `Rollouts.inputs` holds `input_ids`, [responses, length], with the prompt first; and with padding, `attention_mask`
    of the same shape. `Rollouts.from_packed` makes both of a trainer's packed rows.

    Args:
        forward: calls the model, also with one sequence alone; see `PackedForward`. By default as models of
            transformers are called.
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
        """s_k and H_k in nats, fp32 or fp64, [responses, tokens].

        Raises:
            ValueError: for inputs or returned values of other shapes.
        """
        self.check_inputs(rollouts)
        ids, is_token = _tokens_of(rollouts)
        n_tokens = rollouts.mask.shape[1]
        before = _before(rollouts)
        sampled = rollouts.mask.bool().to(ids.device)
        place = is_token.flatten().cumsum(0).view_as(ids) - 1
        made = self._packed(model, ids[is_token], is_token.sum(1))
        # Only sampled tokens are scored: there may be many more places in [responses, tokens].
        at = place[:, before][sampled]
        if len(made) == 2:
            s, h = (part[at] for part in made)
        else:
            logits = made[0][at][None]
            temperature = temperature_of(rollouts, self.temperature, logits)
            if isinstance(temperature, Tensor):
                temperature = temperature[sampled.to(temperature.device)][None]
            s, h = statistics_of_logits(logits, ids[:, -n_tokens:][sampled][None], temperature=temperature)
        where = sampled.nonzero(as_tuple=True)
        s, h = (t.new_zeros(sampled.shape).index_put(where, t.flatten()) for t in (s, h))
        return s, h

    def check_inputs(self, rollouts: Rollouts) -> None:
        """Refuse rollouts whose inputs cannot be scored. Probes ask before the first forward, on all ranks.

        Raises:
            ValueError: for inputs without `input_ids`, or of other shapes.
        """
        ids, is_token = _tokens_of(rollouts)
        if is_token.shape != ids.shape:
            raise ValueError(
                f"attention_mask must be {list(ids.shape)}, as input_ids, got {list(is_token.shape)}: pad both alike"
            )
        if others := set(rollouts.inputs) - {"input_ids", "attention_mask", "position_ids"}:
            raise ValueError(
                f"packed rows are made of input_ids and attention_mask alone, got also {sorted(others)}: leave them "
                "out, or write token statistics of your own that pass them on"
            )
        sampled = rollouts.mask.bool().to(ids.device)
        if sampled.shape[1] >= ids.shape[1] or bool((sampled & ~is_token[:, _before(rollouts)]).any()):
            raise ValueError(
                "the mask belongs to the last columns of input_ids, and each sampled token needs a token before it: "
                "put the prompt first in input_ids, and correct the masks"
            )

    @torch.no_grad()
    def check_model(self, model: nn.Module, rollouts: Rollouts) -> bool:
        """Refuse a model that mixes the responses of a row. Runs three forwards of one or two responses.

        A response is scored alone, behind another one, and as the end of one sequence with it. A model that tells
        responses apart gives the first two the same scores, and the third other ones.

        Returns:
            Whether the answer is certain. It is not as long as the scores hardly depend on what comes before, as those
            of a nearly uniform policy: ask again after some training.

        Raises:
            ValueError: if the model mixes them.
        """
        ids, is_token = _tokens_of(rollouts)
        first, last = ids[0][is_token[0]], ids[-1][is_token[-1]]
        longest = max(len(first), len(last))  # the two together are no longer: a model may know no more positions
        first, last = first[: longest // 2], last[-(longest - longest // 2) :]
        both, lengths = torch.cat([last, first]), torch.tensor([len(last), len(first)], device=ids.device)
        alone, behind, as_one = (
            tuple(part[-len(first) :] for part in self._packed(model, tokens, bounds))
            for tokens, bounds in ((first, lengths[1:]), (both, lengths), (both, lengths.sum()[None]))
        )
        narrow = any(t.dtype.itemsize < 4 for t in (alone[0], *model.parameters()))
        rounding = _ROUNDING_OF_16_BITS if narrow else _ROUNDING
        mixed, most = _difference(alone, behind), _difference(alone, as_one)
        if mixed > rounding or (most > rounding and mixed > _MIXED * most):
            raise ValueError(
                f"a response scores {mixed:.2g} nats apart alone and behind another response of its row, so the "
                f"model ({type(model).__name__}) does not tell the responses of a row apart: use padded rows and "
                "CausalLMStatistics, or a forward= that tells the model where sequences begin"
            )
        return most > rounding / _CERTAIN

    def _packed(self, model: nn.Module, tokens: Tensor, lengths: Tensor) -> tuple[Tensor, ...]:
        """The logits of a row, [tokens, vocabulary]; or log-probability and entropy, [tokens] each."""
        cu_seqlens = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
        positions = torch.arange(len(tokens), device=tokens.device) - cu_seqlens[:-1].repeat_interleave(lengths)
        made = self.forward(model, tokens[None], positions[None], cu_seqlens.to(torch.int32))
        if isinstance(made, (tuple, list)):
            if len(made) != 2:
                raise ValueError(
                    "forward= must return logits, or a pair of log-probability and entropy, got "
                    f"{len(made)} values: return the logits alone"
                )
            return tuple(_flat(part, len(tokens), 0) for part in made)
        return (_flat(made, len(tokens), 1),)


def _tokens_of(rollouts: Rollouts) -> tuple[Tensor, Tensor]:
    """The tokens, and whether each is one and no padding; [responses, length]."""
    ids = input_ids_of(rollouts)
    return ids, rollouts.inputs.get("attention_mask", torch.ones_like(ids)).bool()


def _before(rollouts: Rollouts) -> slice:
    """The columns of `input_ids` that come before each column of the mask."""
    length = rollouts.inputs["input_ids"].shape[1]
    return slice(length - rollouts.mask.shape[1] - 1, length - 1)


def _difference(scores: tuple[Tensor, ...], others: tuple[Tensor, ...]) -> float:
    """The largest difference of log-probabilities or entropies, in nats; 0 if none is finite.

    Of tokens that are possible at all: the least likely differ most by rounding, and count least.
    """
    largest = 0.0
    for a, b in zip(scores, others, strict=True):
        a, b = a.float(), b.float()
        if a.dim() == 2:
            a, b = a.log_softmax(-1), b.log_softmax(-1)
        likely = (a > a.amax(-1, keepdim=True) - 5.0) if a.dim() == 2 else a.isfinite() & b.isfinite()
        if bool(likely.any()):
            largest = max(largest, float((a - b)[likely].abs().max()))
    return largest


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
