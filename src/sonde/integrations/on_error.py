"""What an integration does with an error of its own after it is attached."""

from __future__ import annotations

from typing import Literal

OnError = Literal["warn", "raise"]


def checked_on_error(on_error: OnError) -> OnError:
    """The option, if it is one.

    Raises:
        ValueError: for another value.
    """
    if on_error not in ("warn", "raise"):
        raise ValueError(f"on_error must be 'warn' or 'raise', got {on_error!r}")
    return on_error
