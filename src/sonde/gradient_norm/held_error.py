"""Errors that one rank finds, held back until the other ranks have heard of them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator


class HeldError:
    """The first error found on this rank, to be raised after the next sum over ranks.

    A rank that raised at once would never join the sum, and its peers would wait there for ever. So one rule covers
    whatever is wrong on one rank: hold the error, take part in the sum with the failure flag set, raise after the sum.
    `global_norm`, `compare_plans` and `warm_up` raise; everything before them holds. (`check_replicas` need not hold:
    every rank finds the same error.)

    Args:
        first: an error that was found already.

    Example:
        >>> problem = HeldError()
        >>> with problem.hold():
        ...     raise ValueError("mesh= is missing")
        >>> problem.first
        ValueError('mesh= is missing')
    """

    def __init__(self, first: ValueError | None = None) -> None:
        self.first = first

    def keep(self, error: ValueError) -> None:
        """Hold this error, unless there is an earlier one."""
        self.first = self.first or error

    @contextlib.contextmanager
    def hold(self) -> Iterator[None]:
        """Hold a `ValueError` that the block raises; execution continues after the block."""
        try:
            yield
        except ValueError as error:
            self.keep(error)
