"""The demo's task: sums of two digits, with a language model and a tokenizer that need no download."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

DIGITS = "0123456789"
PAD, END, UNKNOWN = "<pad>", "<eos>", "<unk>"
VOCABULARY = (PAD, END, UNKNOWN, *DIGITS, "+", "=")


def tokenizer() -> Any:
    """One token for each character; padding on the left."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokens = Tokenizer(models.WordLevel({t: i for i, t in enumerate(VOCABULARY)}, unk_token=UNKNOWN))
    tokens.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    return PreTrainedTokenizerFast(
        tokenizer_object=tokens, pad_token=PAD, eos_token=END, unk_token=UNKNOWN, padding_side="left"
    )


def model(seed: int = 0) -> Any:
    """A Qwen2 of 78,000 parameters with random weights."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    config = Qwen2Config(
        vocab_size=len(VOCABULARY),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        tie_word_embeddings=False,
        bos_token_id=1,
        eos_token_id=1,
        pad_token_id=0,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Qwen2ForCausalLM(config)


def dataset() -> Any:
    """All hundred sums, with their answers as two digits."""
    from datasets import Dataset

    pairs = [(a, b) for a in range(10) for b in range(10)]
    return Dataset.from_dict({"prompt": [f"{a}+{b}=" for a, b in pairs], "answer": [f"{a + b:02d}" for a, b in pairs]})


def reward(completions: Sequence[str], answer: Sequence[str], **_: Any) -> list[float]:
    """The share of right digits in the right places; an answer that is too long loses a quarter.

    Example:
        >>> reward(["07", "17", "0 7 7"], ["07", "07", "07"])
        [1.0, 0.5, 0.75]
    """
    rewards = []
    for completion, right in zip(completions, answer, strict=True):
        digits = completion.replace(" ", "")
        n_right = sum(a == b for a, b in zip(digits, right, strict=False))
        rewards.append(n_right / len(right) - 0.25 * (len(digits) > len(right)))
    return rewards
