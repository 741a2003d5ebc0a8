"""Chooses what a window is solved from: its pieces or its single examples."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import nn

from sonde.batch_size.log import MeasuredWindow
from sonde.batch_size.per_example.window import NOTHING_COVERED, SEVERAL_BACKWARDS, ExampleWindow
from sonde.batch_size.setup import NoiseScaleOptions
from sonde.batch_size.stats.reading import ENOUGH_COVERED, CoveredPart
from sonde.batch_size.stats.window_row import WITHOUT_EXAMPLES, Drop, WindowRow
from sonde.batch_size.window_clock import OwnTime
from sonde.parallel.same_on_ranks import holds_on_all
from sonde.parallel.wrappers import Wrapper

_IN_A_ROW = 3
"""Windows in a row that must say the same before the mechanism changes, or examples are given up."""
_MOST_NAMED = 3
"""Parameters that one message names."""
_SHARE_NO_SAMPLES = (
    "rows that share samples, as after mixup, or that are not drawn at random, as without shuffling, would give a "
    "wrong number: accumulate over 2 micro-batches, and shuffle"
)


class Mechanism:
    """Decides whether windows are solved from their pieces or from their single examples, and has examples read.

    The rule: a window of a single piece shows noise by its examples alone, so they are read. The pieces of a window of
    several are compared with each other. The first window shows which of the two a run has, so its examples are read.
    With several data-parallel ranks, there are always several pieces. `per_example="always"` reads examples in every
    measured window.

    Args:
        model: as the user calls it.
        wrapper: of the model.
        options: of the probe.
        own: its time.

    Raises:
        ValueError: if examples are asked for and cannot be read.
    """

    def __init__(self, model: nn.Module, wrapper: Wrapper, options: NoiseScaleOptions, own: OwnTime) -> None:
        self._names = list(wrapper.parameters)
        self._is_asked = options.per_example == "always"
        self.examples: ExampleWindow | None = None
        """Reads the examples; None where that is not possible, or not wanted."""
        self.why_not = "per_example='never' leaves them out" if options.per_example == "never" else ""
        """Why examples are not read where a window is a single piece, for people; empty where they may be."""
        if self._is_asked or (options.per_example == "auto" and wrapper.n_ranks == 1):
            try:
                self.examples = _example_window(model, wrapper, options, own)
            except ValueError as error:
                self.why_not = str(error)
            can_read = self.examples is not None  # all or none: ranks must send vectors of one length
            if not holds_on_all(wrapper.group, wrapper.leaves[0].device, here=can_read) and can_read:
                self.examples, self.why_not = None, "another rank cannot read them"
        if self._is_asked and self.examples is None:
            raise ValueError(f"per_example='always' needs the gradients of single examples, but {self.why_not}")
        self.reads_examples = self.examples is not None
        """Whether examples are read in measured windows, besides pieces, which leaf hooks must read then."""
        self.covered = CoveredPart(len(self._names))
        """What the covered parameters are of the whole model, where windows are solved from examples."""
        self._has_chosen = False
        self._n_failures = self._n_otherwise = 0
        self._news: list[tuple[str, str]] = []
        self._said_of: tuple[bool, ...] = ()

    def take_news(self) -> list[tuple[str, str]]:
        """What has changed since the last call: the name of an alert, or nothing, and a message."""
        news, self._news = self._news, []
        return news

    # While windows are trained.

    def begin_window(self, *, is_measured: bool) -> None:
        """Read examples in the window that begins, or do not.

        Args:
            is_measured: whether anything is read in that window.
        """
        if self.examples is None:
            return
        if not (is_measured and self.reads_examples):
            self.close()
            return
        try:
            self.examples.open()
        except ValueError as error:  # the model has changed since attach
            self._give_up(str(error))

    def close(self) -> None:
        """Remove every hook."""
        if self.examples is not None and self.examples.is_open:
            self.examples.close()

    # Once their numbers are on the host.

    def row_of(self, window: MeasuredWindow) -> WindowRow:
        """The row of a window, with its examples if it is to be solved from them."""
        row, found = window.row, window.examples
        if found is None or self.examples is None:
            return _explained(row, self.why_not)
        self._choose(row.n_pieces, has_examples=found.sums is not None)
        if row.n_pieces >= 2 and not self.reads_examples:
            return row
        if found.sums is not None:
            return replace(row, examples=found.sums)
        if row.n_pieces >= 2 and not self._is_asked and self.covered.coverage is None:
            return row  # both mechanisms speak of the whole model
        why = self._in_words(found.why_not) if found.why_not else self.why_not
        if row.n_pieces < 2:
            return _explained(row, why)
        message = f"the window's single examples could not be used: {why or 'they were not read on all ranks'}"
        return row if row.problems else replace(row, problems=[Drop("no_examples", message)])

    def _choose(self, n_pieces: int, *, has_examples: bool) -> None:
        """Let the first window choose between pieces and examples, and later ones if they say otherwise."""
        if self.why_not or not n_pieces:
            return
        needs_examples = self._is_asked or n_pieces == 1
        if not self._has_chosen:
            self._has_chosen = has_examples or not needs_examples
            self.reads_examples = needs_examples
            if needs_examples and has_examples:
                self._tell_reading("" if self._is_asked else "a window is a single piece, so ")
            return
        self._n_otherwise = self._n_otherwise + 1 if needs_examples != self.reads_examples else 0
        if self._n_otherwise >= _IN_A_ROW:
            self.reads_examples, self._n_otherwise = needs_examples, 0
            if needs_examples:
                self._tell_reading("windows are single pieces now, so ")
            else:
                self._tell("windows have several pieces now, which are compared in place of single examples")

    def _tell_reading(self, why: str) -> None:
        self._tell(f"{why}the gradient of each example is read; {_SHARE_NO_SAMPLES}")

    def saw(self, window: MeasuredWindow, *, is_sound: bool, scale: float | None) -> None:
        """Note a window that was solved or dropped.

        Args:
            window: its numbers.
            is_sound: whether it was averaged.
            scale: κ of the last sound window.
        """
        found, row = window.examples, window.row
        if found is None or not self.reads_examples:
            return
        if found.sums is None:
            # A window that another problem spoils says nothing about its examples.
            self._n_failures += bool(found.why_not) and not row.problems
            if self._n_failures >= _IN_A_ROW and not self._is_asked:
                self._give_up("a window is a single unit" if _is_one_unit(row) else self._in_words(found.why_not))
            return
        self._n_failures = 0
        if is_sound and scale is not None:
            self.covered.update(found.sums.n_covered, found.sums.big, row.big)
            self._say_coverage(found.covered)

    def _give_up(self, reason: str) -> None:
        # The hooks stay until the window ends: another thread may take in windows while backward runs.
        self.reads_examples, self.why_not = False, reason
        self._tell(f"single examples are not read: {reason}")

    def _tell(self, message: str) -> None:
        self._news.append(("", message))

    def _say_coverage(self, covered: Sequence[bool]) -> None:
        """Name the parameters that are not covered, once for each set of them."""
        mask = tuple(covered)
        if self.covered.coverage is None or mask == self._said_of:
            return
        self._said_of = mask
        missing = [name for name, is_covered in zip(self._names, mask, strict=True) if not is_covered]
        assert self.examples is not None
        named = [f"{name} ({self.examples.reasons.get(name, _UNSEEN)})" for name in missing]
        more = f" and {len(missing) - _MOST_NAMED} more" if len(missing) > _MOST_NAMED else ""
        message = f"the noise scale is {self.covered.coverage}; not covered: {', '.join(named[:_MOST_NAMED])}{more}"
        is_enough = self.covered.coverage.part >= ENOUGH_COVERED
        self._news.append(("" if is_enough else "not_covered", message))

    def _in_words(self, why_not: str) -> str:
        """Why the examples of a window cannot be used, with the first reason that the host knows of a parameter."""
        assert self.examples is not None
        if not (reason := next(iter(self.examples.reasons.values()), "")):
            return why_not
        return reason if why_not == NOTHING_COVERED else f"{why_not}: {reason}"


_UNSEEN = "it has a use that no rule has seen"


def _explained(row: WindowRow, why_not: str) -> WindowRow:
    """The row of a window; if it has a single piece, with the reason why its examples are not used."""
    if row.n_pieces != 1 or row.problems or not why_not:
        return row
    if why_not.endswith(SEVERAL_BACKWARDS):
        return replace(row, problems=[Drop("several_backwards", SEVERAL_BACKWARDS)])
    if _is_one_unit(row):  # there is nothing to tell apart
        return row
    message = f"the window held a single piece, and its examples cannot be told apart: {why_not}. {WITHOUT_EXAMPLES}"
    return replace(row, problems=[Drop("single_piece", message)])


def _is_one_unit(row: WindowRow) -> bool:
    return row.weight**2 < 1.5 * row.sq_weight_over_units


def _example_window(model: nn.Module, wrapper: Wrapper, options: NoiseScaleOptions, own: OwnTime) -> ExampleWindow:
    """What reads single examples.

    Raises:
        ValueError: with the reason why they cannot be read.
    """
    if options.metrics != ("euclidean",):
        raise ValueError(f"metric={options.metric!r} needs whole gradients: use metric='euclidean'")
    if options.tap == "comm_hook":
        raise ValueError("tap='comm_hook' reads whole windows: use tap='leaf'")
    shares_pieces = wrapper.data.n_sharing > 1 or wrapper.sequence_group is not None
    if wrapper.pp_mesh is not None or shares_pieces or wrapper.experts is not None:
        raise ValueError(f"a model cut by {wrapper.name} calls its layers with parts of examples or of parameters")
    staging_bytes, is_sharded = options.staging_bytes(wrapper.leaves[0].device), wrapper.mesh is not None
    window = ExampleWindow(
        model,
        wrapper.parameters,
        wrapper.leaves,
        staging_bytes=staging_bytes,
        rules=options.rules,
        is_sharded=is_sharded,
        own=own,
    )
    if len(window.without_rule) == len(wrapper.parameters):
        raise ValueError("no layer of the model has a rule for them: pass rules= to attach, see sonde.PerExampleNorms")
    window.open()
    window.close()
    return window
