"""A Llama of random weights as a policy: its own responses, and the training step that learns from them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import cross_entropy

import sonde

RESPONSES = 8
"""To each prompt."""


@dataclass(frozen=True)
class LlamaSize:
    """Sizes of the model and of its two batches; lengths in tokens."""

    width: int
    mlp: int
    depth: int
    vocabulary: int
    prompts: int
    prompt: int
    response: int


HALF_A_BILLION = LlamaSize(896, 4864, 24, 128_256, prompts=16, prompt=64, response=192)
TINY = LlamaSize(28, 32, 1, 64, prompts=4, prompt=4, response=6)


class RandomLlama:
    """A policy in bf16, whose attention is torch's fused one.

    Attributes:
        size: of the model and its batches.
        model: a model of transformers.
        optimizer: AdamW.
        evaluation: responses to some prompts.
        update: responses to others, with random advantages.
    """

    def __init__(self, size: LlamaSize, device: str) -> None:
        from transformers import LlamaConfig, LlamaForCausalLM

        config = LlamaConfig(
            vocab_size=size.vocabulary,
            hidden_size=size.width,
            intermediate_size=size.mlp,
            num_hidden_layers=size.depth,
            num_attention_heads=14,
            num_key_value_heads=2,
            max_position_embeddings=1024,
            tie_word_embeddings=True,
            eos_token_id=None,  # each response has all its tokens
            attn_implementation="sdpa",
        )
        torch.manual_seed(0)
        self.size, self.device = size, device
        with torch.device(device):
            self.model: Any = LlamaForCausalLM(config).bfloat16().eval()
        with torch.no_grad():
            self.model.model.norm.weight.mul_(4.0)  # otherwise the policy is nearly uniform
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=2e-5, fused=True)
        self.evaluation, self.update = (self._responses(first) for first in (0, size.prompts))

    def _responses(self, first: int) -> sonde.Rollouts:
        size = self.size
        prompts = torch.randint(size.vocabulary, (size.prompts, size.prompt), device=self.device)
        prompts = prompts.repeat_interleave(RESPONSES, 0)
        how = {"do_sample": True, "top_k": 0, "max_new_tokens": size.response, "pad_token_id": 0}
        ids = self.model.generate(prompts, attention_mask=torch.ones_like(prompts), **how)
        numbers = first + torch.arange(size.prompts).repeat_interleave(RESPONSES)
        inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        mask = torch.ones(len(ids), size.response, dtype=torch.bool)
        return sonde.Rollouts(inputs, mask, numbers, advantage=torch.randn(len(ids)))

    def train(self) -> None:
        """Step, and make the gradients of the next step."""
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.backward()

    def backward(self) -> None:
        """The policy gradient of `update`, two prompts at a time."""
        for rows in self.update.order(2):
            some = self.update.rows(rows)
            assert some.advantage is not None
            ids = some.inputs["input_ids"]
            logits = self.model(**some.inputs, use_cache=False).logits[:, self.size.prompt - 1 : -1].float()
            chosen = ids[:, self.size.prompt :]
            surprise = cross_entropy(logits.flatten(0, 1), chosen.flatten(), reduction="none").view_as(chosen)
            loss = (some.advantage.to(surprise)[:, None] * surprise).sum() / self.update.mask.sum().item()
            loss.backward()
