"""Adds up the single examples of a window. Each example is a piece of one unit."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from sonde.batch_size.hooks import log_failure
from sonde.batch_size.per_example.covered import N_PROJECTIONS
from sonde.batch_size.per_example.norms import PerExampleNorms
from sonde.batch_size.stats.comparisons import N_SCORES, order_scores, scores_of_examples
from sonde.batch_size.stats.window_row import ExampleSums, WindowRow
from sonde.batch_size.taps.window_sums import Named, WindowSums
from sonde.batch_size.units import PieceCounts, as_vector
from sonde.parallel.devices import to_device, widened, zero_sums
from sonde.wording import plural

NOTHING_COVERED = (
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
_COUNTS = ("sq_weight", "n_examples", "n_pieces", "n_open", "n_closed", "next", "opposite", "half", "twins", "n_scores")
"""Σ w_b²; examples; pieces whose examples were read; ranks that read examples, and those that do not; and what
`order_scores` gives."""


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
        self._projected = self._small.new_zeros(N_PROJECTIONS + 1)
        """Σ h_b in projections and, last, Σ_b |p_b|²/w_b."""
        self._n_examples = self._n_pieces = 0

    def open(self) -> None:
        """Read the examples of the pieces from now on.

        Raises:
            ValueError: see `PerExampleNorms.open`.
        """
        if self.norms.is_open and self.norms.released:
            self.norms.close()
        if not self.norms.is_open:
            self.norms.open()

    def end_piece(self, counts: PieceCounts, unscale: Tensor | None) -> None:
        """Add the examples of the piece that ends here.

        Args:
            counts: of the piece.
            unscale: the factor that undoes a GradScaler's scale; None without one.
        """
        # Rows that count for nothing, as padding may, have a weight of 0, and are no units.
        units = counts.units if counts.unit_weights is None else len(counts.unit_weights)
        if why_not := self._why_not_rows(units, counts.dim):
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
        projections = squares.projections if unscale is None else squares.projections * unscale
        of_gradients = torch.where(weights[:, None] > 0, projections / weights[:, None], 0.0)
        self._scores += order_scores(of_gradients)
        self._projected += torch.cat([projections.sum(0), (projections * of_gradients).sum()[None]])
        self._n_examples += n
        self._n_pieces += 1

    def _why_not_rows(self, units: float | Tensor, dim: int) -> str:
        """Why the units of a piece cannot be the rows that layers are called with, in words."""
        if dim and not self.norms.knows_time_first:
            return f"the batch is dim {dim} of what the model is called with, and layers do not show it"
        if isinstance(units, Tensor) or not float(units).is_integer():
            return "the number of units of a piece is no whole number that the host knows: pass an int"
        if 8 * units * self._n_parameters > _MOST_BYTES:
            examples, parameters = plural(round(units), "example"), plural(self._n_parameters, "parameter")
            return f"the norms of {examples} in {parameters} take too much memory: is the unit a row?"
        return ""

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
            "sq_norm_over_weight": self._small.where(is_finite, 0.0),
            "of_pieces": sums.sq_norms_over_weight,
            "covered": widened(is_finite),
            "projected": self._projected,
            "counts": as_vector([*counts, *self._scores.unbind()], self._device),
        }
        own: dict[str, Tensor] = {}
        (of_ranks if self._is_sharded else own)["sq_norm_big"] = sq_norms_big
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
            why_not = NOTHING_COVERED
        if why_not or not n_read:
            return None, why_not, is_covered.tolist()
        of_examples = ExampleSums(
            sq_norm_over_weight=self._per_group(sums["sq_norm_over_weight"], is_covered),
            weight=row.weight,
            weight_over_units=row.weight,  # n_b = 1 throughout
            sq_weight_over_units=counts["sq_weight"],
            n_pieces=round(counts["n_examples"]),
            of_pieces=self._per_group(sums["of_pieces"], is_covered),
            sq_norm_big=self._per_group(sums["sq_norm_big"], is_covered),
            n_covered=int(is_covered.sum()),
            projected=sums["projected"][:-1].double(),
            sq_projected=float(sums["projected"][-1]),
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
