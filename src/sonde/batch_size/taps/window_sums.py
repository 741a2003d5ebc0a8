"""The sums of one window on the device, packed into one vector: one collective, no host synchronisation.

The device keeps a window as `WindowSums`, then as `Window`. The host gets it back as a `WindowRow`.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Real

import torch
import torch.distributed as dist
from torch import Tensor

from sonde.batch_size.measuring_cost import N_COSTS, WindowCosts
from sonde.batch_size.stats.neighbours import FEWEST_PIECES, NeighbourSums, neighbour_products
from sonde.batch_size.stats.noise_scale import effective_units
from sonde.batch_size.stats.piece_order import OrderSums, order_of_pieces
from sonde.batch_size.stats.repeats import FEWEST_RANKS, Repeats, rank_mark, repeats_piece, same_ranks
from sonde.batch_size.stats.window_row import Drop, WindowRow
from sonde.batch_size.taps.further_sums import FurtherSums
from sonde.batch_size.taps.tap import ExamplesOfWindow, ExpertsOfWindow, GradientSummary, Number, Problem
from sonde.parallel.data_ranks import DataRanks
from sonde.parallel.devices import is_at_hand, to_device, widened, zero_sums


@dataclass(frozen=True)
class PieceCounts:
    """A piece's weight w_k, its effective number of units n_k, its units as counted, and their own weights.

    Attributes:
        further: its size in each of the further units.
    """

    weight: Number
    effective_units: Number
    units: Number
    unit_weights: Sequence[float] | Tensor | None = None
    further: tuple[Number, ...] = ()


def piece_counts(
    units: Number | None,
    weight: Number,
    unit_weights: Sequence[float] | Tensor | None,
    further: Sequence[Number] = (),
) -> PieceCounts:
    """Check the counts that a user gives for a piece, and complete them.

    Args:
        units: units in the piece; None for one unit per entry of `unit_weights`.
        weight: the piece's weight in the loss.
        unit_weights: weights of the units within the piece, [units].
        further: the piece's size in each of the further units.

    Raises:
        ValueError: for a number that is not positive and finite, or a tensor of the wrong shape.
    """
    effective: Number | None = None
    if isinstance(unit_weights, Tensor) and unit_weights.dim() == 1 and is_at_hand(unit_weights.device):
        unit_weights = unit_weights.tolist()
    if isinstance(unit_weights, Tensor):
        if unit_weights.dim() != 1 or not unit_weights.numel():
            raise ValueError(
                f"unit_weights must hold one weight for each unit, [units], got shape {tuple(unit_weights.shape)}"
            )
        weights = widened(unit_weights.detach())
        effective = weights.sum().square() / weights.square().sum()  # Kish
        effective = torch.where((weights >= 0).all(), effective, torch.nan)  # NaN drops the window later
    elif unit_weights is not None:
        effective = effective_units(unit_weights)
    if units is None:
        assert unit_weights is not None
        units = float(len(unit_weights))
    elif unit_weights is not None and not isinstance(units, Tensor) and units != len(unit_weights):
        raise ValueError(
            f"unit_weights must hold one weight for each unit, got {len(unit_weights)} weights for units={units}: "
            "leave out units="
        )
    units = _positive("units", units)
    others = tuple(_positive("units", number) for number in further)
    n_units = units if effective is None else effective
    return PieceCounts(_positive("weight", weight), n_units, units, unit_weights, others)


def check_counts(
    units: Number | None,
    weight: Number,
    unit_weights: Sequence[float] | Tensor | None,
    further: Sequence[Number] = (),
) -> None:
    """Check the counts of a piece that is not measured, as `piece_counts` does, without any work for a device.

    Raises:
        ValueError: for a number that is not positive and finite.
    """
    if not any(
        isinstance(value, Tensor) and not is_at_hand(value.device) for value in (units, weight, unit_weights, *further)
    ):
        piece_counts(units, weight, unit_weights, further)


def _positive(name: str, value: Number) -> Number:
    if isinstance(value, Tensor):
        if value.numel() != 1:
            raise ValueError(f"{name} must be a number or a 0-dim tensor, got shape {tuple(value.shape)}")
        if not is_at_hand(value.device):
            return widened(value.detach().reshape(()))
        value = value.item()
    if type(value) not in (int, float) and (isinstance(value, bool) or not isinstance(value, Real)):
        raise ValueError(f"{name} must be a number or a 0-dim tensor, got {value!r}")
    value = math.inf if value > sys.float_info.max else float(value)
    if not 0 < value < math.inf:
        raise ValueError(
            f"{name} must be positive and finite, got {value}: leave out a micro-batch that does not count"
        )
    return value


_N_COUNTS = 12
"""Length of the counts in `WindowSums.pack`."""
_MOST_COMPARED = 32
"""Pieces of a rank and window, from the first on, that are compared with each other; bounds their memory."""
_N_COMPARISONS = 3
"""Length of the comparison of a rank's pieces in `WindowSums.pack`."""
_MOST_MARKED = 256
"""Ranks, from the first on, that are compared with each other; bounds the vector that is summed."""


