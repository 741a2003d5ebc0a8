"""The demo's task: predict the next byte of Python's own sources, real text that every machine has."""

from __future__ import annotations

import os
import sysconfig
import zlib
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

N_BYTES = 256
MIN_BYTES = 1_000_000
"""Smallest corpus. A model would memorize a smaller one within a short run. The standard library has about 12 MB."""

_SKIPPED_FOLDERS = frozenset({"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"})


def find_sources(root: Path | None = None) -> list[Path]:
    """The source files of the standard library in a fixed order, without its tests and without installed packages.

    Args:
        root: the folder of the library; by default the folder of the running Python's library.

    Raises:
        FileNotFoundError: when there are too few source files, for example if Python keeps its library in a zip file.
    """
    root = Path(sysconfig.get_paths()["stdlib"]) if root is None else root
    sources: list[Path] = []
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = sorted(set(subfolders) - _SKIPPED_FOLDERS)
        sources += (Path(folder, name) for name in sorted(names) if name.endswith(".py"))
    n_bytes = sum(source.stat().st_size for source in sources)
    if n_bytes < MIN_BYTES:
        raise FileNotFoundError(
            f"the demo learns from the source files of Python's standard library, got {n_bytes:,} bytes of .py files "
            f"in {root}, expected at least {MIN_BYTES:,}: use a Python that is installed with its source files"
        )
    return sources


def read_corpus(sources: Sequence[Path]) -> Tensor:
    """The bytes of all files, one file after the other: uint8, [bytes]."""
    return torch.frombuffer(bytearray(b"".join(source.read_bytes() for source in sources)), dtype=torch.uint8)


def window_generator(seed: int, step: int, rank: int) -> torch.Generator:
    """The random generator of one rank at one step: different on every rank, at every step and for every seed.

    Args:
        seed: the seed of the run.
        step: the optimizer step.
        rank: the rank of the process.
    """
    # The CPU generator keeps only 32 bits of a seed, so the three numbers are hashed, not packed side by side.
    return torch.Generator().manual_seed(zlib.crc32(f"{seed} {step} {rank}".encode()))


def draw_windows(corpus: Tensor, n_windows: int, context: int, generator: torch.Generator) -> Tensor:
    """Windows of text at random places.

    Args:
        corpus: uint8, [bytes].
        n_windows: number of windows.
        context: bytes that the model reads. A window has one more byte, which the model predicts.
        generator: the source of randomness.

    Returns:
        Byte values, int64, [windows, context + 1].
    """
    starts = torch.randint(len(corpus) - context, (n_windows, 1), generator=generator)
    return corpus[starts + torch.arange(context + 1)].long()


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
