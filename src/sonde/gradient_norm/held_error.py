"""Errors that one rank finds, held back until the other ranks have heard of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")

OTHER_GRADIENT = "another rank found a gradient that cannot be counted, and its message names the gradient"
OTHER_CALL = "another rank was called with something that cannot be used, and its message says what"
OTHER_PLAN = "another rank cannot plan for its gradients, and its message says why"
"""What the other ranks raise."""


class HeldError:
    """The first error found on this rank, to be raised after the next sum over ranks.

    A rank that raised at once would never join the sum, and its peers would wait there for ever. So one rule covers
    whatever is wrong on one rank: hold the error, take part in the sum with the failure flag set, raise after the sum.
    `global_norm`, `compare_plans` and `warm_up` raise; everything before them holds. (`check_replicas` need not hold:
    every rank finds the same error.) While gradients are grouped, collected and read, errors of any kind are held.

    Two cases cannot be covered, and the peers wait until their backend gives up. One is an error in a sum itself, such
    as no memory for the buffer in which partial gradients are summed. The other is a rank without `mesh=` whose
    parameters cannot be used: it does not know which sums its peers make.

    Args:
        first: an error that was found already.

    Example:
        >>> problem = HeldError()
        >>> problem.attempt(int, "one", otherwise=0)
        0
        >>> problem.first
        ValueError("invalid literal for int() with base 10: 'one'")
    """

    def __init__(self, first: ValueError | None = None) -> None:
        self.first = first

    def keep(self, error: ValueError) -> None:
        """Hold this error, unless there is an earlier one."""
        self.first = self.first or error

    def attempt(self, function: Callable[..., T], *args: Any, otherwise: T) -> T:
        """What a function returns; if it raises a `ValueError`, that is held, and `otherwise` is returned."""
        try:
            return function(*args)
        except ValueError as error:
            self.keep(error)
            return otherwise


def unexpected(what: str, error: Exception) -> ValueError:
    """An error of any kind, as one to hold.

    Args:
        what: what could not be done.
        error: its cause.
    """
    problem = ValueError(f"{what}: {type(error).__name__}: {error}")
    problem.__cause__ = error
    return problem
