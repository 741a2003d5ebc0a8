"""Real text that every machine has: the source files of Python's standard library."""

from __future__ import annotations

import os
import sysconfig
import zlib
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

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
