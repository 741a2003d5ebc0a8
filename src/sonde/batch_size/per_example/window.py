"""Adds up the squared norms of single examples over one window, as named numbers that ranks can sum."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from sonde.batch_size.hook_failures import log_failure
from sonde.batch_size.per_example.norms import PerExampleNorms
from sonde.batch_size.per_example.rules import GradientsOf
from sonde.batch_size.stats.comparisons import N_SCORES, OrderScores, order_scores
from sonde.batch_size.stats.example_sums import ExampleSums
from sonde.batch_size.stats.window_row import WindowRow
from sonde.batch_size.taps.named import Named
from sonde.batch_size.taps.window_sums import PieceCounts, WindowSums, as_vector
from sonde.parallel.devices import to_device, widened, zero_sums
from sonde.wording import plural

NOTHING_COVERED = (
    "no parameter was covered: what layers were called with does not add up to the gradients, as under torch.compile, "
    "with a penalty on weights in the loss, or where 16 bits round too much"
)
"""Why a window's examples cannot be used, where the host knows no reason for a single parameter."""
_MOST_BYTES = 64 * 2**20
"""Memory for the squared norms of one piece, of every example and parameter."""
_COUNTS = ("sq_weight", "n_examples", "n_pieces", "n_open", "n_closed", "next", "opposite", "half", "n_scores")
"""Σ w_b²; examples; pieces whose examples were read; ranks that read examples, and those that do not; and what
`order_scores` gives."""


class ExampleWindow:
    """Adds up |h_b|²/w_b of each example of a window; no value is read on the host before its numbers arrive.

    Examples are the units of a piece, and the rows of what the model's layers are called with. A piece whose units are
    not the rows cannot be used, and says so.

    Args:
        model: as `PerExampleNorms` takes it.
        parameters: the measured ones by name.
        leaves: see `PerExampleNorms`.
        group_names: the group of each parameter, [parameters].
        rules: see `PerExampleNorms`.
        is_sharded: whether ranks hold parts of `.grad`, whose squares are known only after the sum over ranks.
        staging_bytes: see `PerExampleNorms`.

    Raises:
        ValueError: for models that `PerExampleNorms` refuses.
    """

    def __init__(
        self,
        model: nn.Module,
        parameters: Mapping[str, nn.Parameter],
        leaves: Sequence[Tensor],
        group_names: Sequence[str],
        *,
        staging_bytes: int,
        rules: Mapping[type[nn.Module], GradientsOf] | None = None,
        is_sharded: bool = False,
    ) -> None:
        self._norms = PerExampleNorms(
            model, parameters=parameters, leaves=leaves, rules=rules, staging_bytes=max(staging_bytes, 2**16)
        )
        self._n_parameters, self._is_sharded, self._device = len(parameters), is_sharded, leaves[0].device
        places = {name: i for i, name in enumerate(dict.fromkeys(group_names))}
        self._group_index = torch.tensor([places[name] for name in group_names], device="cpu")
        self.reasons: dict[str, str] = {}
        """Why parameters, by name, are not covered, as far as the host knows; "" holds a reason for all of them."""
        self._own_seconds = 0.0
        self._reset()

    def _reset(self) -> None:
        self._small = zero_sums(self._n_parameters, device=self._device)
        self._sq_weight = self._small.new_zeros(())
        self._scores = self._small.new_zeros(N_SCORES)
        self._n_examples = self._n_pieces = 0

    @property
    def is_open(self) -> bool:
        """Whether examples are read now."""
        return self._norms.is_open

    @property
    def seconds(self) -> float:
        """Host time spent so far."""
        return self._norms.seconds + self._own_seconds

    @property
    def without_rule(self) -> Mapping[str, str]:
        """Parameters that no layer with a rule holds, and why."""
        return self._norms.without_rule

    def open(self) -> None:
        """Read the examples of the pieces from now on.

        Raises:
            ValueError: see `PerExampleNorms.open`.
        """
        if not self._norms.is_open:
            self._norms.open(watches_batch_norms=True)

    def close(self) -> None:
        """Read nothing until `open`; keep no hook."""
        self._norms.close()

    def begin_piece(self) -> None:
        """From here until `end_piece` all backwards are one piece: those before it, outside pieces, do not count."""
        if self._norms.is_open:
            self._norms.forget_backwards()

    def end_piece(self, counts: PieceCounts, unscale: Tensor | None) -> None:
        """Add the examples of the piece that ends here.

        Args:
            counts: of the piece.
            unscale: the factor that undoes a GradScaler's scale; None without one.
        """
        if not self._norms.is_open:
            return
        before, inside = time.perf_counter(), self._norms.seconds
        self._add_piece(counts, unscale)
        self._own_seconds += time.perf_counter() - before - (self._norms.seconds - inside)

    def _add_piece(self, counts: PieceCounts, unscale: Tensor | None) -> None:
        if why_not := self._why_not_rows(counts):
            self.reasons[""] = why_not
            self._norms.discard()
            return
        n = int(counts.units)
        try:
            squares = self._norms.take(n)
        except Exception as error:  # a bug, a mistake in a rule of the user's, or no memory left: training goes on
            log_failure(error)
            self.reasons[""] = f"reading them failed ({type(error).__name__}: {error})"
            self._norms.discard()
            return
        self.reasons |= squares.reasons
        weights = _weights_of_examples(counts, n, self._small)
        over_weight = torch.where(weights > 0, squares.sq_norms / weights, squares.sq_norms * 0.0).sum(1)
        self._small += over_weight if unscale is None else over_weight * unscale.square()
        self._sq_weight += weights.square().sum()
        of_gradients = torch.where(weights[:, None] > 0, squares.projections / weights[:, None], 0.0)
        self._scores += order_scores(of_gradients)
        self._n_examples += n
        self._n_pieces += 1

    def _why_not_rows(self, counts: PieceCounts) -> str:
        """Why the units of a piece cannot be the rows that layers are called with, in words."""
        units, weights = counts.units, counts.unit_weights
        if isinstance(units, Tensor) or not float(units).is_integer():
            return "the number of units of a piece is no whole number that the host knows: pass an int"
        if weights is not None and len(weights) != units:  # units that count for nothing among them
            return f"the weights of {len(weights)} units do not say which {round(units)} are the examples"
        if 8 * units * self._n_parameters > _MOST_BYTES:
            examples, parameters = plural(round(units), "example"), plural(self._n_parameters, "parameter")
            return f"the norms of {examples} in {parameters} take too much memory: is the unit a row?"
        return ""

    def discard_piece(self) -> None:
        """Forget the present piece."""
        if self._norms.is_open:
            self._norms.discard()

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
        if sq_norms_big is None:  # they may have been read in some of its pieces
            self._reset()
            sq_norms_big = torch.zeros_like(self._small)
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
            why_not = NOTHING_COVERED
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
            order=OrderScores(*(counts[name] for name in _COUNTS[-N_SCORES:])),
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
