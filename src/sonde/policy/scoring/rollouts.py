"""Responses that a policy sampled, with all that is needed to score them again."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, Protocol, Self

import torch
from torch import Tensor, nn

from sonde.policy.stats.entropy_gradient import Responses


@dataclass(frozen=True, eq=False)
class Rollouts:
    """Responses to prompts, a row each.

    Attributes:
        inputs: what `TokenStatistics` read, tensors whose rows are the responses.
        mask: whether a token was sampled by the policy, rather than prompt, padding or a tool's answer;
            [responses, tokens].
        prompt: a whole number that is the same for the responses to one prompt, on every rank; [responses].
        advantage: of each response or token, in any unit; [responses] or [responses, tokens].
        weight: what the loss multiplies each token by beside its advantage: 1 by default, one over the response's
            length for GRPO's first form; [responses, tokens].
        temperature: it was sampled at.
        is_truncated: whether sampling left out unlikely tokens, by top-p, top-k or the like.
        texts: each prompt's text by its number, for tables.

    Raises:
        ValueError: when shapes disagree, a response has no token, or an advantage or weight is not finite where a
            token was sampled.

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
    temperature: float = 1.0
    is_truncated: bool = False
    texts: Mapping[int, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        responses = self.responses()  # refuses what is wrong with the mask and the prompts
        for name, tensor in self.inputs.items():
            if not isinstance(tensor, Tensor) or tensor.shape[:1] != self.mask.shape[:1]:
                got = tuple(tensor.shape) if isinstance(tensor, Tensor) else type(tensor).__name__
                raise ValueError(f"inputs[{name!r}] must be a tensor of {len(self)} rows, one a response, got {got}")
        if self.prompt.is_floating_point() or self.prompt.is_complex():
            raise ValueError(f"prompt must be whole numbers, one a response, got {self.prompt.dtype}")
        if not self.temperature > 0:
            raise ValueError(f"temperature must be positive, got {self.temperature}: greedy decoding has no entropy")
        if self.advantage is not None:
            responses.tokens("advantage", self.of_tokens("advantage").cpu())
        if self.weight is not None:
            responses.tokens("weight", self.of_tokens("weight").cpu())

    def __len__(self) -> int:
        return len(self.mask)

    @property
    def n_prompts(self) -> int:
        """How many prompts were answered."""
        return len(self.prompt.unique())

    def responses(self) -> Responses:
        """Their mask and prompts, for equations; on the CPU."""
        return Responses(self.mask.cpu(), self.prompt.cpu())

    def credit(self) -> Tensor:
        """Advantage × weight, 0 where no token was sampled; [responses, tokens], fp64.

        Raises:
            ValueError: when there is no advantage.
        """
        if self.advantage is None:
            raise ValueError("which prompts cause the update is told by their advantages: pass advantage= to Rollouts")
        credit = self.of_tokens("advantage").double()
        if self.weight is not None:
            credit = credit * self.of_tokens("weight")
        return torch.where(self.mask.bool(), credit, 0.0)

    def order(self, prompts_each: int) -> list[Tensor]:
        """Rows in parts of that many prompts, all of a prompt's responses together.

        Prompts come in the order of their first response.
        """
        of = self.prompt.cpu()
        first: dict[int, list[int]] = {}
        for row, number in enumerate(of.tolist()):
            first.setdefault(number, []).append(row)
        rows = list(first.values())
        return [
            torch.tensor([row for prompt in rows[i : i + prompts_each] for row in prompt])
            for i in range(0, len(rows), prompts_each)
        ]

    def rows(self, index: Tensor) -> Self:
        """Some of the responses."""

        def pick(tensor: Tensor) -> Tensor:
            return tensor[index.to(tensor.device)]

        return dataclasses.replace(
            self,
            inputs={name: pick(tensor) for name, tensor in self.inputs.items()},
            mask=pick(self.mask),
            prompt=pick(self.prompt),
            advantage=None if self.advantage is None else pick(self.advantage),
            weight=None if self.weight is None else pick(self.weight),
        )

    def of_tokens(self, name: Literal["advantage", "weight"]) -> Tensor:
        """The advantage or weight of every token; [responses, tokens].

        Raises:
            ValueError: when it has another shape.
        """
        values: Tensor = getattr(self, name)
        if values.shape == self.mask.shape[:1]:
            values = values[:, None].expand_as(self.mask)
        if values.shape != self.mask.shape:
            expected = f"[{len(self)}] or {list(self.mask.shape)}"
            raise ValueError(f"{name} must be {expected}, of each response or each token, got {list(values.shape)}")
        return values


class TokenStatistics(Protocol):
    """Scores responses with a model: any callable of this form will do."""

    def __call__(self, model: nn.Module, rollouts: Rollouts, /) -> tuple[Tensor, Tensor]:
        """What the policy makes of each token.

        Returns:
            s_k, the log-probability of the token that was sampled, and H_k, the entropy of the whole distribution that
            it was sampled from; in nats, each [responses, tokens] as the mask. What they hold outside the mask is
            ignored.
        """
