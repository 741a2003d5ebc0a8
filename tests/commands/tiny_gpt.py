"""A language model and a tokenizer of one token for each character, written as transformers writes them; offline."""

from __future__ import annotations

from pathlib import Path

import torch

CHARACTERS = ["<end>", *map(chr, range(32, 127)), "\n"]


def write_tokenizer(folder: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokens = Tokenizer(models.WordLevel({c: i for i, c in enumerate(CHARACTERS)}, unk_token="<end>"))
    tokens.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    PreTrainedTokenizerFast(tokenizer_object=tokens, eos_token="<end>", unk_token="<end>").save_pretrained(folder)


def write_model(folder: Path) -> None:
    """A GPT-2 of 30,000 random weights that reads 64 tokens."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=len(CHARACTERS), n_positions=64, n_embd=32, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        GPT2LMHeadModel(config).save_pretrained(folder)