@dataclass(frozen=True)
class Window:
    """The numbers of one window on the device, on their way to the host.

    Attributes:
        packed: the pieces' sums, as `WindowSums.pack` returned them; a collective may still be adding other ranks'.
        sq_norm_big: |F|² of the gradient at the end of the window per parameter group, in the metric; [groups].
        witness_final: the witness's elements of that gradient; [witness].
        witness_sizes: elements that the witness read of each parameter, in order, by index.
        work: the collective that is adding to `packed`; None with a single rank.
        n_further_units: how many further units pieces are counted in.
        n_frozen: how many numbers about frozen parameters `packed` ends with.
        examples: of the window's single examples, if the probe may read them.
        experts: of experts that several ranks feed, if the model has any; the other numbers are then of the rest.
        further: what `FurtherSums` packed, and its sums of the final gradient; None without further metrics.
    """

    packed: Tensor
    sq_norm_big: Tensor
    witness_final: Tensor
    witness_sizes: Mapping[int, int]
    work: dist.Work | None
    examples: ExamplesOfWindow | None = None
    experts: ExpertsOfWindow | None = None
    further: tuple[Tensor, Tensor] | None = None
    n_further_units: int = 0
    n_frozen: int = 0


class WindowSums:
    """Adds up the pieces of one window on this rank, then over ranks.

    Args:
        group_index: the parameter group of each parameter, [parameters].
        n_groups: number of groups.
        n_witness: elements of the witness.
        device: where the sums live.
        data: this rank's place among those that have data of their own; None for a single process.
        has_loss_scale: whether gradients were multiplied by a GradScaler's scale.
        further: adds up the norms in further metrics; None without.
        n_further_units: how many further units pieces are counted in.
    """

    def __init__(
        self,
        group_index: Sequence[int],
        *,
        n_groups: int,
        n_witness: int,
        device: torch.device,
        data: DataRanks | None = None,
        has_loss_scale: bool = False,
        further: FurtherSums | None = None,
        n_further_units: int = 0,
    ) -> None:
        self.further, self.n_further_units = further, n_further_units
        self._device = device
        self._group_index = to_device(torch.tensor(group_index, device="cpu"), device)
        self.n_groups, self._n_witness, self._has_loss_scale = n_groups, n_witness, has_loss_scale
        self._data = data = data if data is not None else DataRanks()
        self._n_marked = min(data.n_ranks, _MOST_MARKED) if data.n_ranks > 1 else 0
        self._small = zero_sums(len(group_index), device=device)
        self._witness = zero_sums(n_witness, device=device)
        self._witness_squares = zero_sums(n_witness, device=device)
        self._witness_small = zero_sums(device=device)
        self._squares = zero_sums(device=device)
        self._bad_counts = zero_sums(device=device)
        self.costs = WindowCosts()
        """What this rank has spent since the window before; rides along with the sums."""
        self.frozen = zero_sums(0, device=device)
        """What this rank knows of frozen parameters; rides along at the end of the sums, [numbers]."""
        self._reset_counts()

    def _reset_counts(self) -> None:
        self.n_pieces = 0
        self._weight: Number = 0.0
        self._weight_over_units: Number = 0.0
        self._sq_weight_over_units: Number = 0.0
        self._units: Number = 0.0
        self._further_units: list[Number] = [0.0] * self.n_further_units
        self._compared: list[Tensor] = []
        self._sizes: list[Tensor] = []
        """|h_k|²/w_k² of the pieces, on the device."""
        self._units_of_pieces: list[float] = []

    def add(self, gradient: GradientSummary, counts: PieceCounts) -> None:
        """Add one piece's gradient h_k with its weight w_k and its effective number of units n_k."""
        sq_norm = self._add_gradient(gradient, counts.weight)
        self.count(counts)
        if len(self._compared) < _MOST_COMPARED:
            self._compared.append(gradient.witness / counts.weight)
            if not isinstance(counts.units, Tensor):
                self._sizes.append(sq_norm / counts.weight / counts.weight)
                self._units_of_pieces.append(counts.units)

    def count(self, counts: PieceCounts) -> None:
        """Count a piece whose gradient will be seen only together with the other pieces of this rank."""
        self.n_pieces += 1
        self._weight += counts.weight
        self._weight_over_units += counts.weight / counts.effective_units
        self._sq_weight_over_units += counts.weight * counts.weight / counts.effective_units
        self._units += counts.units
        self._further_units = [a + b for a, b in zip(self._further_units, counts.further, strict=True)]
        for number in (counts.weight, counts.effective_units, counts.units, *counts.further):
            # `piece_counts` has checked Python numbers. Tensors cannot be checked without waiting for the device.
            if isinstance(number, Tensor):
                self._bad_counts += ~(torch.isfinite(number) & (number > 0))

    def merge(self, gradient: GradientSummary) -> None:
        """Turn the pieces counted so far into one piece, with the sum of their gradients."""
        self._add_gradient(gradient, self._weight)
        # One piece of weight W_r and n_r = W_r²/Σ w_k²/n_k effective units.
        self._weight_over_units = self._sq_weight_over_units / self._weight
        self.n_pieces = 1

    def _add_gradient(self, gradient: GradientSummary, weight: Number) -> Tensor:
        """Add |h|² and the witness's elements; returns |h|², 0-dim."""
        self._small += gradient.sq_norms / weight
        squares = gradient.witness.square()
        self._witness += gradient.witness
        self._witness_squares += squares if gradient.witness_squares is None else gradient.witness_squares
        self._witness_small += squares.sum() / weight
        sq_norm = gradient.sq_norms.sum()
        self._squares += sq_norm
        if self.further is not None and gradient.further is not None:
            self.further.add(gradient.further, weight)
        return sq_norm

    @property
    def sq_norms_over_weight(self) -> Tensor:
        """Σ |h_k|²/w_k of this rank's pieces so far, per parameter; [parameters]."""
        return self._small

    def per_group(self, sq_norms: Tensor) -> Tensor:
        """Sums of [parameters] over parameter groups: [groups]."""
        return zero_sums(self.n_groups, device=self._device).index_add_(0, self._group_index, sq_norms)

    def pack(self, problems: Sequence[Number], *, declares: bool = False) -> Tensor:
        """This rank's sums as the vector that is summed over ranks; starts the next window.

        Args:
            problems: count per `Problem`.
            declares: whether this rank takes only declared pieces by now.
        """
        # Ranks that share a piece hold parts of its gradient: all add their squares, and one of them counts the piece.
        counts_pieces = self._data.counts_pieces
        has_pieces = self.n_pieces > 0
        may_compare = counts_pieces and len(self._compared) >= FEWEST_PIECES
        no_rank_sum = self._witness_small.new_zeros(())
        # The last ratio and `rank_sum` are ratios of this rank's own sums: they are formed before the sum over ranks.
        counts: list[Number] = [
            self._weight,
            self._weight_over_units,
            self._sq_weight_over_units,
            float(self.n_pieces),
            self._units,
            self._sq_weight_over_units / self._weight if has_pieces else 0.0,
            float(may_compare),
            *order_of_pieces(self._sizes, self._units_of_pieces),
        ]
        further = self._further_units
        if not counts_pieces:
            counts, further = [0.0] * len(counts), [0.0] * self.n_further_units
        counts.append(float(declares))
        numbers = as_vector([*self.costs.numbers(), *counts, *problems], self._device)
        self._add_not_finite(numbers[N_COSTS + _N_COUNTS :])
        rank_sum = self._witness.square().sum() / self._weight if has_pieces else no_rank_sum
        compared = self._compare_pieces() if may_compare else rank_sum.new_zeros(_N_COMPARISONS)
        # `Delivery` splits off what is known of frozen parameters, and `read_row` the rest, in this order.
        packed = torch.cat(
            [
                self.per_group(self._small),
                numbers,  # costs, counts, problems
                torch.stack([self._witness_small, rank_sum]),
                compared,
                self._witness,
                self._witness_squares,
                self._mark(),
                as_vector(further, self._device),
                self.frozen,
            ]
        )
        # `packed` is a copy, so the accumulators can be zeroed in place for the next window.
        sums = (self._small, self._witness, self._witness_squares, self._witness_small, self._squares, self._bad_counts)
        for accumulator in sums:
            accumulator.zero_()
        self._reset_counts()
        return packed

    def _add_not_finite(self, problems: Tensor) -> None:
        """Add to the problems, [problems], what is known about sums that are not finite."""
        problems[Problem.BAD_COUNTS] += self._bad_counts
        not_finite = ~torch.isfinite(self._squares)  # a sum of squares: once it is not finite, it stays so
        if self._has_loss_scale:
            problems[Problem.LOSS_SCALE] += not_finite
            return
        # Finite elements can have an infinite square, but no square that is NaN.
        held_by_elements = torch.isnan(self._squares) | ~torch.isfinite(self._witness.sum())
        problems[Problem.NOT_FINITE] += not_finite & held_by_elements
        problems[Problem.OVERFLOW] += not_finite & ~held_by_elements

    def _compare_pieces(self) -> Tensor:
        """The comparison of this rank's pieces with each other; [_N_COMPARISONS]."""
        pieces = torch.stack(self._compared)
        return torch.cat([neighbour_products(pieces), repeats_piece(pieces).view(1)])

    def _mark(self) -> Tensor:
        """This rank's mark in its own place, so that the sum over ranks holds the marks of all; [2 · marked ranks]."""
        marks = self._witness.new_zeros(self._n_marked, 2)
        if self._data.counts_pieces and self._data.rank < self._n_marked:
            marks[self._data.rank] = rank_mark(self._witness)
        return marks.view(-1)


