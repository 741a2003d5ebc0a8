"""Notices windows that are not ended before the optimizer steps on them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sonde.batch_size.taps.window_reader import WindowReader
from sonde.parallel.wrappers import unwrap_optimizer


class StepWatch:
    """Listens to the optimizer's steps: every window must be ended before its step.

    Args:
        optimizer: the optimizer of the loop; None to notice nothing.
        reader: the reader of the window, which is forgotten when the optimizer steps before the window was ended.
        on_never_ended: called when it is certain that a window was not ended, not even late.
    """

    def __init__(self, optimizer: Any, reader: WindowReader, on_never_ended: Callable[[], None]) -> None:
        self._reader, self._on_never_ended = reader, on_never_ended
        self._stepped_unended = False
        self._ended_since_step = False
        self._handle = None
        if optimizer is not None:
            self._handle = unwrap_optimizer(optimizer).register_step_pre_hook(self._before_step)

    def window_ends(self) -> bool:
        """Note that a window is being ended.

        Returns:
            Whether the window is ended late: the optimizer has stepped already.
        """
        is_late = self._stepped_unended and self._reader.n_pieces == 0
        if not is_late:
            self.alert_if_due()
        self._stepped_unended, self._ended_since_step = False, not is_late
        return is_late

    def alert_if_due(self) -> None:
        """Report a window that was not ended, once it can no longer be ended late."""
        if self._stepped_unended:
            self._on_never_ended()

    def close(self) -> None:
        """Stop listening."""
        if self._handle is not None:
            self._handle.remove()

    def _before_step(self, *_: object) -> None:
        if self._reader.n_pieces and not self._ended_since_step:
            self.alert_if_due()
            self._stepped_unended = True
            self._reader.forget_window()
        self._ended_since_step = False
