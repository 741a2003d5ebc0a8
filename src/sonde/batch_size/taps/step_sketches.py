"""Compares the gradients of two consecutive windows by their sketches; the pairs do not overlap."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch
from torch import Tensor

from sonde.batch_size.taps.gradient_sketch import GradientSketch
from sonde.batch_size.taps.tap import StepOfWindow


class StepSketches:
    """Sketches the gradient of each window that the host may want to pair with its neighbour.

    Args:
        sketch: folds gradients.
    """

    def __init__(self, sketch: GradientSketch) -> None:
        self._sketch = sketch
        self.is_wanted = True
        """Whether windows of a single piece are sketched; the host decides."""
        self.why_not = ""
        """Why the last window was not sketched, as far as it was wanted."""
        self.seconds = 0.0
        """Host time spent so far."""
        self._first: tuple[int, Tensor] | None = None

    def end_window(self, grads: Sequence[Tensor | None], *, number: int, n_pieces: int) -> StepOfWindow | None:
        """Sketch the gradient at the end of a window.

        Args:
            grads: of all parameters, [parameters].
            number: of the window in training; a pair is of two that follow each other.
            n_pieces: the window's.

        Returns:
            Its products with itself, and with the window before if the two make a pair; None if it was not sketched.
        """
        start = time.perf_counter()
        step = self._step(grads, number) if self.is_wanted and n_pieces == 1 and self._can_fold(grads) else None
        if step is None:
            self._first = None
        self.seconds += time.perf_counter() - start
        return step

    def _can_fold(self, grads: Sequence[Tensor | None]) -> bool:
        is_sparse = any(grad is not None and grad.layout != torch.strided for grad in grads)
        self.why_not = "its gradient is sparse: use Embedding(sparse=False)" if is_sparse else ""
        return not is_sparse

    def _step(self, grads: Sequence[Tensor | None], number: int) -> StepOfWindow:
        first, self._first = self._first, None
        is_second = first is not None and first[0] == number - 1
        # Both windows of a pair have the signs of the first, and no other pair has them.
        sketch = self._sketch.of(grads, key=number - 1 if is_second else number)
        own = self._sketch.products(sketch, sketch)
        if first is not None and is_second:
            return StepOfWindow(torch.cat([own, self._sketch.products(first[1], sketch)]), is_second=True)
        self._first = (number, sketch)
        return StepOfWindow(torch.cat([own, torch.zeros_like(own)]), is_second=False)

    def forget(self) -> None:
        """Let no window be paired with those before: the next one is the first of a pair."""
        self._first = None
