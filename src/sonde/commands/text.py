"""Text files as sequences of tokens, in random order."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

_SUFFIXES = (".txt", ".md", ".jsonl")
_PART = 2**16
"""Longest part of a document in characters. Parts are shuffled, so that one long file has a random order too."""
_WAITING = 1024
"""Sequences that wait, from which the next is drawn: neighbours in a document do not follow each other."""

T = TypeVar("T")


def read_documents(path: Path) -> list[str]:
    """The documents of a file or a folder, in parts of bounded length.

    Args:
        path: a file of JSON lines (`.jsonl`) with "text", another file of text, or a folder of `.txt`, `.md` and
            `.jsonl` files, also in folders inside.

    Raises:
        FileNotFoundError: when there is nothing at the path.
        ValueError: when a file is not text, a line of JSON has no text, or there is no text at all.
    """
    if not path.exists():
        raise FileNotFoundError(f"no file or folder at {path}: pass --data a file of text, or a folder of them")
    files = [path]
    if path.is_dir():
        files = sorted(p for p in path.rglob("*") if p.suffix.lower() in _SUFFIXES and p.is_file())
        if not files:
            raise ValueError(f"{path} has no file that ends in {', '.join(_SUFFIXES)}: pass --data such a folder")
    parts = [part for file in files for document in _documents(file) for part in _parts(document)]
    if not parts:
        raise ValueError(f"{path} has no text: pass --data a file or folder with text")
    return parts


def _documents(file: Path) -> Iterator[str]:
    try:
        text = file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{file} is not text in UTF-8 (byte {error.start}): convert it, or leave it out") from None
    if file.suffix.lower() != ".jsonl":
        yield text
        return
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip():
            continue
        try:
            document = json.loads(line)["text"]
        except (ValueError, KeyError, TypeError):
            document = None
        if not isinstance(document, str):
            raise ValueError(
                f'line {number} of {file} is no JSON object with a "text", got {line[:50]!r}: write {{"text": "…"}}'
            )
        yield document


def _parts(document: str) -> Iterator[str]:
    for start in range(0, len(document), _PART):
        if part := document[start : start + _PART].strip():
            yield part


def sequences(documents: Iterable[str], tokenizer: Any, n_tokens: int, *, seed: int) -> Iterator[Tensor]:
    """Documents as sequences of one length, in random order, the end-of-text token between documents.

    Args:
        documents: texts; shuffled here.
        tokenizer: of transformers.
        n_tokens: tokens of each sequence; what is left at the very end is dropped.
        seed: of the order.

    Yields:
        Token numbers, [n_tokens], int64.
    """
    order = random.Random(seed)
    shuffled = list(documents)
    order.shuffle(shuffled)
    return _shuffled(_cut(shuffled, tokenizer, n_tokens), order)


def _cut(documents: Iterable[str], tokenizer: Any, n_tokens: int) -> Iterator[Tensor]:
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    waiting: list[int] = []
    for document in documents:
        waiting += [*tokenizer.encode(document, add_special_tokens=False), *end]
        n_whole = len(waiting) // n_tokens * n_tokens
        yield from torch.tensor(waiting[:n_whole], dtype=torch.int64, device="cpu").view(-1, n_tokens)
        waiting = waiting[n_whole:]


def _shuffled(items: Iterator[T], order: random.Random) -> Iterator[T]:
    waiting = list(itertools.islice(items, _WAITING))
    for item in items:
        at = order.randrange(len(waiting))
        yield waiting[at]
        waiting[at] = item
    order.shuffle(waiting)
    yield from waiting
