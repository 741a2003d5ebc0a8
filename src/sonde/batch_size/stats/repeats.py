"""Do data repeat within a window? Two pieces, or two ranks, with the same gradient while others differ."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

FEWEST_RANKS = 3
"""Fewest ranks of which two can be the same while another differs."""
_ROUNDING = 2e-6
"""Relative difference up to which two gradients are the same: fp32 kernels that add in another order, and a weight that
was divided out. Independent pieces differ by far more."""
_FEWEST_ELEMENTS = 4
"""Elements other than 0 that a gradient must have. Fewer may coincide by chance, as those of a sum of signs do."""
_LEAST_DIFFERENCE = 1e-3
"""Mean squared difference of all pairs over a piece's square. Below it, rounding to 16 bits can make pieces equal."""
_MEMORY = 100.0
"""Windows that are remembered at least."""
_FEWEST_REPEATS = 4.5
"""Repeats, weighted by age, before the first judgement: the fifth in a row."""
_FEW_RANKS = 16
"""Ranks of which some two are as unlikely to be the same by chance as two pieces are."""
_IN_A_ROW = 3
"""Windows in a row in which the same two of more ranks must be the same."""
_LEAST_SHARE = 0.2
"""Share of windows with a repeat. Sampling with replacement, or the seam of two epochs, repeats data now and then."""


def repeats_piece(pieces: Tensor) -> Tensor:
    """Whether two pieces are the same while the pieces differ.

    Differences do not depend on the true gradient, which all pieces share: however much it dominates, independent
    pieces differ.

    Args:
        pieces: elements of the pieces' gradients over their weights; [pieces, elements], at least `FEWEST_PIECES` of
            `neighbours`.

    Returns:
        1 or 0, which add up over ranks; 0-dim.
    """
    n = len(pieces)
    # Without a matrix product: |x|² + |y|² − 2⟨x, y⟩ would cancel, to nothing where the accumulators are fp32.
    distances = torch.cdist(pieces, pieces, compute_mode="donot_use_mm_for_euclid_dist")
    sizes = torch.linalg.vector_norm(pieces, dim=1)
    sizes = torch.where(_has_evidence(pieces), sizes, torch.nan)  # NaN equals nothing
    smaller = torch.minimum(sizes[:, None], sizes)
    mean_square = distances.square().sum() / (n * (n - 1))
    is_same = (distances <= _ROUNDING * smaller) & (mean_square >= _LEAST_DIFFERENCE * smaller.square())
    return is_same.fill_diagonal_(False).any().to(pieces.dtype)


def rank_mark(rank_sum: Tensor) -> Tensor:
    """Two numbers by which ranks with the same gradient are recognised.

    Args:
        rank_sum: elements of the sum of a rank's gradients, [elements].

    Returns:
        The squared norm, and the projection on a fixed direction; 0 for a gradient with too few elements. [2].
    """
    direction = _direction(len(rank_sum), rank_sum.dtype, rank_sum.device)
    mark = torch.stack([rank_sum.dot(rank_sum), rank_sum.dot(direction)])
    return torch.where(_has_evidence(rank_sum), mark, 0.0)


