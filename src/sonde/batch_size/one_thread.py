"""Methods that one thread at a time may run: a thread that reads must not meet the thread that trains."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Concatenate, ParamSpec, Protocol, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


class HasLock(Protocol):
    """An object with a lock of its own. A thread that holds the lock, such as one in a signal handler, may go on."""

    _lock: threading.RLock


S = TypeVar("S", bound=HasLock)


def one_thread_at_a_time(method: Callable[Concatenate[S, P], R]) -> Callable[Concatenate[S, P], R]:
    """Let other threads that call such a method of the same object wait."""

    @functools.wraps(method)
    def alone(self: S, /, *args: P.args, **kwargs: P.kwargs) -> R:
        with self._lock:
            return method(self, *args, **kwargs)

    return alone
