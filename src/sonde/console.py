"""Where sonde's own sentences go, to stderr, and where its warnings point: to the user's line that called sonde."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any, TextIO

_chosen: TextIO | None = None
"""The stream that `write_to` has chosen for this process; None for what `sys.stderr` is now."""
_in_words: Callable[[str], str] = str
"""What becomes of each sentence."""


def tell(text: str) -> None:
    """Write a sentence for the user, where there is a stream to write to."""
    stream = sys.stderr if _chosen is None else _chosen
    # The stream may be closed, or None.
    with contextlib.suppress(OSError, ValueError, AttributeError), _beside_progress_bars(stream):
        stream.write(f"sonde: {_in_words(text)}\n")
        stream.flush()


@contextlib.contextmanager
def _beside_progress_bars(stream: TextIO) -> Iterator[None]:
    """Take the bars of tqdm off the stream's lines for a while, if the script has imported it.

    A bar on another stream is in the way only on a terminal: what a script writes to a file stays as it is.
    """
    tqdm: Any = getattr(sys.modules.get("tqdm"), "tqdm", None)
    if not getattr(tqdm, "_instances", None):  # no bar is shown
        yield
        return
    with tqdm.get_lock():
        bars = [bar for bar in tqdm._instances if _is_in_the_way(getattr(bar, "fp", None), stream)]
        for bar in bars:
            bar.clear(nolock=True)
        yield
        for bar in bars:
            bar.refresh(nolock=True)


def _is_in_the_way(of_bar: Any, stream: TextIO) -> bool:
    with contextlib.suppress(OSError, ValueError, AttributeError):  # closed, no file, or a bar that is not made yet
        return bool(of_bar == stream or of_bar.isatty() or of_bar.fileno() == stream.fileno())
    return False


def write_to(stream: TextIO, in_words: Callable[[str], str]) -> None:
    """Write to this stream from now on, whatever becomes of `sys.stderr`.

    Args:
        stream: open for writing.
        in_words: puts a sentence into other words, for users of another interface.
    """
    global _chosen, _in_words
    _chosen, _in_words = stream, in_words


def stack_level() -> int:
    """The `stacklevel` with which `warnings.warn` in the calling function points outside sonde and torch."""
    level, frame = 1, sys._getframe(1)
    inside = ("sonde", "torch", "contextlib")
    while frame.f_back is not None and frame.f_globals.get("__name__", "").split(".")[0] in inside:
        level, frame = level + 1, frame.f_back
    return level