def read_row(
    packed: Tensor,
    sq_norm_big: Tensor,
    witness_final: Tensor,
    witness_sizes: Mapping[int, int],
    n_further_units: int = 0,
) -> WindowRow:
    """Name the numbers of a window once they are on the host.

    Args:
        packed: as in `Window`, summed over ranks, without what is known of frozen parameters; on the CPU.
        sq_norm_big: as in `Window`, [groups]; on the CPU.
        witness_final: as in `Window`, [witness]; on the CPU.
        witness_sizes: as in `Window`.
        n_further_units: as in `Window`.
    """
    packed, further = packed.split([len(packed) - n_further_units, n_further_units])
    n_groups, n_witness = len(sq_norm_big), len(witness_final)
    lengths = [n_groups, N_COSTS, _N_COUNTS, len(Problem), 2, _N_COMPARISONS, n_witness, n_witness]
    small, _, counts, problems, (witness_small, witness_ranks), compared, witness, squares, marks = packed.split(
        [*lengths, len(packed) - sum(lengths)]
    )
    weight, weight_over_units, sq_weight_over_units, n_pieces, n_units, rank_sq_weight_over_units, *of_ranks = (
        counts.tolist()
    )
    n_comparing, by_place, n_by_place, by_units, n_by_units, n_declaring = of_ranks
    products, variance, n_repeating = compared.tolist()
    n_met = problems.tolist()
    found = [p for p in Problem if n_met[p] > 0] if any(n_met) else []
    drops = {p: Drop(p.name.lower(), p.message) for p in found if p.applies(are_declared=n_declaring > 0)}
    return WindowRow(
        sq_norm_over_weight=small.tolist(),
        weight=weight,
        weight_over_units=weight_over_units,
        sq_weight_over_units=sq_weight_over_units,
        n_pieces=round(n_pieces),
        n_ranks_declaring=round(n_declaring),
        ran_forward=n_met[Problem.FORWARD_ALONE] > 0,
        stepped_alone=n_met[Problem.STEP_ALONE] > 0,
        n_units=n_units,
        further_units=further.tolist(),
        in_fp32=packed.dtype == torch.float32,
        rank_sq_weight_over_units=rank_sq_weight_over_units,
        problems=[drop for p, drop in drops.items() if not p.only_explains],
        explanations=[drop for p, drop in drops.items() if p.only_explains],
        witness_small=float(witness_small),
        witness_ranks=float(witness_ranks),
        witness_sizes=witness_sizes,
        witness_sum=witness.double(),
        witness_squares=squares.double(),
        sq_norm_big=sq_norm_big.tolist(),
        witness_final=witness_final.double(),
        neighbours=NeighbourSums(
            products=products,
            variance=variance,
            n_ranks=round(n_comparing),
            mean_square=float(witness_small) / weight if weight else 0.0,
        ),
        order=OrderSums(by_place, round(n_by_place), by_units, round(n_by_units)),
        repeats=Repeats(
            n_ranks=round(n_comparing),
            n_repeating=round(n_repeating),
            same_ranks=same_ranks(marks.double().view(-1, 2), spread=_spread(weight * float(witness_ranks), witness)),
            n_compared=len(marks) // 2 if len(marks) >= 2 * FEWEST_RANKS else 0,
        ),
    )


def read_costs(packed: Tensor, n_groups: int) -> WindowCosts:
    """The costs that rode along with a window, summed over ranks.

    Args:
        packed: as in `Window`, summed over ranks; on the CPU.
        n_groups: number of groups.
    """
    return WindowCosts(*packed[n_groups : n_groups + N_COSTS].tolist())


def _spread(mean_square: float, rank_total: Tensor) -> float:
    """The variance of the ranks' gradients over their mean square; 0 where they are 0 or not finite."""
    difference = mean_square - float(rank_total.double().square().sum())
    return difference / mean_square if 0 < mean_square < math.inf else 0.0


def as_vector(numbers: Sequence[Number], device: torch.device) -> Tensor:
    """Numbers as one vector on the device, without waiting for tensors that are there already; [numbers]."""
    on_device = {i: n for i, n in enumerate(numbers) if isinstance(n, Tensor) and n.device.type == device.type}
    values = [0.0 if i in on_device else float(n) for i, n in enumerate(numbers)]
    # device="cpu" is explicit, since the user may have set another default device.
    vector = to_device(torch.tensor(values, dtype=torch.float64, device="cpu"), device)
    for i, n in on_device.items():
        vector[i] = n
    return vector
