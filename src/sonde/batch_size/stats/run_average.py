"""The noise scale of the run so far: tr Σ and |G|² of each step over the size of its gradient, then their ratio."""

from __future__ import annotations

from sonde.batch_size.stats.blocks import Block
from sonde.stats.intervals import TOO_FEW_WINDOWS, RatioInterval, fieller_interval

_FEWEST = 4
"""Fewest windows."""


class RunAverage:
    """Averages the first series of a run, step by step.

    A block counts for all the steps that it stands for, however many of its windows were measured. Over the size |F|²,
    each step weighs by the progress that it makes (McCandlish et al. 2018, arXiv:1812.06162, appendix D).
    """

    def __init__(self) -> None:
        self._sums = [0.0] * 9

    def add(self, block: Block) -> None:
        """Take the next block."""
        self._sums = self._with(block)

    def level(self, unfinished: Block | None = None) -> RatioInterval:
        """B_simple so far with Fieller's interval.

        Args:
            unfinished: the block under way, which counts too.
        """
        n_steps, n_windows, n_blocks, x, y, xx, xy, yy, spread = self._with(unfinished)
        if n_windows < _FEWEST:
            return TOO_FEW_WINDOWS
        # Satterthwaite's degrees of freedom of a sum of variances, here that of |G|².
        freedom = yy * yy / spread if spread > 0 else n_windows - n_blocks
        return fieller_interval(
            x / n_steps,
            y / n_steps,
            var_numerator=xx / n_steps**2,
            var_denominator=yy / n_steps**2,
            covariance=xy / n_steps**2,
            n_samples=max(freedom + 1.0, 2.0),
        )

    def _with(self, block: Block | None) -> list[float]:
        """Steps, windows, blocks; tr Σ and |G|² over all steps; their variances; and what Satterthwaite needs."""
        if block is None or block.n_windows < 2:  # a single window does not show its scatter
            return self._sums
        n, steps = block.n_windows, float(block.n_steps)
        x, y = block.means[0].tolist()
        (xx, xy), (_, yy) = (block.scatter[0] * (steps**2 / (n * (n - 1)))).tolist()
        of_block = (steps, n, 1, steps * x, steps * y, xx, xy, yy, yy * yy / (n - 1))
        return [a + b for a, b in zip(self._sums, of_block, strict=True)]
