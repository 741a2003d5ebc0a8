"""Where sonde's own sentences go: to stderr."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from typing import TextIO

_chosen: TextIO | None = None
"""The stream that `write_to` has chosen for this process; None for what `sys.stderr` is now."""
_in_words: Callable[[str], str] = str
"""What becomes of each sentence."""


def tell(text: str) -> None:
    """Write a sentence for the user, where there is a stream to write to."""
    stream = sys.stderr if _chosen is None else _chosen
    with contextlib.suppress(OSError, ValueError, AttributeError):  # closed, or None
        stream.write(f"sonde: {_in_words(text)}\n")
        stream.flush()


def write_to(stream: TextIO, in_words: Callable[[str], str]) -> None:
    """Write to this stream from now on, whatever becomes of `sys.stderr`.

    Args:
        stream: open for writing.
        in_words: puts a sentence into other words, for users of another interface.
    """
    global _chosen, _in_words
    _chosen, _in_words = stream, in_words