@functools.lru_cache(maxsize=8)
def _direction(n: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """At most a unit vector, without a pattern that gradients could share; [n]."""
    return (torch.arange(n, dtype=dtype, device=device).square().cos() / math.sqrt(max(n, 1))).contiguous()


def _has_evidence(gradients: Tensor) -> Tensor:
    return (gradients != 0).sum(-1) >= _FEWEST_ELEMENTS


def same_ranks(marks: Tensor, *, spread: float) -> frozenset[tuple[int, int]]:
    """Find ranks with the same gradient while gradients differ between ranks.

    Args:
        marks: of `rank_mark`; [ranks, 2], float64 on the CPU.
        spread: variance of the ranks' gradients over their mean square, from 0 to 1.

    Returns:
        Each rank that repeats a lower one, after the lowest such rank.
    """
    # The mean squared difference of two ranks, over the mean square, is twice the spread.
    if len(marks) < FEWEST_RANKS or not 2 * spread >= _LEAST_DIFFERENCE:
        return frozenset()
    order = marks[:, 0].argsort(stable=True)  # equal ranks become neighbours
    sizes, projections = marks[order].unbind(1)
    is_same = (sizes.diff() <= 2 * _ROUNDING * sizes[:-1]) & (projections.diff().abs() <= _ROUNDING * sizes[:-1].sqrt())
    ranks, pairs = order.tolist(), set[tuple[int, int]]()
    cluster = ranks[:1]
    for rank, continues in zip(ranks[1:], (is_same & (sizes[:-1] > 0)).tolist(), strict=True):
        cluster = [*cluster, rank] if continues else [rank]
        pairs |= {(min(cluster), other) for other in cluster if other != min(cluster)}
    return frozenset(pairs)


@dataclass(frozen=True)
class Repeats:
    """Repeats in one window.

    Attributes:
        n_ranks: ranks with pieces enough to compare.
        n_repeating: those of them on which two pieces are the same.
        same_ranks: pairs of ranks with the same gradient.
        n_compared: ranks that were compared with each other; 0 if there are too few.
    """

    n_ranks: int = 0
    n_repeating: int = 0
    same_ranks: frozenset[tuple[int, int]] = frozenset()
    n_compared: int = 0


class _Share:
    """How often something occurs in the last windows."""

    def __init__(self, decay: float) -> None:
        self._decay = decay
        self._times = self._windows = 0.0

    def update(self, share: float) -> None:
        """Take one window, or the share of its ranks."""
        self._times = self._decay * self._times + share
        self._windows = self._decay * self._windows + 1.0

    @property
    def in_words(self) -> str | None:
        """The share, where it is too large for chance."""
        if self._times < _FEWEST_REPEATS or self._times < _LEAST_SHARE * self._windows:
            return None
        return f"{100 * self._times / self._windows:.0f} %"

    def state_dict(self) -> dict[str, float]:
        return {"times": self._times, "windows": self._windows}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        self._times, self._windows = state["times"], state["windows"]


class RepeatWatch:
    """Counts repeats over windows, and judges whether they are chance.

    Args:
        decay: factor by which a window's weight shrinks with each later window.
    """

    def __init__(self, decay: float) -> None:
        decay = max(decay, 1.0 - 1.0 / _MEMORY)
        self._pieces, self._ranks = _Share(decay), _Share(decay)
        self._in_a_row: dict[tuple[int, int], int] = {}
        self._pair = ""

    def update(self, window: Repeats) -> None:
        """Take one window."""
        if window.n_ranks:
            self._pieces.update(window.n_repeating / window.n_ranks)
        if window.n_compared:
            # Among many ranks some two may be the same by chance, but not the same two again and again.
            in_a_row = _IN_A_ROW if window.n_compared > _FEW_RANKS else 1
            self._in_a_row = {pair: self._in_a_row.get(pair, 0) + 1 for pair in sorted(window.same_ranks)}
            lasting = [pair for pair, n in self._in_a_row.items() if n >= in_a_row]
            self._ranks.update(float(bool(lasting)))
            if lasting:
                self._pair = f" ({lasting[0][0]} and {lasting[0][1]})"

    def pieces_doubt(self) -> str | None:
        """Why pieces are not independent samples; None when nothing looks wrong."""
        if (share := self._pieces.in_words) is None:
            return None
        return (
            f"two pieces of a rank had the same gradient in {share} of the windows, so they are not independent "
            "samples: does the sampler give one micro-batch twice, does one batch run backward twice, or does the "
            "gradient not depend on the inputs, as when all units of a layer are dead? Check the sampler, and put all "
            "backwards of one batch into one 'with probe.piece():'"
        )

    def ranks_doubt(self) -> str | None:
        """Why ranks do not have data of their own; None when nothing looks wrong."""
        if (share := self._ranks.in_words) is None:
            return None
        return (
            f"two ranks{self._pair} had the same gradient in {share} of the windows: do they get the same data? "
            "Check that the sampler knows the rank"
        )

    def state_dict(self) -> dict[str, dict[str, float]]:
        """Everything that `load_state_dict` needs."""
        return {"pieces": self._pieces.state_dict(), "ranks": self._ranks.state_dict()}

    def load_state_dict(self, state: Mapping[str, Mapping[str, float]]) -> None:
        """Restore what `state_dict` returned."""
        self._pieces.load_state_dict(state["pieces"])
        self._ranks.load_state_dict(state["ranks"])
