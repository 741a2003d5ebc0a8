"""Real text that every machine has: the sources of Python's standard library."""

from __future__ import annotations

import os
import sysconfig
import zlib
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

MIN_BYTES = 1_000_000
"""Fewer bytes than this are learnt by heart within a short run; the standard library has about 12 million."""

_SKIPPED_FOLDERS = frozenset({"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"})


def find_sources(root: Path | None = None) -> list[Path]:
    """The standard library's source files, without its tests and without installed packages, in a fixed order.

    Args:
        root: the library's folder; by default that of the running Python.

    Raises:
        FileNotFoundError: when there are too few, as in a Python that keeps its library in a zip file.
    """
    root = Path(sysconfig.get_paths()["stdlib"]) if root is None else root
    sources: list[Path] = []
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = sorted(set(subfolders) - _SKIPPED_FOLDERS)
        sources += (Path(folder, name) for name in sorted(names) if name.endswith(".py"))
    n_bytes = sum(source.stat().st_size for source in sources)
    if n_bytes < MIN_BYTES:
        raise FileNotFoundError(
            f"the demo learns from the sources of Python's standard library, got {n_bytes:,} bytes of .py files in "
            f"{root}, expected at least {MIN_BYTES:,}: use a Python that is installed with its sources"
        )
    return sources


def read_corpus(sources: Sequence[Path]) -> Tensor:
    """All files, one after the other, as bytes: uint8, [bytes]."""
    return torch.frombuffer(bytearray(b"".join(source.read_bytes() for source in sources)), dtype=torch.uint8)


def window_generator(seed: int, step: int, rank: int) -> torch.Generator:
    """Randomness of one rank at one step: different on every rank, at every step and for every seed.

    Args:
        seed: of the run.
        step: optimizer step.
        rank: of the process.
    """
    # The CPU's generator keeps 32 bits of a seed, so the three are hashed rather than packed side by side.
    return torch.Generator().manual_seed(zlib.crc32(f"{seed} {step} {rank}".encode()))


def draw_windows(corpus: Tensor, n_windows: int, context: int, generator: torch.Generator) -> Tensor:
    """Windows at random places.

    Args:
        corpus: uint8, [bytes].
        n_windows: how many.
        context: bytes that the model reads; one more is drawn, to be predicted.
        generator: where randomness comes from.

    Returns:
        Byte values, int64, [windows, context + 1].
    """
    starts = torch.randint(len(corpus) - context, (n_windows, 1), generator=generator)
    return corpus[starts + torch.arange(context + 1)].long()
