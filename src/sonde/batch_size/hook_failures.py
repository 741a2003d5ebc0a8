"""Errors of sonde's own inside hooks of the user's forward and backward: they are logged, and training goes on."""

from __future__ import annotations

import logging

from sonde.batch_size.taps.tap import Problem

logger = logging.getLogger("sonde")

_logged: set[str] = set()


def count_failure(problems: list[int], error: Exception) -> None:
    """Log an error that is being handled, and drop the window by it.

    Args:
        problems: counts per `Problem`.
        error: that is being handled.
    """
    problems[Problem.FAILED] += 1
    log_failure(error)


def log_failure(error: Exception) -> None:
    """Log an error that is being handled, with its traceback; once for each text."""
    if (text := f"{type(error).__name__}: {error}") not in _logged:
        _logged.add(text)
        logger.exception("sonde failed inside a hook, and training goes on without what it was to measure: %s", text)
