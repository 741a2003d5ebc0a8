"""Chooses what a window is solved from: its pieces, or its single examples."""

from __future__ import annotations

from dataclasses import replace

from torch import nn

from sonde.batch_size.found_model import FoundModel
from sonde.batch_size.log import MeasuredWindow
from sonde.batch_size.per_example.example_window import NOTHING_COVERED, ExampleWindow
from sonde.batch_size.per_example.norms import PerExampleNorms
from sonde.batch_size.stats.reading import ENOUGH_COVERED, CoveredPart
from sonde.batch_size.stats.window_row import WITHOUT_EXAMPLES, Drop, WindowRow
from sonde.batch_size.window_clock import OwnTime
from sonde.parallel.process_groups import holds_on_all

_IN_A_ROW = 3
"""Windows in a row that must be of the other kind before it changes what is read: the last one of an epoch may be."""
_MOST_NAMED = 3
"""Parameters that one message names."""
_LEAST_STAGING_BYTES = 2**16
_OF_EXAMPLES = (
    "the gradient of each example is read; rows that share samples, as after mixup, or that are not drawn at random, "
    "as without shuffling, would give a wrong number: accumulate over 2 micro-batches, and shuffle"
)


class Mechanism:
    """Decides whether windows are solved from their pieces or from their single examples, and has examples read.

    The rule: a window of a single piece shows noise by its examples alone, so they are read. The pieces of a window of
    several are compared with each other. The first window shows which of the two a run has, so its examples are read.
    With several data-parallel ranks, there are always several pieces. `per_example="always"` reads examples in every
    measured window.

    Args:
        model: as the user calls it.
        found: what attach has found of the model.
        own: the probe's time.

    Raises:
        ValueError: if examples are asked for and cannot be read.
    """

    def __init__(self, model: nn.Module, found: FoundModel, own: OwnTime) -> None:
        wrapper, options = found.wrapper, found.options
        self._names = list(wrapper.parameters)
        self._is_asked = options.per_example == "always"
        self.examples: ExampleWindow | None = None
        """Reads the examples; None where that is not possible, or not wanted."""
        self.why_not = "per_example='never' leaves them out" if options.per_example == "never" else ""
        """Why examples are not read where a window is a single piece, for people; empty where they may be."""
        if self._is_asked or (options.per_example == "auto" and wrapper.n_ranks == 1):
            try:
                self.examples = _example_window(model, found)
                self.examples.norms.own = own
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
        self._is_covered = [True] * len(self._names)
        """Which parameters are, in the last window that has arrived."""
        self._has_chosen, self._n_otherwise = False, 0
        self._news: list[tuple[str, str]] = []

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
            self.reads_examples, self.why_not = False, str(error)
            self._news.append(("", f"single examples are not read: {error}"))

    def close(self) -> None:
        """Remove every hook."""
        if self.examples is not None and self.examples.norms.is_open:
            self.examples.norms.close()

    # Once their numbers are on the host.

    def row_of(self, window: MeasuredWindow) -> WindowRow:
        """The row of a window, with its examples if it is to be solved from them."""
        row = window.row
        if not window.examples or self.examples is None:
            return _explained(row, self.why_not)
        sums, why_not, self._is_covered = self.examples.read(window.examples, row)
        self._choose(row.n_pieces)
        if row.n_pieces >= 2 and not self.reads_examples:
            return row
        if sums is not None:
            return replace(row, examples=sums)
        if row.n_pieces >= 2 and not self._is_asked and self.covered.coverage is None:
            return row  # both mechanisms speak of the whole model
        if why_not:  # with the first reason that the host knows of a parameter
            reason = next(iter(self.examples.reasons.values()), "")
            why_not = why_not if not reason else reason if why_not == NOTHING_COVERED else f"{why_not}: {reason}"
        why = why_not or self.why_not
        if row.n_pieces < 2:
            return _explained(row, why)
        message = f"the window's single examples could not be used: {why or 'they were not read'}"
        return row if row.problems else replace(row, problems=[Drop("no_examples", message)])

    def _choose(self, n_pieces: int) -> None:
        """Let the first window choose between pieces and examples, and three in a row of the other kind after it."""
        if self.why_not or not n_pieces:
            return
        needs_examples = self._is_asked or n_pieces == 1
        self._n_otherwise = self._n_otherwise + 1 if needs_examples != self.reads_examples else 0
        if self._has_chosen and self._n_otherwise < _IN_A_ROW:
            return
        if needs_examples:
            why = "" if self._is_asked else "windows are single pieces now, so "
            self._news.append(("", why + _OF_EXAMPLES))
        elif self._has_chosen:
            self._news.append(("", "windows have several pieces now, which are compared in place of single examples"))
        self._has_chosen, self.reads_examples, self._n_otherwise = True, needs_examples, 0

    def averaged(self, row: WindowRow) -> None:
        """Note the row of a window that was averaged."""
        if (examples := row.examples) is None:
            return
        self.covered.update(examples.n_covered, examples.big, row.big)
        coverage = self.covered.coverage
        if coverage is not None and coverage.part < ENOUGH_COVERED:
            self._news.append(("not_covered", f"the noise scale is {coverage}; not covered: {self._missing()}"))

    def _missing(self) -> str:
        """The first parameters that are not covered, and why."""
        reasons = {} if self.examples is None else self.examples.reasons
        missing = [name for name, is_covered in zip(self._names, self._is_covered, strict=True) if not is_covered]
        named = [f"{name} ({reasons.get(name, 'it has a use that no rule has seen')})" for name in missing]
        more = f" and {len(missing) - _MOST_NAMED} more" if len(missing) > _MOST_NAMED else ""
        return ", ".join(named[:_MOST_NAMED]) + more


def _explained(row: WindowRow, why_not: str) -> WindowRow:
    """The row of a window; if it has a single piece, with the reason why its examples are not used."""
    is_one_unit = row.weight * row.weight < 1.5 * row.sq_weight_over_units  # there is nothing to tell apart
    if row.n_pieces != 1 or row.problems or not why_not or is_one_unit:
        return row
    message = f"the window held a single piece, and its examples cannot be told apart: {why_not}. {WITHOUT_EXAMPLES}"
    return replace(row, problems=[Drop("single_piece", message)])


def _example_window(model: nn.Module, found: FoundModel) -> ExampleWindow:
    """What reads single examples.

    Raises:
        ValueError: with the reason why they cannot be read.
    """
    wrapper, options = found.wrapper, found.options
    if options.metrics != ("euclidean",):
        raise ValueError(f"metric={options.metric!r} needs whole gradients: use metric='euclidean'")
    shares_pieces = wrapper.data.n_sharing > 1 or wrapper.sequence_group is not None
    if wrapper.pp_mesh is not None or shares_pieces or found.classes:
        raise ValueError(f"a model cut by {wrapper.name} calls its layers with parts of examples or of parameters")
    norms = PerExampleNorms(
        model,
        parameters=wrapper.parameters,
        leaves=wrapper.leaves,
        rules=options.rules,
        staging_bytes=max(options.staging_bytes(wrapper.leaves[0].device), _LEAST_STAGING_BYTES),
    )
    if len(norms.without_rule) == len(wrapper.parameters):
        raise ValueError("no layer of the model has a rule for them: pass rules= to attach, see sonde.PerExampleNorms")
    window = ExampleWindow(norms, found.group_names, wrapper.leaves[0].device, is_sharded=wrapper.mesh is not None)
    norms.open()
    norms.close()
    return window
