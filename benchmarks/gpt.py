"""The model that every contestant trains: a small GPT, and the text it trains on."""

from __future__ import annotations

import pydoc_data.topics
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
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


class _Gather(torch.autograd.Function):
    """Keys or values of all tokens, from the ranks that share a sequence: [sequences, heads, tokens, width of a head].

    The loss of each rank is that of its own tokens.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:  # type: ignore[override]
        ctx.group = group
        parts = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(group.size())]
        dist.all_gather(parts, x.contiguous(), group=group)
        return torch.cat(parts, 2)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        total = grad.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=ctx.group)
        return total.chunk(ctx.group.size(), 2)[ctx.group.rank()], None


class _Block(nn.Module):
    def __init__(self, shape: GptShape) -> None:
        super().__init__()
        self.shared_by: dist.ProcessGroup | None = None
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
        if self.shared_by is None:
            attended = scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            k, v = (_Gather.apply(each, self.shared_by) for each in (k, v))
            n = q.shape[2]
            sees = torch.ones(n, k.shape[2], dtype=torch.bool, device=q.device).tril(self.shared_by.rank() * n)
            attended = scaled_dot_product_attention(q, k, v, attn_mask=sees)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        out: Tensor = x + self.mlp(self.norm_mlp(x))
        return out


class Gpt(nn.Module):
    """Pre-norm decoder with tied input and output embeddings, whose parameters are all used through layers.

    `forward` returns the mean loss in nats per token, every sequence weighing the same.

    Attributes:
        shared_by: the ranks that hold equal parts of the same sequences, and take the loss of their own tokens; set it
            by `share`.
    """

    def __init__(self, shape: GptShape) -> None:
        super().__init__()
        self.shared_by: dist.ProcessGroup | None = None
        self.embed = nn.Embedding(shape.vocabulary, shape.width)
        self.position = nn.Embedding(shape.context, shape.width)
        self.blocks = nn.ModuleList(_Block(shape) for _ in range(shape.depth))
        self.norm = nn.LayerNorm(shape.width)
        self.head = nn.Linear(shape.width, shape.vocabulary, bias=False)
        self.head.weight = self.embed.weight
        for table in (self.embed, self.position):
            nn.init.normal_(table.weight, std=0.02)

    def share(self, ranks: dist.ProcessGroup) -> None:
        """Cut each sequence over these ranks."""
        for module in (self, *self.blocks):
            module.shared_by = ranks

    def forward(self, tokens: Tensor) -> Tensor:  # tokens: [sequences, context + 1]
        seen, expected, first = tokens[:, :-1], tokens[:, 1:], 0
        if self.shared_by is not None:
            n, rank = self.shared_by.size(), self.shared_by.rank()
            seen, expected = seen.chunk(n, 1)[rank], expected.chunk(n, 1)[rank]
            first = rank * seen.shape[1]
        places = torch.arange(first, first + seen.shape[1], device=tokens.device).expand_as(seen)
        x: Tensor = self.embed(seen) + self.position(places)
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        loss: Tensor = cross_entropy(logits.flatten(0, 1).float(), expected.flatten())
        return loss


class Stage(nn.Module):
    """The first or the last half of a GPT, whose two ends have embeddings of their own.

    The first half takes tokens, [sequences, tokens]; the last returns logits, [sequences, tokens, vocabulary].
    """

    def __init__(self, model: Gpt, *, is_first: bool) -> None:
        super().__init__()
        half = len(model.blocks) // 2
        self.embed, self.position = (model.embed, model.position) if is_first else (None, None)
        self.blocks = model.blocks[:half] if is_first else model.blocks[half:]
        self.norm, self.head = (None, None) if is_first else (model.norm, model.head)

    def forward(self, x: Tensor) -> Tensor:
        if self.embed is not None and self.position is not None:
            x = self.embed(x) + self.position(torch.arange(x.shape[1], device=x.device).expand_as(x))
        for block in self.blocks:
            x = block(x)
        out: Tensor = x if self.norm is None or self.head is None else self.head(self.norm(x))
        return out


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
