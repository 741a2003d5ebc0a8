"""Are pieces, examples and ranks independent? A few numbers of each window, their averages, and a test on each.

Independent pieces could come in any order, and so could independent rows of a batch, whatever the weights, the loss and
the learning rate. So neighbours must be no more alike than others, nor rows in certain places of the batch.

Two kinds of data or of loss, each with a backward of its own, have gradients of their own size: the first piece of each
window has the larger one nearly always, or the smaller. More pieces that take turns are less alike as neighbours. Of
unequal pieces, the larger averages more noise away, so its gradient, over its weight, is not the larger one, unless
losses are sums, and their weights were not passed.

Two ranks see the same data where they have the same gradient while others differ.

Rows that share samples in places drawn anew for each batch are not seen in their order, but where a window has several
pieces: these then differ more than single examples say. Rows that a loss compares with each other have gradients that
sum up to less than independent ones can: |G|² comes out below 0.

The same averages count the windows whose gradient was changed by more than a scale.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Set

from sonde.batch_size.stats.comparisons import Numbers, ProjectedWindow
from sonde.batch_size.stats.noise_scale import RatioAverage
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
_BEFORE_SIGNAL = 30
"""Windows before |G|² is first compared with 0, or with other windows: fewer do not show their own scatter."""
_BELOW_ZERO = 5.0
"""Standard errors by which |G|² must lie below 0. Where it is 0 in truth, the lowest of 1,000 judgements reaches 4.7 in
2 % of runs, whatever the distribution of the gradients."""
_APART = 16
"""Windows between two that are compared. Several steps may be taken on the same data, but hardly so many."""
_LEAST_APART = 0.5
"""Smallest excess of the product of two windows that matters, over the noise of one: beyond what windows have in common
that each hold half of the data set."""
_TWINS = 0.9
"""Share of windows in which each row is there several times, beyond which that is no accident."""
_SIZES, _LEAST_SIZES, _NEIGHBOURS = 128, 32, 8
"""Windows whose sizes are remembered, the fewest that are judged, and neighbours on each side that a size is held
against, so that a trend does not count."""
_PERIODS = (2, 3, 4, 5, 8, 16)
_FEWEST_OF_PHASE = 6
_OTHER_SIZE = math.log(1.25)
"""Least difference of the log of squared gradients between windows that take turns."""
_BEFORE_EXCESS = 10
"""Windows before pieces are first held against examples."""
_LEAST_EXCESS = 0.05
"""Smallest (p − e)/(p + e) that matters, p and e being tr Σ from pieces and from examples: p is 1.1 times e."""
_FEWEST_REPEATS, _LEAST_SHARE = 4.5, 0.2
"""Windows, weighted by age, in which two ranks were the same, before the first judgement; and their share. Sampling
with replacement, or the seam of two epochs, repeats data now and then."""
_ACCIDENTS, _SHARE_OF_ACCIDENTS = 1.5, 0.02
"""Changed windows, weighted by age, that are taken for accidents and raise no doubt; and their share."""
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
_ROWS = {
    "opposite": "the first row of a batch and the last one, the second and the last but one, and so on",
    "half": "rows half a batch apart",
    "next": "neighbouring rows of a batch",
}
_SAME_DATA = ("differences", "consistency")
"""What shows the same data. Its memory is not lengthened."""
_AVERAGED = (
    *("place", "units", "neighbours", *_ROWS, "twins", "excess", "signal", "apart", "ranks", "changed", *_SAME_DATA),
)


class Dependence(Stateful):
    """Averages over windows what speaks against independent data, and against trust in the averages.

    Args:
        memory: of the averages, in measured windows.
    """

    STATE = ("_of", "_why_changed", "_in_doubt", "_pair")

    def __init__(self, memory: float) -> None:
        longer = max(memory, _MEMORY)
        self._of = {name: RatioAverage(memory if name in _SAME_DATA else longer) for name in _AVERAGED}
        self._why_changed = self._pair = ""
        self._in_doubt: list[list[int]] = []
        """The changed parameters of each changed window, none of which has been seen sound since."""
        self._same: frozenset[tuple[int, int]] = frozenset()
        """The ranks that had the same gradient in the last window."""
        self._last_windows: deque[ProjectedWindow] = deque(maxlen=_APART)
        self._sizes: deque[tuple[int, float]] = deque(maxlen=_SIZES)
        """Of the last windows: the number in training, and the log of the pieces' mean square."""

    def add(self, numbers: Numbers) -> None:
        """Take numbers of a window, but those that are not finite."""
        for name, (x, y) in numbers.items():
            if math.isfinite(x) and math.isfinite(y):
                self._of[name].update(x, y)

    def see_change(self, why: str | None, changed: Set[int] = frozenset(), *, sound: Set[int] = frozenset()) -> None:
        """Take a window whose gradient was compared with its pieces.

        Each window compares few elements of few parameters. So there is doubt until one that was changed is seen sound:
        then the change was an accident, also to others, whose turn comes later. And there is doubt while several of the
        last windows were changed: others likely were too, unseen.

        Args:
            why: how it was changed; None if it was only scaled.
            changed: the parameters that were, by index.
            sound: the others that were compared.
        """
        self._in_doubt = [each for each in self._in_doubt if sound.isdisjoint(each)]
        if changed and self._of["changed"].windows:  # in the first window, gradients may be from before attach
            self._in_doubt = [each for each in self._in_doubt if changed.isdisjoint(each)] + [sorted(changed)]
        self._why_changed = self._why_changed if why is None else why
        self._of["changed"].update(float(why is not None))

    def see_ranks(self, same: frozenset[tuple[int, int]]) -> None:
        """Take the pairs of ranks that had the same gradient in a window.

        Among many ranks some two may be the same by chance, but not the same two in two windows.
        """
        lasting, self._same = sorted(same & self._same), same
        if lasting:
            self._pair = f"{lasting[0][0]} and {lasting[0][1]}"
        self._of["ranks"].update(float(bool(lasting)))

    def see_window(self, window: ProjectedWindow) -> None:
        """Take a window's projections.

        The product of two windows far apart has the expectation ⟨G₁, G₂⟩, and so has |G|² from the examples of either,
        if they are independent. Training can only make the product smaller: G moves on.
        """
        if len(self._last_windows) == _APART:
            before = self._last_windows[0]
            excess = float(window.mean @ before.mean) - (window.grad_sq + before.grad_sq) / 2
            if noise := (window.noise + before.noise) / 2:
                self.add({"apart": (excess / noise, 1.0)})
        self._last_windows.append(window)

    def see_size(self, number: int, small: float) -> None:
        """Take the mean square of a window's pieces, or examples, and its number in training."""
        if 0 < small < math.inf:
            self._sizes.append((number, math.log(small)))

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
        found = {
            "changed": self._changed(),
            "dependent_pieces": self._dependent_pieces(),
            "dependent_examples": self._dependent_examples(),
            "negative_signal": self._negative_signal(),
            "same_data": self._same_data() or self._same_ranks(),
            "phases": self._phases(),
        }
        return {name: message for name, message in found.items() if message}

    def _is_often(self, name: str, fewest: float, share: float) -> bool:
        """Whether something was seen in so many windows, weighted by age, and in such a share of them."""
        seen = self._of[name]
        return seen.x * seen.weight > fewest and seen.x > share

    def _changed(self) -> str | None:
        if not self._is_often("changed", _ACCIDENTS, _SHARE_OF_ACCIDENTS):
            seen = f"{self._why_changed}; no unchanged gradient of these parameters has been seen since"
            return seen if self._in_doubt else None
        n = self._of["changed"].x * self._of["changed"].weight
        return f"{self._why_changed}; {n:.0f} of the last windows were changed, and others may have been changed unseen"

    def _same_ranks(self) -> str | None:
        if not self._is_often("ranks", _FEWEST_REPEATS, _LEAST_SHARE):
            return None
        return (
            f"two ranks ({self._pair}) had the same gradient in {100 * self._of['ranks'].x:.0f} % of the windows: do "
            "they get the same data? Check that the sampler knows the rank"
        )

    def _lean(self, name: str) -> int:
        """The sign of a score; 0 where chance explains it."""
        score = self._of[name]
        is_chance = score.windows < _AFTER or abs(score.standard_errors) < _STANDARD_ERRORS
        if is_chance or abs(score.x) < _LEAST_SCORE * score.y:
            return 0
        return 1 if score.x > 0 else -1

    def _dependent_pieces(self) -> str | None:
        return next((message for (name, sign), message in _PIECES.items() if self._lean(name) == sign), None)

    def _dependent_examples(self) -> str | None:
        leans = {name: self._lean(name) for name in _ROWS}
        clearest = max(_ROWS, key=lambda name: abs(self._of[name].standard_errors))
        if leans[clearest] < 0:
            return (
                f"{_ROWS[clearest]} have opposed gradients, so the rows of a batch depend on each other, as the two "
                "rows of a pair do: count pairs by units_per_piece=, and accumulate over 2 or more micro-batches"
            )
        found = [f"{rows} are more alike than chance allows" for name, rows in _ROWS.items() if leans[name] > 0]
        # Few rows that are sorted, by length for one, may be independent. Their neighbours are alike, and distant rows
        # differ the more: together, scores are positive only where rows share samples.
        near, opposite, half = (self._of[name].standard_errors for name in ("next", "opposite", "half"))
        if (near + 2 * opposite + half) / math.sqrt(6) < _SURE:
            found = []
        excess = self._of["excess"]
        is_certain = excess.x > max(_LEAST_EXCESS, _STANDARD_ERRORS * excess.error_of_x)
        if excess.windows >= _BEFORE_EXCESS and is_certain and excess.x < 1:
            times = (1 + excess.x) / (1 - excess.x)
            found.insert(0, f"pieces have {times:.2g} times the noise that single examples say")
        twins, apart = self._of["twins"], self._of["apart"]
        if twins.windows >= _AFTER and twins.x > _TWINS:
            found = ["each row of a batch is there several times"]
        if apart.windows >= _BEFORE_SIGNAL and apart.x > max(_LEAST_APART, _STANDARD_ERRORS * apart.error_of_x):
            found.append("batches have more in common than their examples")
        if not found:
            return None
        return (
            f"the examples of a batch are not independent: {found[0]}. If rows share samples, as after mixup, cutmix "
            "or repeated augmentation, read no single examples: accumulate gradients over 2 or more micro-batches that "
            "share none, or train on 2 or more ranks, with per_example='auto'. If batches come in a fixed order of "
            "classes, do the same, or draw their rows at random"
        )

    def _negative_signal(self) -> str | None:
        """|G|² is the square of a mean. Independent examples or pieces estimate it without bias, so never below 0."""
        signal = self._of["signal"]
        if signal.windows < _BEFORE_SIGNAL or signal.x > -_BELOW_ZERO * signal.error_of_x:
            return None
        return (
            f"|G|² is {-signal.x / signal.error_of_x:.0f} standard errors below 0, which independent units cannot "
            "give. The loss compares the rows of a batch with each other, as contrastive losses and pairs do, or "
            "pieces complement each other. Accumulate gradients over 2 or more micro-batches, with rows of their own"
        )

    def _phases(self) -> str | None:
        """Every second, third, … window may have a loss of its own, such as a penalty that is taken in turns."""
        numbers, sizes = [number for number, _ in self._sizes], [size for _, size in self._sizes]
        if len(sizes) < _LEAST_SIZES:
            return None
        near = (sizes[max(i - _NEIGHBOURS, 0) : i + _NEIGHBOURS + 1] for i in range(len(sizes)))
        apart = [size - statistics.fmean(each) for size, each in zip(sizes, near, strict=True)]
        error = statistics.stdev(apart)
        found: list[tuple[float, int, float]] = []
        for period in _PERIODS:
            for phase in range(period):
                own = [x for number, x in zip(numbers, apart, strict=True) if number % period == phase]
                rest = [x for number, x in zip(numbers, apart, strict=True) if number % period != phase]
                if min(len(own), len(rest)) >= _FEWEST_OF_PHASE:
                    difference = statistics.fmean(own) - statistics.fmean(rest)
                    of_chance = error * math.sqrt(1 / len(own) + 1 / len(rest))
                    found.append((abs(difference) / max(of_chance, 1e-9), period, difference))
        score, period, difference = max(found, default=(0.0, 0, 0.0))
        if score < _STANDARD_ERRORS or abs(difference) < _OTHER_SIZE:
            return None
        size = f"{math.exp(abs(difference) / 2):.2g} times as {'large' if difference > 0 else 'small'} as the others"
        return (
            f"one window in {period} has gradients {size}, so windows are of several kinds, and no number is of all: "
            "losses, penalties or optimizers that take turns. Take all in each step, or measure a checkpoint with one "
            "loss by sonde.measure"
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
