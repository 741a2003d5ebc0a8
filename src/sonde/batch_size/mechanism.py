"""Chooses what a window is solved from, its pieces or its single examples, and adds the examples up.

Each example is a piece of one unit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from sonde.batch_size.hook_failures import log_failure
from sonde.batch_size.log import MeasuredWindow
from sonde.batch_size.per_example.norms import PerExampleNorms
from sonde.batch_size.setup import NoiseScaleOptions
from sonde.batch_size.stats.dependence import N_SCORES, order_scores, scores_of_examples
from sonde.batch_size.stats.reading import ENOUGH_COVERED, CoveredPart
from sonde.batch_size.stats.window_row import WITHOUT_EXAMPLES, Drop, ExampleSums, WindowRow
from sonde.batch_size.taps.window_sums import Named, PieceCounts, WindowSums, as_vector
from sonde.batch_size.window_clock import OwnTime
from sonde.parallel.devices import to_device, widened, zero_sums
from sonde.parallel.process_groups import holds_on_all
from sonde.parallel.wrappers import Wrapper
from sonde.wording import plural

_IN_A_ROW = 3
"""Windows in a row that must be of the other kind before it changes what is read: the last one of an epoch may be."""
_MOST_NAMED = 3
"""Parameters that one message names."""
_LEAST_STAGING_BYTES = 2**16
_OF_EXAMPLES = (
    "the gradient of each example is read; rows that share samples, as after mixup, or that are not drawn at random, "
    "as without shuffling, would give a wrong number: accumulate over 2 micro-batches, and shuffle"
)
_NOTHING_COVERED = (
    "no parameter was covered: what layers were called with does not add up to the gradients, as under torch.compile, "
    "with a penalty on weights in the loss, or where 16 bits round too much"
)
"""Why a window's examples cannot be used, where the host knows no reason for a single parameter."""
_SEVERAL_BACKWARDS = (
    "a piece had several backwards; from the next piece on, each example's gradients are summed before they are "
    "squared. If the backwards are of different examples, give each a piece of its own"
)
_MOST_BYTES = 64 * 2**20
"""Memory for the squared norms of one piece, of every example and parameter."""
_COUNTS = ("sq_weight", "n_examples", "n_pieces", "n_open", "n_closed", "next", "opposite", "half", "n_scores")
"""Σ w_b²; examples; pieces whose examples were read; ranks that read examples, and those that do not; and what
`order_scores` gives."""


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
        group_names: the group of each parameter.
        own: the probe's time.

    Raises:
        ValueError: if examples are asked for and cannot be read.
    """

    def __init__(
        self,
        model: nn.Module,
        wrapper: Wrapper,
        options: NoiseScaleOptions,
        group_names: Sequence[str],
        own: OwnTime,
    ) -> None:
        self._names = list(wrapper.parameters)
        self._is_asked = options.per_example == "always"
        self.examples: ExampleWindow | None = None
        """Reads the examples; None where that is not possible, or not wanted."""
        self.why_not = "per_example='never' leaves them out" if options.per_example == "never" else ""
        """Why examples are not read where a window is a single piece, for people; empty where they may be."""
        if self._is_asked or (options.per_example == "auto" and wrapper.n_ranks == 1):
            try:
                self.examples = _example_window(model, wrapper, options, group_names)
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
        if self.examples is not None and self.examples.is_open:
            self.examples.close()

    # Once their numbers are on the host.

    def row_of(self, window: MeasuredWindow) -> WindowRow:
        """The row of a window, with its examples if it is to be solved from them."""
        row = window.row
        if not window.examples or self.examples is None:
            return _explained(row, self.why_not)
        sums, why_not, _ = self.examples.read(window.examples, row)
        self._choose(row.n_pieces)
        if row.n_pieces >= 2 and not self.reads_examples:
            return row
        if sums is not None:
            return replace(row, examples=sums)
        if row.n_pieces >= 2 and not self._is_asked and self.covered.coverage is None:
            return row  # both mechanisms speak of the whole model
        why = self._in_words(why_not) if why_not else self.why_not
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

    def saw(self, window: MeasuredWindow, *, is_sound: bool, scale: float | None) -> None:
        """Note a window that was solved or dropped.

        Args:
            window: its numbers.
            is_sound: whether it was averaged.
            scale: κ of the last sound window.
        """
        if self.examples is None or not self.reads_examples or not is_sound or scale is None:
            return
        row = window.row
        sums, _, covered = self.examples.read(window.examples, row)
        if sums is None:
            return
        self.covered.update(sums.n_covered, sums.big, row.big)
        coverage = self.covered.coverage
        if coverage is not None and coverage.part < ENOUGH_COVERED:
            self._news.append(("not_covered", f"the noise scale is {coverage}; not covered: {self._missing(covered)}"))

    def _missing(self, covered: Sequence[bool]) -> str:
        """The first parameters that are not covered, and why."""
        assert self.examples is not None
        missing = [name for name, is_covered in zip(self._names, covered, strict=True) if not is_covered]
        reasons = self.examples.reasons
        named = [f"{name} ({reasons.get(name, 'it has a use that no rule has seen')})" for name in missing]
        more = f" and {len(missing) - _MOST_NAMED} more" if len(missing) > _MOST_NAMED else ""
        return ", ".join(named[:_MOST_NAMED]) + more

    def _in_words(self, why_not: str) -> str:
        """Why the examples of a window cannot be used, with the first reason that the host knows of a parameter."""
        assert self.examples is not None
        if not (reason := next(iter(self.examples.reasons.values()), "")):
            return why_not
        return reason if why_not == _NOTHING_COVERED else f"{why_not}: {reason}"


def _explained(row: WindowRow, why_not: str) -> WindowRow:
    """The row of a window; if it has a single piece, with the reason why its examples are not used."""
    is_one_unit = row.weight * row.weight < 1.5 * row.sq_weight_over_units  # there is nothing to tell apart
    if row.n_pieces != 1 or row.problems or not why_not or is_one_unit:
        return row
    message = f"the window held a single piece, and its examples cannot be told apart: {why_not}. {WITHOUT_EXAMPLES}"
    return replace(row, problems=[Drop("single_piece", message)])


def _example_window(
    model: nn.Module, wrapper: Wrapper, options: NoiseScaleOptions, group_names: Sequence[str]
) -> ExampleWindow:
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
    norms = PerExampleNorms(
        model,
        parameters=wrapper.parameters,
        leaves=wrapper.leaves,
        rules=options.rules,
        staging_bytes=max(options.staging_bytes(wrapper.leaves[0].device), _LEAST_STAGING_BYTES),
    )
    if len(norms.without_rule) == len(wrapper.parameters):
        raise ValueError("no layer of the model has a rule for them: pass rules= to attach, see sonde.PerExampleNorms")
    window = ExampleWindow(norms, group_names, wrapper.leaves[0].device, is_sharded=wrapper.mesh is not None)
    window.open()
    window.close()
    return window


class ExampleWindow:
    """Adds up |h_b|²/w_b of each example of a window; no value is read on the host before its numbers arrive.

    Examples are the units of a piece, and the rows of what the model's layers are called with. A piece whose units are
    not the rows cannot be used, and says so.

    Args:
        norms: of the model's examples.
        group_names: the group of each parameter, [parameters].
        device: of the parameters.
        is_sharded: whether ranks hold parts of `.grad`, whose squares are known only after the sum over ranks.
    """

    def __init__(
        self, norms: PerExampleNorms, group_names: Sequence[str], device: torch.device, *, is_sharded: bool
    ) -> None:
        self.norms, self._is_sharded, self._device = norms, is_sharded, device
        self._n_parameters = len(group_names)
        places = {name: i for i, name in enumerate(dict.fromkeys(group_names))}
        self._group_index = torch.tensor([places[name] for name in group_names], device="cpu")
        self.reasons: dict[str, str] = {}
        """Why parameters, by name, are not covered, as far as the host knows; "" holds a reason for all of them."""
        self._reset()

    def _reset(self) -> None:
        self._small = zero_sums(self._n_parameters, device=self._device)
        self._sq_weight = self._small.new_zeros(())
        self._scores = self._small.new_zeros(N_SCORES)
        self._n_examples = self._n_pieces = 0

    @property
    def is_open(self) -> bool:
        """Whether examples are read now."""
        return self.norms.is_open

    def open(self) -> None:
        """Read the examples of the pieces from now on.

        Raises:
            ValueError: see `PerExampleNorms.open`.
        """
        if self.norms.is_open and self.norms.released:
            self.norms.close()
        if not self.norms.is_open:
            self.norms.open()

    def close(self) -> None:
        """Read nothing until `open`; keep no hook."""
        self.norms.close()

    def begin_piece(self) -> None:
        """From here until `end_piece` all backwards are one piece: those before it, outside pieces, do not count."""
        if self.norms.is_open:
            self.norms.forget_backwards()

    def end_piece(self, counts: PieceCounts, unscale: Tensor | None) -> None:
        """Add the examples of the piece that ends here.

        Args:
            counts: of the piece.
            unscale: the factor that undoes a GradScaler's scale; None without one.
        """
        if not self.norms.is_open:
            return
        # Rows that count for nothing, as padding may, have a weight of 0, and are no units.
        units = counts.units if counts.unit_weights is None else len(counts.unit_weights)
        if why_not := self._why_not_rows(units):
            self.reasons[""] = why_not
            self.norms.discard()
            return
        if self.norms.had_unexpected_backwards:  # taken to be of the same examples
            self.reasons[""] = _SEVERAL_BACKWARDS
            self.norms.discard()
            self.norms.add_backwards_up()
            return
        n = int(units)
        try:
            squares = self.norms.take(n)
        except Exception as error:  # a bug, a mistake in a rule of the user's, or no memory left: training goes on
            log_failure(error)
            self.reasons[""] = f"reading them failed ({type(error).__name__}: {error})"
            self.norms.discard()
            return
        self.reasons.pop("", None)
        self.reasons |= squares.reasons
        weights = _weights_of_examples(counts, n, self._small)
        over_weight = torch.where(weights > 0, squares.sq_norms / weights, squares.sq_norms * 0.0).sum(1)
        self._small += over_weight if unscale is None else over_weight * unscale.square()
        self._sq_weight += weights.square().sum()
        of_gradients = torch.where(weights[:, None] > 0, squares.projections / weights[:, None], 0.0)
        self._scores += order_scores(of_gradients)
        self._n_examples += n
        self._n_pieces += 1

    def _why_not_rows(self, units: float | Tensor) -> str:
        """Why the units of a piece cannot be the rows that layers are called with, in words."""
        if isinstance(units, Tensor) or not float(units).is_integer():
            return "the number of units of a piece is no whole number that the host knows: pass an int"
        if 8 * units * self._n_parameters > _MOST_BYTES:
            examples, parameters = plural(round(units), "example"), plural(self._n_parameters, "parameter")
            return f"the norms of {examples} in {parameters} take too much memory: is the unit a row?"
        return ""

    def discard_piece(self) -> None:
        """Forget the present piece."""
        if self.norms.is_open:
            self.norms.discard()

    def end_window(self, sums: WindowSums, sq_norms_big: Tensor | None) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """The numbers of the window by name; starts the next one.

        Every rank sends all of its parameters, covered or not: which of them count is known once all ranks have said
        what they cover.

        Args:
            sums: of the window's pieces, not taken yet.
            sq_norms_big: |F|² per parameter, of a sharded model this rank's share of it, [parameters]; None if examples
                were not read.

        Returns:
            The numbers to be summed over ranks, and this rank's own.
        """
        is_open = sq_norms_big is not None
        if sq_norms_big is None:
            sq_norms_big = torch.zeros_like(self._small)
            if self._n_pieces:  # read before the hooks were taken off
                self._reset()
        is_finite = torch.isfinite(self._small)
        counts = (self._sq_weight, self._n_examples, self._n_pieces, float(is_open), float(not is_open))
        of_ranks = {
            "small": self._small.where(is_finite, 0.0),
            "of_pieces": sums.sq_norms_over_weight,
            "covered": widened(is_finite),
            "counts": as_vector([*counts, *self._scores.unbind()], self._device),
        }
        own: dict[str, Tensor] = {}
        (of_ranks if self._is_sharded else own)["big"] = sq_norms_big
        self._reset()
        return of_ranks, own

    def read(self, sums: Named, row: WindowRow) -> tuple[ExampleSums | None, str, list[bool]]:
        """What the examples of a window gave, once its numbers are on the host.

        Args:
            sums: by name, summed over ranks; on the CPU.
            row: of the window's pieces.

        Returns:
            Their sums, None if they cannot be used; the reason, empty where examples were not read; and which
            parameters are covered on all ranks that read examples, [parameters].
        """
        counts = dict(zip(_COUNTS, sums["counts"].tolist(), strict=True))
        n_read, n_open = round(counts["n_pieces"]), round(counts["n_open"])
        is_covered = sums["covered"] >= n_open - 0.5
        why_not = ""
        if n_open and round(counts["n_closed"]):
            why_not = "another rank does not read them"
        elif n_open and n_read != row.n_pieces:
            why_not = f"examples were read in {n_read} of {plural(row.n_pieces, 'piece')} only"
        elif n_open and not is_covered.any():
            why_not = _NOTHING_COVERED
        if why_not or not n_read:
            return None, why_not, is_covered.tolist()
        of_examples = ExampleSums(
            sq_norm_over_weight=self._per_group(sums["small"], is_covered),
            weight=row.weight,
            weight_over_units=row.weight,  # n_b = 1 throughout
            sq_weight_over_units=counts["sq_weight"],
            n_pieces=round(counts["n_examples"]),
            of_pieces=self._per_group(sums["of_pieces"], is_covered),
            sq_norm_big=self._per_group(sums["big"], is_covered),
            n_covered=int(is_covered.sum()),
            scores=scores_of_examples(*(counts[name] for name in _COUNTS[-N_SCORES:])),
        )
        return of_examples, "", is_covered.tolist()

    def _per_group(self, of_parameters: Tensor, is_covered: Tensor) -> Tensor:
        """The sums over the covered parameters of each group, on the host: [groups]."""
        values = of_parameters.double().where(is_covered, 0.0)
        return values.new_zeros(int(self._group_index.max()) + 1).index_add_(0, self._group_index, values)


def _weights_of_examples(counts: PieceCounts, n: int, like: Tensor) -> Tensor:
    """w_b, each example's part of its piece's weight: [examples]."""
    if counts.unit_weights is None:
        return like.new_ones(n) / n * counts.weight
    own = counts.unit_weights
    own = widened(to_device(own.detach(), like.device)) if isinstance(own, Tensor) else as_vector(own, like.device)
    return own / own.sum() * counts.weight
