"""The model that every contestant trains: a small GPT, and the text it trains on."""

from __future__ import annotations

import pydoc_data.topics
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention


@dataclass(frozen=True)
class GptShape:
    """Sizes of a GPT; `context` in tokens, which are bytes."""

    width: int
    depth: int
    heads: int
    context: int
    vocabulary: int = 256


ABOUT_6M = GptShape(width=256, depth=7, heads=8, context=256)
GPT2_SMALL = GptShape(width=768, depth=12, heads=12, context=1024, vocabulary=50_304)
TINY = GptShape(width=32, depth=2, heads=4, context=32)


class _Block(nn.Module):
    def __init__(self, shape: GptShape) -> None:
        super().__init__()
        self.heads = shape.heads
        self.norm_attention = nn.LayerNorm(shape.width)
        self.qkv = nn.Linear(shape.width, 3 * shape.width)
        self.out = nn.Linear(shape.width, shape.width)
        self.norm_mlp = nn.LayerNorm(shape.width)
        self.mlp = nn.Sequential(
            nn.Linear(shape.width, 4 * shape.width), nn.GELU(), nn.Linear(4 * shape.width, shape.width)
        )

    def forward(self, x: Tensor) -> Tensor:  # x: [sequences, tokens, width]
        split = self.qkv(self.norm_attention(x)).unflatten(-1, (3, self.heads, -1))
        q, k, v = split.permute(2, 0, 3, 1, 4)  # each [sequences, heads, tokens, width of a head]
        attended = scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        out: Tensor = x + self.mlp(self.norm_mlp(x))
        return out


class Gpt(nn.Module):
    """Pre-norm decoder with tied input and output embeddings, whose parameters are all used through layers.

    `forward` returns the mean loss in nats per token, every sequence weighing the same.
    """

    def __init__(self, shape: GptShape) -> None:
        super().__init__()
        self.embed = nn.Embedding(shape.vocabulary, shape.width)
        self.position = nn.Embedding(shape.context, shape.width)
        self.blocks = nn.ModuleList(_Block(shape) for _ in range(shape.depth))
        self.norm = nn.LayerNorm(shape.width)
        self.head = nn.Linear(shape.width, shape.vocabulary, bias=False)
        self.head.weight = self.embed.weight
        for table in (self.embed, self.position):
            nn.init.normal_(table.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:  # tokens: [sequences, context + 1]
        seen = tokens[:, :-1]
        places = torch.arange(seen.shape[1], device=tokens.device).expand_as(seen)
        x: Tensor = self.embed(seen) + self.position(places)
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        loss: Tensor = cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())
        return loss


def build(shape: GptShape, device: torch.device) -> Gpt:
    """The model with the weights that every contestant starts from."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Gpt(shape).to(device)


def sequences(shape: GptShape) -> Tensor:
    """Python's help topics, an English text, cut into sequences of bytes: [sequences, context + 1]."""
    text = "\n".join(pydoc_data.topics.topics.values()).encode()
    tokens = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    length = shape.context + 1
    return tokens[: len(tokens) // length * length].view(-1, length).long()
