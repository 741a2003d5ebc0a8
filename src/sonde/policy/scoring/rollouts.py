"""Responses that a policy sampled, and everything needed to score them again."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from numbers import Real
from typing import Any, Protocol, Self

import torch
from torch import Tensor, nn

from sonde.parallel.process_groups import digest
from sonde.policy.stats.entropy_gradient import Responses

_SHAPES = {
    "mask": "[responses, tokens]",
    "prompt": "[responses]",
    "advantage": "[responses] or [responses, tokens]",
    "weight": "[responses, tokens]",
    "log_prob": "[responses, tokens]",
    "entropy_bonus": "[responses, tokens]",
}
_OPTIONAL = ("advantage", "weight", "log_prob", "entropy_bonus")
BONUS = "entropy bonus"
"""The name of its part of a change."""
_NO_TRUNCATION: dict[str, Any] = {"top_k": 0, "top_p": 1.0, "min_p": 0.0}
_BY_CHANCE = math.log(1e-6)
"""Log-probability below which what all responses have in common is no chance."""
_EARLY_FROM = 8
"""Smallest number of responses that end before the last column from which their ends are judged."""
_MADE_ANEW = ("attention_mask", "position_ids")
"""Inputs of a packed row that rows of their own do without."""


@dataclass(frozen=True, eq=False)
class Rollouts:
    """Responses to prompts, one row each. Every rank that measures needs at least one.

    Attributes:
        inputs: tensors that `TokenStatistics` read; their rows are the responses.
        mask: whether the policy sampled a token; False for the prompt, padding or a tool's answer;
            [responses, tokens].
        prompt: each response's prompt, as a whole number that is the same on every rank; [responses].
        advantage: the advantage of each response or token, in any unit; [responses] or [responses, tokens].
        weight: factor of each token in the loss beside its advantage: 1 by default, one over the response's length for
            GRPO's first form; [responses, tokens].
        log_prob: log-probabilities of the tokens that the sampler reported, in nats, at its temperature; [responses,
            tokens]. Give them if the responses are not the policy's own, as those of older weights: then they are
            weighted by them. Values outside the mask are ignored.
        temperature: the temperature of sampling, or of each response or token; a number, [responses] or [responses,
            tokens].
        texts: each prompt's text by its number, for tables.
        top_p: sampling took the likeliest tokens alone, as many as have this probability together; 1 for all tokens.
        top_k: sampling took so many of the likeliest tokens alone; 0 for all tokens.
        min_p: sampling left out tokens that are less likely than this times the likeliest token; 0 for all tokens.
            Samplers apply `top_k` first, then `top_p`, then `min_p`, after the temperature.
        entropy_bonus: minus the loss's derivative by each token's entropy, so positive for a bonus, in the unit of
            advantage × weight; [responses] or [responses, tokens].
        terms: other terms of the loss by their names, for causes of their own: minus each token's derivative of the
            term by its log-probability, in the unit of advantage × weight; [responses, tokens].

    Raises:
        ValueError: if a field is no tensor, shapes disagree, a response has no token, or an advantage or weight of a
            sampled token is not finite.

    Example:
        >>> ids = torch.tensor([[5, 6, 7, 2], [5, 6, 2, 0]])
        >>> made = Rollouts({"input_ids": ids}, mask=torch.tensor([[1, 1], [1, 0]]), prompt=torch.tensor([3, 3]))
        >>> len(made), made.n_prompts
        (2, 1)
    """

    inputs: Mapping[str, Tensor]
    mask: Tensor
    prompt: Tensor
    advantage: Tensor | None = None
    weight: Tensor | None = None
    log_prob: Tensor | None = None
    temperature: float | Tensor = 1.0
    texts: Mapping[int, str] = field(default_factory=dict)
    top_p: float | None = 1.0
    top_k: int | None = 0
    min_p: float | None = 0.0
    entropy_bonus: Tensor | None = None
    terms: Mapping[str, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _check_types(self.inputs, {name: getattr(self, name) for name in _SHAPES}, _SHAPES)
        if isinstance(self.temperature, Tensor) and not self.temperature.dim():
            object.__setattr__(self, "temperature", float(self.temperature))
        for name, n_dims in (("mask", 2), ("prompt", 1)):
            if (tensor := getattr(self, name)).dim() != n_dims:
                raise ValueError(f"{name} must be {_SHAPES[name]}, got {list(tensor.shape)}")
        _check_mask(self.mask)
        _check_truncation(self.top_p, self.top_k, self.min_p)
        if self.mask.shape[:1] == (0,):
            return  # an error here would be raised on this rank alone: the probes refuse it, on all ranks
        responses = self.responses()  # checks the mask and the prompts
        for name, tensor in self.inputs.items():
            if not isinstance(tensor, Tensor) or tensor.shape[:1] != self.mask.shape[:1]:
                got = tuple(tensor.shape) if isinstance(tensor, Tensor) else type(tensor).__name__
                raise ValueError(
                    f"inputs[{name!r}] must be a tensor of {len(self)} rows, one for each response, got {got}"
                )
        if self.prompt.is_floating_point() or self.prompt.is_complex():
            raise ValueError(f"prompt must be whole numbers, one for each response, got {self.prompt.dtype}")
        self._check_temperature(responses)
        if self.log_prob is not None and self.log_prob.shape != self.mask.shape:
            raise ValueError(
                f"log_prob must be {list(self.mask.shape)}, one for each token, got {list(self.log_prob.shape)}"
            )
        for name in _OPTIONAL:
            if getattr(self, name) is not None:
                responses.tokens(name, self.per_token(name).cpu())
        _check_terms(self.terms)
        for name, tensor in self.terms.items():
            responses.tokens(f"terms[{name!r}]", tensor.cpu())

    def _check_temperature(self, responses: Responses) -> None:
        given = self.temperature
        if not isinstance(given, (Real, Tensor)) or isinstance(given, bool):
            raise ValueError(f"temperature must be a number or a tensor, got {given!r}: pass that of sampling")
        sampled = responses.tokens("temperature", self.per_token("temperature").cpu())[responses.mask]
        if not bool((sampled > 0).all()):
            raise ValueError(
                f"temperature must be positive, got {float(sampled.min())}: greedy decoding has no entropy to measure"
            )

    @classmethod
    def from_packed(
        cls,
        inputs: Mapping[str, Tensor],
        mask: Tensor,
        prompt: Tensor,
        *,
        cu_seqlens: Tensor | None = None,
        **fields: Any,
    ) -> Self:
        """Responses that lie one after another in one row, each behind its prompt: a row each here, padded at its end.

        A causal model needs no attention mask for such rows, nor positions: so models that take packed rows take these.

        Args:
            inputs: `input_ids`, and `position_ids` unless `cu_seqlens` is given; [tokens] or [1, tokens]. What else
                has a value for each token is cut as they are.
            mask: whether the policy sampled a token, for every token of the row; [tokens] or [1, tokens].
            prompt: each response's prompt, [responses].
            cu_seqlens: where responses begin, and where the last one ends; [responses + 1]. By default they begin where
                `position_ids` is 0. A tail without a sampled token is padding, which `prompt` has no number for.
            **fields: the other fields of `Rollouts`: `advantage`, `temperature` and `entropy_bonus`, [responses] or
                [tokens]; `weight`, `log_prob` and each of `terms`, [tokens]; and `texts`, `top_p`, `top_k` and `min_p`.
                Each [tokens] may be [1, tokens]. None leaves one out, but for `temperature`.

        Raises:
            ValueError: if lengths disagree, or a response has no sampled token or no token before it.

        Example:
            >>> ids = torch.tensor([5, 6, 7, 2, 5, 6, 2])  # two responses to the prompt 5, 6
            >>> sampled = torch.tensor([0, 0, 1, 1, 0, 0, 1])
            >>> made = Rollouts.from_packed(
            ...     {"input_ids": ids}, sampled, torch.tensor([3, 3]), cu_seqlens=torch.tensor([0, 4, 7]))
            >>> made.inputs["input_ids"].tolist(), made.mask.tolist()
            ([[5, 6, 7, 2], [5, 6, 2, 0]], [[True, True], [True, False]])
        """
        _check_types(inputs, {"prompt": prompt}, _SHAPES)
        bounds = _bounds(inputs, cu_seqlens)
        fields = {n: value for n, value in fields.items() if value is not None or n == "temperature"}
        terms = fields.pop("terms", {})
        _check_terms(terms, "[tokens]")
        per_token: dict[str, Any] = {name: fields[name] for name in ("weight", "log_prob") if name in fields}
        # What has a number for each response stays as it is.
        per_token |= {n: t for n, t in fields.items() if isinstance(t, Tensor) and t.dim() and t.shape != prompt.shape}
        per_token |= {"mask": mask} | {f"terms[{name!r}]": term for name, term in terms.items()}
        length = inputs["input_ids"].numel()
        flat = {n: _flat(n, t, length) for n, t in (dict(inputs) | per_token).items()}
        _check_mask(flat["mask"])
        flat["mask"] = flat["mask"].bool()
        while len(bounds) > len(prompt) and not bool(flat["mask"][slice(*bounds[-1])].any()):
            del bounds[-1]  # padding
        if len(bounds) != len(prompt):
            raise ValueError(
                f"the row holds {len(bounds)} responses, and prompt {len(prompt)} numbers: give one for each"
            )
        for row, (a, b) in enumerate(bounds):
            sampled = flat["mask"][a:b]
            if not bool(sampled.any()) or bool(sampled[0]):
                what = "no sampled token" if not bool(sampled.any()) else "no token before its first sampled one"
                raise ValueError(f"response {row} of the row has {what}: correct the mask, or leave the response out")
        width = max((b - a for a, b in bounds), default=0)
        # The mask's columns are the last ones, from the earliest sampled token on.
        begins = min((int(flat["mask"][a:b].nonzero()[0]) for a, b in bounds), default=0)

        def rows(values: Tensor, begin: int) -> Tensor:
            made = values.new_zeros(len(bounds), width - begin)
            for row, (a, b) in zip(made, bounds, strict=True):
                row[: max(b - a - begin, 0)] = values[a + begin : b]
            return made

        cut = {n: rows(t, begins if n in per_token else 0) for n, t in flat.items()}
        if "temperature" in cut:  # no token was sampled outside the mask, so none of them is cold
            cut["temperature"].masked_fill_(~cut["mask"], 1.0)
        made = {n: t for n, t in cut.items() if n in inputs and n not in _MADE_ANEW}
        values = fields | {n: t for n, t in cut.items() if n in fields}
        return cls(made, cut["mask"], prompt, terms={n: cut[f"terms[{n!r}]"] for n in terms}, **values)

    def __len__(self) -> int:
        return len(self.mask)

    @property
    def n_prompts(self) -> int:
        """Number of prompts that were answered."""
        return len(self.prompt.unique())

    @property
    def truncation(self) -> dict[str, Any]:
        """What sampling left out, as `statistics_of_logits` takes it; empty if nothing."""
        given: dict[str, Any] = {"top_k": max(self.top_k or 0, 0), "min_p": self.min_p or 0.0}
        given["top_p"] = 1.0 if self.top_p is None else self.top_p
        return {name: value for name, value in given.items() if value != _NO_TRUNCATION[name]}

    def untruncated(self) -> Self:
        """The same responses, to be scored as a loss scores them: trainers take log-probabilities of all tokens."""
        return dataclasses.replace(self, **_NO_TRUNCATION) if self.truncation else self

    def digest(self) -> int:
        """A number that differs where inputs, masks, prompts, advantages or weights do; waits for the device."""
        named = {**self.inputs, **self.terms, "mask": self.mask, "prompt": self.prompt}
        named |= {name: getattr(self, name) for name in _OPTIONAL}
        sums = [(name, tuple(t.shape), _checksum(t)) for name, t in named.items() if t is not None]
        return digest(sums)

    def responses(self) -> Responses:
        """The mask and the prompts, for equations; on the CPU."""
        return Responses(self.mask.cpu(), self.prompt.cpu())

    def credit(self) -> Tensor:
        """Advantage × weight, 0 where no token was sampled; [responses, tokens], fp64.

        Raises:
            ValueError: if there is no advantage.
        """
        if self.advantage is None:
            raise ValueError("the responses that the update learns from need advantages: pass advantage= to Rollouts")
        credit = self.per_token("advantage").double()
        if self.weight is not None:
            credit = credit * self.per_token("weight")
        return torch.where(self.mask.bool(), credit, 0.0)

    def other_terms(self) -> dict[str, tuple[Tensor, Tensor]]:
        """Of each other term of the loss, factors of each token's log-probability and entropy.

        Both are 0 where no token was sampled; [responses, tokens], fp64.
        """
        mask, zero = self.mask.bool(), torch.zeros_like(self.mask, dtype=torch.float64)
        found = {name: (torch.where(mask, t.double(), 0.0), zero) for name, t in self.terms.items()}
        if self.entropy_bonus is not None:
            found[BONUS] = zero, torch.where(mask, self.per_token("entropy_bonus").double(), 0.0)
        return found

    def order(self, prompts_each: int) -> list[Tensor]:
        """Rows in parts of so many prompts; all responses to a prompt are in one part.

        Prompts come in the order of their first response.
        """
        rows_by_prompt: dict[int, list[int]] = {}
        for row, number in enumerate(self.prompt.tolist()):
            rows_by_prompt.setdefault(number, []).append(row)
        groups = list(rows_by_prompt.values())
        return [
            torch.tensor([row for group in groups[i : i + prompts_each] for row in group])
            for i in range(0, len(groups), prompts_each)
        ]

    def rows(self, index: Tensor) -> Self:
        """The responses with these row numbers. What was checked once is not checked again."""

        def pick(value: Any) -> Any:
            return value[index.to(value.device)] if isinstance(value, Tensor) else value

        made = object.__new__(type(self))
        vars(made).update((name, pick(value)) for name, value in vars(self).items())
        for name in ("inputs", "terms"):
            vars(made)[name] = {key: pick(tensor) for key, tensor in vars(self)[name].items()}
        return made

    def per_token(self, name: str) -> Tensor:
        """The advantage, weight, log-probability or temperature of every token; [responses, tokens].

        Raises:
            ValueError: if it has another shape.
        """
        values: Tensor = getattr(self, name)
        if not isinstance(values, Tensor):
            return torch.full_like(self.mask, float(values), dtype=torch.float32)
        if values.shape == self.mask.shape[:1]:
            values = values[:, None].expand_as(self.mask)
        if values.shape != self.mask.shape:
            expected = f"[{len(self)}] or {list(self.mask.shape)}"
            raise ValueError(f"{name} must be {expected}, one for each response or token, got {list(values.shape)}")
        return values


def mask_doubt(rollouts: Rollouts, log_prob: Tensor) -> str:
    """Why the mask may not be that of the sampled tokens; empty if nothing says so, or the tokens are not known.

    Args:
        rollouts: with `input_ids`, whose last columns the mask belongs to.
        log_prob: s_k under the policy in nats, 0 outside the mask; [responses, tokens].
    """
    ids, mask = rollouts.inputs.get("input_ids"), rollouts.mask.cpu().bool()
    rows, width = torch.arange(len(mask)), mask.shape[1]
    if ids is None or ids.dim() != 2 or ids.shape[1] < width:
        return ""
    ids = ids[:, -width:].cpu()
    first, last = mask.int().argmax(1), width - 1 - mask.int().flip(1).argmax(1)
    # The first sampled token differs between responses to a prompt, as often as its probability says.
    opening: dict[int, tuple[int, int]] = {}
    chance, is_shared = 0.0, True
    for row, prompt in enumerate(rollouts.prompt.tolist()):
        at = int(first[row]), int(ids[row, first[row]])
        if prompt in opening:
            is_shared &= opening[prompt] == at
            chance += float(log_prob[row, first[row]])
        opening.setdefault(prompt, at)
    if is_shared and chance < _BY_CHANCE:
        return (
            "the mask begins with the same token in all responses to a prompt, which the policy would sample with a "
            f"probability of 10^{chance / math.log(10.0):.0f}: let mask be True from the first sampled token on, and "
            "not for the prompt"
        )
    early = rows[last < width - 1]
    if len(early) < _EARLY_FROM:
        return ""
    ends, behind = ids[early, last[early]], ids[early, last[early] + 1]
    counts = ends.unique(return_counts=True)[1]
    # A policy has few tokens that end responses.
    is_varied = len(counts) >= 4 and int(counts.max()) <= 0.75 * len(early)
    if is_varied and bool((behind == behind[0]).all()) and not bool((ends == behind[0]).any()):
        return (
            f"the {len(early)} responses that end early end in different tokens, and token {int(behind[0])} follows "
            "each: if the policy samples a token that ends a response, as <eos>, mask must be True for it too. Ignore "
            "this where stop strings end responses"
        )
    return ""


def _bounds(inputs: Mapping[str, Tensor], cu_seqlens: Tensor | None) -> list[tuple[int, int]]:
    """Where each response of a packed row begins and ends."""
    if "input_ids" not in inputs:
        raise ValueError(f"packed rows need 'input_ids', got {sorted(inputs)}: add it to inputs")
    n = len(_flat("input_ids", inputs["input_ids"], None))
    if cu_seqlens is not None:
        _check_types({}, {"cu_seqlens": cu_seqlens}, {"cu_seqlens": "[responses + 1]"})
        if cu_seqlens.dim() != 1 or cu_seqlens.is_floating_point():
            raise ValueError(
                f"cu_seqlens must be whole numbers, [responses + 1], got {list(cu_seqlens.shape)} of "
                f"{cu_seqlens.dtype}: pass where each response begins, and where the last one ends"
            )
        bounds = cu_seqlens.tolist()
        if not bounds or bounds[0] != 0 or bounds[-1] != n or any(a >= b for a, b in itertools.pairwise(bounds)):
            raise ValueError(f"cu_seqlens must rise from 0 to the row's {n} tokens, got {bounds}")
        return list(itertools.pairwise(bounds))
    if "position_ids" not in inputs:
        raise ValueError("nothing says where packed responses begin: pass cu_seqlens=, or 'position_ids' in inputs")
    positions = _flat("position_ids", inputs["position_ids"], n)
    if n and int(positions[0]) != 0:
        raise ValueError(
            f"the row begins at position {int(positions[0])}, in the middle of a sequence: pass whole sequences, "
            "whose position_ids begin with 0, or cu_seqlens="
        )
    return list(itertools.pairwise([*(positions == 0).nonzero()[:, 0].tolist(), n]))


def _flat(name: str, tensor: object, length: int | None) -> Tensor:
    """[tokens] from [tokens] or [1, tokens].

    Raises:
        ValueError: for another shape.
    """
    flat = tensor[0] if isinstance(tensor, Tensor) and tensor.dim() == 2 and len(tensor) == 1 else tensor
    if not isinstance(flat, Tensor) or flat.dim() != 1 or (length is not None and len(flat) != length):
        expected = "[tokens] or [1, tokens]" if length is None else f"[{length}] or [1, {length}], as input_ids"
        got = list(tensor.shape) if isinstance(tensor, Tensor) else _kind(tensor)
        raise ValueError(f"{name} of packed rows must be a tensor, {expected}, got {got}")
    return flat


def _check_types(inputs: object, values: Mapping[str, object], shapes: Mapping[str, str]) -> None:
    """Refuse what is no tensor; values that are optional may be None."""
    for name, value in values.items():
        if not isinstance(value, Tensor) and not (value is None and name in _OPTIONAL):
            raise ValueError(f"{name} must be a tensor, {shapes[name]}, got {_kind(value)}: pass torch.tensor({name})")
    if not isinstance(inputs, Mapping):
        raise ValueError(
            f"inputs must map names to tensors, got {_kind(inputs)}: pass {{'input_ids': ids}}, or what your token "
            "statistics read"
        )


def _check_terms(terms: object, shape: str = "[responses, tokens]") -> None:
    """Refuse what does not map names to tensors."""
    if not isinstance(terms, Mapping) or not all(isinstance(t, Tensor) for t in terms.values()):
        raise ValueError(f"terms must map names to tensors, {shape}, got {terms!r:.60}: pass {{'KL': ...}}")
    if unnamed := [name for name in terms if not isinstance(name, str) or not name.strip() or name == BONUS]:
        raise ValueError(f"terms need names of their own, got {unnamed[0]!r:.60}: name a term as 'KL'")


def _check_truncation(top_p: Any, top_k: Any, min_p: Any) -> None:
    """Refuse what no sampler takes. None, and −1 for `top_k`, turn one off, as in samplers."""

    def is_part(value: Any) -> bool:
        return isinstance(value, Real) and not isinstance(value, bool) and 0.0 <= float(value) <= 1.0

    if top_p is not None and not (is_part(top_p) and top_p > 0.0):
        raise ValueError(f"top_p must be above 0 and at most 1, got {top_p!r:.60}: pass that of sampling, 1 for none")
    if top_k is not None and (isinstance(top_k, bool) or not isinstance(top_k, int) or top_k < -1):
        raise ValueError(f"top_k must be a whole number of tokens, got {top_k!r:.60}: pass that of sampling, 0 for all")
    if min_p is not None and not is_part(min_p):
        raise ValueError(f"min_p must be from 0 to 1, got {min_p!r:.60}: pass that of sampling, 0 for none")


def _check_mask(mask: Tensor) -> None:
    """Refuse labels, weights and the like."""
    if mask.dtype != torch.bool and not bool(((mask == 0) | (mask == 1)).all()):
        raise ValueError(
            "mask must be True or 1 where the policy sampled a token, and False or 0 elsewhere, got other values: "
            "pass labels != -100, say"
        )


def _checksum(tensor: Tensor) -> int:
    """A sum of the bytes, each weighed by its place."""
    values = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).long()
    places = torch.arange(1, len(values) + 1, device="cpu") * 2_654_435_761 % 2**31  # Knuth's multiplicative hash
    return int((values * places).sum())


def _kind(value: object) -> str:
    return "None" if value is None else f"a {type(value).__name__}"


class TokenStatistics(Protocol):
    """Scores responses with a model: any callable of this form."""

    def __call__(self, model: nn.Module, rollouts: Rollouts, /) -> tuple[Tensor, Tensor]:
        """The policy's scores of each token.

        Returns:
            s_k, the log-probability of the sampled token, and H_k, the entropy of the whole distribution that it was
            sampled from, with the temperature and `truncation` of the rollouts; in nats, each [responses, tokens] as
            the mask. Values outside the mask are ignored.
        """
