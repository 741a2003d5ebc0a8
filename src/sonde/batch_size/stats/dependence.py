"""Are pieces, examples and ranks independent? A few numbers of each window, their averages, and a test on each.

A score has the mean 0 and the variance 1 where data are independent, whatever the distribution of the gradients.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from sonde.batch_size.stats.comparisons import NeighbourSums, Numbers, OrderScores, OrderSums, Repeats
from sonde.batch_size.stats.ratio_average import RatioAverage
from sonde.stats.sealed_state import Stateful

_MEMORY = 100.0
"""Windows that are remembered at least: with a shorter memory, nothing could reach 6 standard errors."""
_AFTER = 5
"""Windows before the first judgement."""
_STANDARD_ERRORS = 6.0
"""Beyond it, chance is no explanation: 2e-9 for one judgement, so that a run of many judgements has no false alarm."""
_LEAST_SCORE = 0.25
"""Mean score of a rank below which a dependence is too weak to matter, however many ranks and windows confirm it."""
_SURE = 3.0
"""Standard errors beyond which rows were not sorted."""
_BEFORE_EXCESS = 10
"""Windows before pieces are first held against examples."""
_LEAST_EXCESS = 0.05
"""Smallest (p − e)/(p + e) that matters, p and e being tr Σ from pieces and from examples: p is 1.1 times e."""
_FEWEST_REPEATS = 4.5
"""Repeats, weighted by age, before the first judgement: the fifth in a row."""
_LEAST_SHARE = 0.2
"""Share of windows with a repeat. Sampling with replacement, or the seam of two epochs, repeats data now and then."""
_FEW_RANKS = 16
"""Ranks of which some two are as unlikely to be the same by chance as two pieces are."""
_IN_A_ROW = 3
"""Windows in a row in which the same two of more ranks must be the same."""
_SAME = 1e-9
"""Ratio of noise to signal below which pieces hold the same data. Kernels without a fixed order of sums leave 1e-12."""
_FACTOR = 3.0
"""A consistency beyond this factor from 1, over its whole interval, is not explained by chance."""
_CERTAINTY = 0.99
"""Confidence level of that interval."""

_SIZE = (
    "the first of a window's two pieces has the {} gradient nearly always, so they are of two kinds, or the same in "
    "every window. If each is another kind of data or of loss, put both backwards into one 'with probe.piece():'"
)
_PIECES = {
    ("place", 1): _SIZE.format("larger"),
    ("place", -1): _SIZE.format("smaller"),
    ("units", 1): (
        "pieces with more units have the larger gradient nearly always, as if their losses were sums. Then pass each "
        "one's units as weight= to 'probe.piece()', or make each loss a mean"
    ),
    ("neighbours", 1): (
        "neighbouring pieces are too alike to be independent. Put all backwards of one batch into one 'with "
        "probe.piece():', and shuffle micro-batches, also if the sampler sorts by length"
    ),
    ("neighbours", -1): (
        "neighbouring pieces are less alike than others, so pieces are not independent. Check for data that repeat "
        "within a window. If micro-batches alternate between kinds of data or losses, put one of each into one 'with "
        "probe.piece():'"
    ),
}
"""What is said of pieces whose score has this sign, the first that applies."""
_REPEATED = {
    "pieces": (
        "two pieces of a rank had the same gradient in {share} of the windows, so they are not independent samples: "
        "does the sampler give one micro-batch twice, does one batch run backward twice, or does the gradient not "
        "depend on the inputs, as when all units of a layer are dead? Check the sampler, and put all backwards of one "
        "batch into one 'with probe.piece():'"
    ),
    "ranks": (
        "two ranks{pair} had the same gradient in {share} of the windows: do they get the same data? Check that the "
        "sampler knows the rank"
    ),
}
"""What is said of repeats."""
_ROWS = {
    "opposite": "the first row of a batch and the last one, the second and the last but one, and so on",
    "half": "rows half a batch apart",
    "next": "neighbouring rows of a batch",
}
_SCORES = (*dict.fromkeys(name for name, _ in _PIECES), *_ROWS, "not_sorted")
_SAME_DATA = ("differences", "consistency")
"""What shows the same data. Its memory is not lengthened."""


class Dependence(Stateful):
    """Averages over windows what speaks against independent data.

    Args:
        memory: of the averages, in measured windows.
    """

    def __init__(self, memory: float) -> None:
        self._of = {name: RatioAverage(max(memory, _MEMORY)) for name in (*_SCORES, *_REPEATED, "excess")}
        self._of |= {name: RatioAverage(memory) for name in _SAME_DATA}
        self._in_a_row: dict[tuple[int, int], int] = {}
        self._pair = ""

    def update(self, *compared: NeighbourSums | OrderSums | OrderScores | Repeats, excess: float | None = None) -> None:
        """Take a window.

        Args:
            compared: what was compared.
            excess: (p − e)/(p + e), p and e being tr Σ from its pieces and from its examples; None without two pieces.
                It is at most 1 in size, so that no window outweighs the others.
        """
        for each in compared:
            self.add(each.numbers())
            if isinstance(each, Repeats) and each.n_compared:
                self.add({"ranks": (float(self._ranks_stay_the_same(each)), 1.0)})
        if excess is not None:
            self.add({"excess": (excess, 1.0)})

    def add(self, numbers: Numbers) -> None:
        """Take numbers of a window, but those that are not finite."""
        for name, (x, y) in numbers.items():
            if math.isfinite(x) and math.isfinite(y):
                self._of[name].update(x, y)

    def _ranks_stay_the_same(self, window: Repeats) -> bool:
        # Among many ranks some two may be the same by chance, but not the same two again and again.
        fewest = _IN_A_ROW if window.n_compared > _FEW_RANKS else 1
        self._in_a_row = {pair: self._in_a_row.get(pair, 0) + 1 for pair in sorted(window.same_ranks)}
        lasting = [pair for pair, n in self._in_a_row.items() if n >= fewest]
        if lasting:
            self._pair = f" ({lasting[0][0]} and {lasting[0][1]})"
        return bool(lasting)

    @property
    def consistency(self) -> float | None:
        """tr Σ within ranks over tr Σ between ranks; infinite where ranks do not differ; None if not measurable."""
        ranks = self._of["consistency"]
        if not ranks.windows:
            return None
        # Ranks with the same data differ by rounding only.
        return ranks.x / ranks.y if ranks.y > _SAME * ranks.x else math.inf

    def doubts(self) -> dict[str, str]:
        """Reasons not to trust the averages, however narrow their interval: messages by name."""
        same = self._same_data()
        # If all data are the same, pieces repeat too.
        repeated = None if same else self._repeated("pieces")
        found = {
            "dependent_pieces": repeated or self._dependent_pieces(),
            "dependent_examples": self._dependent_examples(),
            "same_data": same or self._repeated("ranks"),
        }
        return {name: message for name, message in found.items() if message}

    def _lean(self, name: str) -> int:
        """The sign of a score; 0 where chance explains it."""
        score = self._of[name]
        is_chance = score.windows < _AFTER or abs(score.standard_errors) < _STANDARD_ERRORS
        if is_chance or abs(score.x) < _LEAST_SCORE * score.y:
            return 0
        return 1 if score.x > 0 else -1

    def _dependent_pieces(self) -> str | None:
        return next((message for (name, sign), message in _PIECES.items() if self._lean(name) == sign), None)

    def _repeated(self, name: str) -> str | None:
        """What is said of pieces or ranks, if they repeat too often for chance."""
        share = self._of[name]
        if share.x * share.weight < _FEWEST_REPEATS or share.x < _LEAST_SHARE:
            return None
        return _REPEATED[name].format(share=f"{100 * share.x:.0f} %", pair=self._pair)

    def _dependent_examples(self) -> str | None:
        found = [f"{rows} are more alike than chance allows" for name, rows in _ROWS.items() if self._lean(name) > 0]
        if self._of["not_sorted"].standard_errors < _SURE:
            found = []
        excess = self._of["excess"]
        is_certain = excess.x > max(_LEAST_EXCESS, _STANDARD_ERRORS * excess.error_of_x)
        if excess.windows >= _BEFORE_EXCESS and is_certain and excess.x < 1:
            times = (1 + excess.x) / (1 - excess.x)
            found.insert(0, f"pieces have {times:.2g} times the noise that single examples say")
        if not found:
            return None
        return (
            f"the examples of a batch are not independent: {found[0]}. If rows share samples, as after mixup, cutmix "
            "or repeated augmentation, read no single examples: accumulate gradients over 2 or more micro-batches that "
            "share none, or train on 2 or more ranks, with per_example='auto'. If batches come in a fixed order of "
            "classes, do the same, or draw their rows at random"
        )

    def _same_data(self) -> str | None:
        """The same data on all ranks give an infinite consistency, and those in all micro-batches of a rank give 0."""
        pieces, consistency = self._of["differences"], self.consistency
        if pieces.windows < _AFTER:
            return None
        if pieces.y > 0 and not pieces.x > _SAME * pieces.y:
            return (
                "all pieces have the same gradient: do all ranks and all micro-batches get the same data? "
                "Check the sampler's rank, its seed and set_epoch"
            )
        if consistency is None:
            return None
        # From the scatter of the windows: one window with a loss spike may dominate it.
        interval = self._of["consistency"].interval(_CERTAINTY)
        if math.isinf(consistency) or (interval.low is not None and interval.low > _FACTOR):
            how = f"{consistency:.3g}× less between ranks than within ranks"
            if math.isinf(consistency):
                how = "within ranks, and not at all between them"
            return f"gradients differ {how}: do all ranks get the same data? Check that the sampler knows the rank"
        if interval.high is not None and interval.high < 1 / _FACTOR:
            return (
                f"gradients differ {1 / max(consistency, 1e-12):.3g}× more between ranks than within ranks: do several "
                "micro-batches of a rank get the same data, or do ranks see different kinds of data?"
            )
        return None

    def state_dict(self) -> dict[str, Any]:
        """Everything that `load_state_dict` needs, as JSON values."""
        return {name: average.state_dict() for name, average in self._of.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        for name, average in self._of.items():
            average.load_state_dict(state[name])
