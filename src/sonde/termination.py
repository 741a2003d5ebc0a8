"""Does a last thing when the process is told to end, and leaves everything else as it would have been."""

from __future__ import annotations

import os
import signal
import threading
import weakref
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any


class OnTermination:
    """Calls functions when SIGTERM arrives, then does what the signal would have done without them.

    It listens from now until `remove`. A handler that was installed before is called. If there is none, the process
    ends by the signal. In a child that was forked, and in a process that ignores the signal, nothing is called.

    Args:
        at_once: a method that takes milliseconds; called first. It is held weakly, as are the others.
        before_the_end: a method that may take seconds; called if the handler that was installed before has raised, or
            if there is none, so that the process ends.
        if_it_goes_on: a method that is called if the handler that was installed before has returned.

    If several of these listen, each of their functions is called for all of them, the newest first, before the next
    function is called for any.
    """

    def __init__(
        self, at_once: Callable[[], None], before_the_end: Callable[[], None], if_it_goes_on: Callable[[], None]
    ) -> None:
        self._at_once, self._before_the_end = weakref.WeakMethod(at_once), weakref.WeakMethod(before_the_end)
        self._if_it_goes_on = weakref.WeakMethod(if_it_goes_on)
        self._pid = os.getpid()
        self._previous: Any = signal.getsignal(signal.SIGTERM)
        # Only the main thread can listen. A handler made in C (None) could not be called.
        self.in_main_thread = threading.current_thread() is threading.main_thread()
        self._is_on = self.in_main_thread and self._previous not in (None, signal.SIG_IGN)
        self.is_handling = False
        """Whether the signal has arrived, and it is not known yet whether the process goes on."""
        if self._is_on:
            signal.signal(signal.SIGTERM, self)

    def remove(self) -> None:
        """Put back what was there before. If another handler was installed since, that one stays."""
        self._is_on = False
        in_main_thread = threading.current_thread() is threading.main_thread()
        current: object = signal.getsignal(signal.SIGTERM)
        if in_main_thread and current is self and os.getpid() == self._pid:
            signal.signal(signal.SIGTERM, self._before())

    def _before(self) -> Any:
        """What was installed before, without those of ours that were removed meanwhile."""
        previous = self._previous
        return previous._before() if isinstance(previous, OnTermination) and not previous._is_on else previous

    def _chain(self) -> tuple[list[OnTermination], Any]:
        """The listeners of this process from this one on, and the handler behind them, which is none of ours."""
        listeners = list[OnTermination]()
        handler: Any = self
        while isinstance(handler, OnTermination):
            if handler._is_on and handler._pid == os.getpid():
                listeners.append(handler)
            handler = handler._previous
        return listeners, handler

    def __call__(self, signum: int, frame: FrameType | None) -> None:
        """The signal has arrived. The listener that was made last handles it for all of them."""
        listeners, handler = self._chain()
        for listener in listeners:
            listener.is_handling = True
        try:
            _handle(listeners, handler, signum, frame)
        finally:
            for listener in listeners:
                listener.is_handling = False

    def call_at_once(self) -> None:
        """The signal has arrived."""
        _call(self._at_once)

    def call_before_the_end(self) -> None:
        """The handler that was installed before has raised, or there is none, and the process ends."""
        _call(self._before_the_end)

    def call_if_it_goes_on(self) -> None:
        """The handler that was installed before has returned."""
        _call(self._if_it_goes_on)


def _handle(listeners: Sequence[OnTermination], handler: Any, signum: int, frame: FrameType | None) -> None:
    """Call the listeners, and between them what the signal would have called without them."""
    for listener in listeners:  # all of them before the first report, which takes seconds
        listener.call_at_once()
    if not callable(handler):
        for listener in listeners:
            listener.call_before_the_end()
        signal.signal(signum, signal.SIG_DFL)
        os.kill(os.getpid(), signum)
        return
    try:
        handler(signum, frame)
    except BaseException:
        for listener in listeners:
            listener.call_before_the_end()
        raise
    for listener in listeners:
        listener.call_if_it_goes_on()


def _call(method: weakref.WeakMethod[Callable[[], None]]) -> None:
    if (bound := method()) is not None:
        bound()
