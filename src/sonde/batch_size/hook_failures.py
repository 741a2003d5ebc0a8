"""Errors of sonde's own inside hooks of the user's forward and backward: they are logged, and training goes on."""

from __future__ import annotations

import logging

logger = logging.getLogger("sonde")

_logged: set[str] = set()


def log_failure(error: Exception) -> None:
    """Log an error that is being handled, with its traceback; once for each text."""
    if (text := f"{type(error).__name__}: {error}") not in _logged:
        _logged.add(text)
        logger.exception("sonde failed inside a hook, and training goes on without what it was to measure: %s", text)
