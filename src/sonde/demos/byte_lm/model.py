"""A causal transformer that predicts the next byte."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

N_BYTES = 256


class ByteTransformer(nn.Module):
    """For each byte of a window, logits of the next byte, computed from this byte and the bytes before it.

    Args:
        context: the longest window, in bytes.
        width: size of the vector that represents one byte.
        depth: number of blocks.
        n_heads: attention heads per block. `width` must be a multiple of it.

    Example:
        >>> model = ByteTransformer(context=96)
        >>> model(torch.tensor([list(b"import torch")])).shape
        torch.Size([1, 12, 256])
    """

    def __init__(self, *, context: int, width: int = 128, depth: int = 5, n_heads: int = 4) -> None:
        super().__init__()
        self.embed = ByteEmbedding(context, width)
        self.blocks = nn.Sequential(*(Block(width, n_heads) for _ in range(depth)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, N_BYTES, bias=False)
        self.apply(_init_small)

    def forward(self, window: Tensor) -> Tensor:
        """Logits of the next byte.

        Args:
            window: byte values, [windows, length] with length ≤ context.

        Returns:
            [windows, length, 256].
        """
        logits: Tensor = self.head(self.norm(self.blocks(self.embed(window))))
        return logits


class ByteEmbedding(nn.Embedding):
    """A vector for each byte plus one for its position."""

    def __init__(self, context: int, width: int) -> None:
        super().__init__(N_BYTES, width)
        self.position = nn.Parameter(torch.zeros(context, width))

    def forward(self, window: Tensor) -> Tensor:
        """[windows, length] → [windows, length, width]."""
        return super().forward(window) + self.position[: window.shape[1]]


class Block(nn.Module):
    """Attention, then a perceptron on each position. Each one is added to its input (pre-norm)."""

    def __init__(self, width: int, n_heads: int) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width)
        self.attention = CausalAttention(width, n_heads)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        """[windows, length, width] → the same."""
        x = x + self.attention(self.attention_norm(x))
        x = x + self.mlp(self.mlp_norm(x))
        return x


class CausalAttention(nn.Module):
    """Attention in which each position sees itself and the positions before it."""

    def __init__(self, width: int, n_heads: int) -> None:
        super().__init__()
        self.n_heads = n_heads
        self.queries_keys_values = nn.Linear(width, 3 * width, bias=False)
        self.output = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[windows, length, width] → the same."""
        # [windows, length, 3·width] -> three of [windows, heads, length, width/heads]
        q, k, v = self.queries_keys_values(x).unflatten(-1, (3, self.n_heads, -1)).permute(2, 0, 3, 1, 4)
        gathered = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        mixed: Tensor = self.output(gathered.transpose(1, 2).flatten(2))
        return mixed


def _init_small(module: nn.Module) -> None:
    """Small weights make the first prediction nearly uniform: a loss of ln 256 = 5.55 nats per byte."""
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)
