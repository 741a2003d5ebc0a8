"""The sums of one window by name: on the device without host synchronisation, then on the host as its rows."""

from __future__ import annotations

import math
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from numbers import Real

import torch
from torch import Tensor

from sonde.batch_size.stats.dependence import (
    FEWEST_PIECES,
    neighbour_products,
    order_of_pieces,
    rank_mark,
    same_ranks,
    scores_of_pieces,
)
from sonde.batch_size.stats.noise_scale import effective_units
from sonde.batch_size.stats.window_row import CLASSES, Drop, WindowRow, WitnessedPieces
from sonde.batch_size.taps.metric import Metrics
from sonde.batch_size.taps.problems import Problem
from sonde.batch_size.taps.tap import Adds, GradientSummary, Number
from sonde.parallel.data_ranks import DataRanks
from sonde.parallel.devices import is_at_hand, to_device, widened, zero_sums

Named = Mapping[str, Tensor]
Shapes = Mapping[str, torch.Size]


def packed(tensors: Named) -> tuple[Tensor, Shapes]:
    """Copy tensors of one dtype and device into one vector; and their shapes, by which `named` finds them again.

    So one collective sums them, and one copy brings them to the host. A feature adds tensors by names of its own, and
    finds them by these names on the host.
    """
    vector = torch.cat([tensor.reshape(-1) for tensor in tensors.values()])
    return vector, {name: tensor.shape for name, tensor in tensors.items()}


def named(vector: Tensor, shapes: Shapes) -> dict[str, Tensor]:
    """The tensors in a vector, by name; views."""
    parts = vector.split([math.prod(shape) for shape in shapes.values()])
    return {name: part.view(shape) for part, (name, shape) in zip(parts, shapes.items(), strict=True)}


def under(prefix: str, tensors: Named) -> dict[str, Tensor]:
    """The tensors with longer names: `prefix/name`."""
    return {f"{prefix}/{name}": tensor for name, tensor in tensors.items()}


def those_under(prefix: str, tensors: Named) -> dict[str, Tensor]:
    """The tensors whose names begin with `prefix/`, by the rest of their names."""
    start = f"{prefix}/"
    return {name.removeprefix(start): tensor for name, tensor in tensors.items() if name.startswith(start)}


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


_COUNTS = (
    "weight",
    "weight_over_units",
    "sq_weight_over_units",
    "n_pieces",
    "n_units",
    "rank_sq_weight_over_units",
    "n_comparing",
    "by_place",
    "n_by_place",
    "by_units",
    "n_by_units",
    "n_declaring",
)
"""The numbers that a rank counts its pieces by, as the row names them."""
_MOST_COMPARED = 32
"""Pieces of a rank and window, from the first on, that are compared with each other; bounds their memory."""
_MOST_MARKED = 256
"""Ranks, from the first on, that are compared with each other; bounds the vector that is summed."""


class WindowSums:
    """Adds up the pieces of one window on this rank.

    Args:
        group_index: the parameter group of each parameter, [parameters].
        n_groups: number of groups.
        n_witness: elements of the witness.
        metrics: in which gradients are measured.
        device: where the sums live.
        data: this rank's place among those that have data of their own; None for a single process.
        has_loss_scale: whether gradients were multiplied by a GradScaler's scale.
        n_further_units: how many further units pieces are counted in.
    """

    def __init__(
        self,
        group_index: Sequence[int],
        *,
        n_groups: int,
        n_witness: int,
        metrics: Metrics,
        device: torch.device,
        data: DataRanks | None = None,
        has_loss_scale: bool = False,
        n_further_units: int = 0,
    ) -> None:
        self._not_finite = Problem.LOSS_SCALE if has_loss_scale else Problem.NOT_FINITE
        self._n_further_units, self.device = n_further_units, device
        self._group_index = to_device(torch.tensor(group_index, device="cpu"), device)
        self.n_groups = n_groups
        self._data = data = data if data is not None else DataRanks()
        self._n_marked = min(data.n_ranks, _MOST_MARKED) if data.n_ranks > 1 else 0
        self.counts_pieces = data.counts_pieces
        """Whether this rank counts the pieces of its data. Ranks that share a piece hold parts of its gradient: all add
        their squares, and one of them counts the piece."""
        self.shape, self._n_witness = (len(metrics.all), len(group_index)), n_witness
        self._of_norms = [i for i, adds in enumerate(metrics.adds) if adds == "norms"]
        self._begin()

    def _begin(self) -> None:
        """Begin a window."""
        device = self.device
        self._small = zero_sums(*self.shape, device=device)
        """Σ |h_k|²/w_k per metric and parameter, where squares add up over parameters."""
        self._small_of_norms = zero_sums(len(self._of_norms), self.n_groups + 1, device=device)
        """The same per group and, last, of the whole model, where norms add up before they are squared."""
        self._witness = zero_sums(self._n_witness, device=device)
        self._witness_squares = zero_sums(self._n_witness, device=device)
        self._witness_small = zero_sums(device=device)
        self._squares = zero_sums(device=device)
        """A sum of squares: once it is not finite, it stays so."""
        self._bad_counts = zero_sums(device=device)
        self.n_pieces = 0
        self._weight: Number = 0.0
        self._weight_over_units: Number = 0.0
        self._sq_weight_over_units: Number = 0.0
        self._units: Number = 0.0
        self._further_units: list[Number] = [0.0] * self._n_further_units
        self._compared: list[Tensor] = []
        self._sizes: list[Tensor] = []
        """|h_k|²/w_k² of the pieces, on the device."""
        self._units_of_pieces: list[float] = []

    def add(self, gradient: GradientSummary, counts: PieceCounts) -> None:
        """Add one piece's gradient h_k with its weight w_k and its effective number of units n_k."""
        self._add_gradient(gradient, counts.weight)
        self.count(counts)
        if len(self._compared) < _MOST_COMPARED:
            self._compared.append(gradient.witness / counts.weight)
            if not isinstance(counts.units, Tensor):
                self._sizes.append(gradient.terms[0].sum() / counts.weight / counts.weight)
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

    def _add_gradient(self, gradient: GradientSummary, weight: Number) -> None:
        self._squares += gradient.terms[0].sum()
        self._small += gradient.terms / weight
        if self._of_norms:
            of_norms = torch.stack([gradient.terms[i] for i in self._of_norms])
            self._small_of_norms += self.per_group(of_norms).square() / weight
        squares = gradient.witness.square()
        self._witness += gradient.witness
        self._witness_squares += squares if gradient.witness_squares is None else gradient.witness_squares
        self._witness_small += squares.sum() / weight

    @property
    def sq_norms_over_weight(self) -> Tensor:
        """Σ |h_k|²/w_k of this rank's pieces so far in the first metric, per parameter; [parameters]."""
        return self._small[0]

    def per_group(self, terms: Tensor) -> Tensor:
        """Sums over the parameters of each group and, last, over all; [metrics, parameters] → [metrics, groups + 1]."""
        sums = zero_sums(len(terms), self.n_groups + 1, device=self.device).index_add_(1, self._group_index, terms)
        sums[:, -1] = terms.sum(1)
        return sums

    def take(
        self, problems: Mapping[Problem, Number], costs: Sequence[float] = (), *, declares: bool = False
    ) -> dict[str, Tensor]:
        """This rank's sums by name; starts the next window.

        Args:
            problems: that were met, with their counts.
            costs: what the rank has spent, which rides along.
            declares: whether this rank takes only declared pieces by now.
        """
        may_compare = self.counts_pieces and len(self._compared) >= FEWEST_PIECES
        # The last ratio is one of this rank's own sums: it is formed before the sum over ranks.
        counts: list[Number] = [
            self._weight,
            self._weight_over_units,
            self._sq_weight_over_units,
            float(self.n_pieces),
            self._units,
            self._sq_weight_over_units / self._weight if self.n_pieces else 0.0,
            float(may_compare),
            *order_of_pieces(self._sizes, self._units_of_pieces),
        ]
        further = self._further_units
        if not self.counts_pieces:
            counts, further = [0.0] * len(counts), [0.0] * len(further)
        met = {Problem.BAD_COUNTS: self._bad_counts, self._not_finite: ~torch.isfinite(self._squares)}
        of_host: dict[str, Sequence[Number]] = {
            "counts": [*counts, float(declares)],
            "further_units": further,
            "costs": costs,
        }
        of_host["problems"] = [problems.get(p, 0) + met.get(p, 0) for p in Problem]
        # One copy brings all numbers of the host to the device.
        vector = as_vector([n for each in of_host.values() for n in each], self.device)
        numbers = dict(zip(of_host, vector.split([len(each) for each in of_host.values()]), strict=True))
        small = self.per_group(self._small)
        for i, of_metric in zip(self._of_norms, self._small_of_norms, strict=True):
            small[i] = of_metric
        # A ratio of this rank's own sums is formed before the sum over ranks.
        of_rank = self._witness.square().sum() / self._weight if self.n_pieces else self._witness.new_zeros(())
        sums = {
            "small": small,
            **numbers,
            "witness_small": self._witness_small,
            "witness_ranks": of_rank,
            "compared": neighbour_products(torch.stack(self._compared)) if may_compare else self._witness.new_zeros(2),
            "witness": self._witness,
            "witness_squares": self._witness_squares,
            "marks": self._mark(),
        }
        self._begin()
        return sums

    def _mark(self) -> Tensor:
        """This rank's mark in its own place, so that the sum over ranks holds the marks of all; [marked ranks, 2]."""
        marks = self._witness.new_zeros(self._n_marked, 2)
        if self.counts_pieces and self._data.rank < self._n_marked:
            marks[self._data.rank] = rank_mark(self._witness)
        return marks


def read_rows(sums: Named, metrics: Sequence[Adds], witness_sizes: Mapping[int, int]) -> list[WindowRow]:
    """The row of a window in each metric, once its numbers are on the host.

    Args:
        sums: by name, summed over ranks; on the CPU.
        metrics: what each adds.
        witness_sizes: elements that the witness read of each parameter, in order, by index.
    """
    counts: dict[str, float] = dict(zip(_COUNTS, sums["counts"].tolist(), strict=True))
    met = {p for p, n in zip(Problem, sums["problems"].tolist(), strict=True) if n > 0}
    n_declaring = round(counts["n_declaring"])
    witness, marks = sums["witness"].double(), sums["marks"].double()
    weight, witness_small, witness_ranks = counts["weight"], *map(float, (sums["witness_small"], sums["witness_ranks"]))
    small = sums["small"].double()
    squared = torch.tensor([adds == "norms" for adds in metrics], device="cpu")[:, None]
    big = torch.where(squared, sums["big"].double().square(), sums["big"].double())
    apart = {name: found for name in CLASSES if (found := those_under(name, sums))}
    plain = WindowRow(
        sq_norm_over_weight=small[0, :-1],
        weight=weight,
        weight_over_units=counts["weight_over_units"],
        sq_weight_over_units=counts["sq_weight_over_units"],
        n_pieces=round(counts["n_pieces"]),
        n_ranks_declaring=n_declaring,
        stepped_alone=Problem.STEP_ALONE in met and Problem.FORWARD_ALONE not in met,
        n_units=counts["n_units"],
        further_units=sums["further_units"].tolist(),
        in_fp32=sums["small"].dtype == torch.float32,
        rank_sq_weight_over_units=counts["rank_sq_weight_over_units"],
        problems=_drops(met, are_declared=n_declaring > 0, explain=False),
        explanations=_drops(met, are_declared=n_declaring > 0, explain=True),
        witness_small=witness_small,
        witness_ranks=witness_ranks,
        witness_sizes=witness_sizes,
        witness_sum=witness,
        witness_squares=sums["witness_squares"].double(),
        sq_norm_big=big[0, :-1],
        witness_final=sums["witness_final"].double(),
        scores=scores_of_pieces(
            counts, *sums["compared"].tolist(), mean_square=witness_small / weight if weight else 0.0
        ),
        same_ranks=same_ranks(marks, spread=_spread(weight * witness_ranks, witness)),
    )
    return [_in_metric(plain, i, adds, small, big, apart) for i, adds in enumerate(metrics)]


def _in_metric(
    plain: WindowRow, i: int, adds: Adds, small: Tensor, big: Tensor, apart: Mapping[str, Named]
) -> WindowRow:
    """The row in one metric, of small and big [metrics, groups + 1], and of classes apart by name."""
    problems = list(plain.problems)
    # What is finite in the first metric alone lacks a second moment.
    if not problems and math.isfinite(small[0, -1]) and not math.isfinite(small[i, -1]):
        problems = [_drop(Problem.NO_SECOND_MOMENT)]
    return replace(
        plain,
        sq_norm_over_weight=small[i, :-1],
        sq_norm_big=big[i, :-1],
        whole=(float(small[i, -1]), float(big[i, -1])) if adds == "norms" else None,
        problems=problems,
        apart={name: _of_class(found, plain, i) for name, found in apart.items()},
    )


def _drop(problem: Problem) -> Drop:
    return Drop(problem.name.lower(), problem.message)


def _drops(met: Collection[Problem], *, are_declared: bool, explain: bool) -> list[Drop]:
    """The problems that were met, or those that only explain a changed gradient."""
    found = [p for p in Problem if p in met and p.applies(are_declared=are_declared)]
    return [_drop(p) for p in found if p.only_explains == explain]


def _of_class(sums: Named, row: WindowRow, metric: int) -> WitnessedPieces:
    """What a class apart gives in one metric, whose squares add up. Its Σ w_k and Σ w_k²/n_k are those of the rest."""
    weight_over_units, n_pieces = sums["counts"].tolist()
    return WitnessedPieces(
        row.weight,
        weight_over_units,
        row.sq_weight_over_units,
        round(n_pieces),
        sums["small"][metric, :-1].double(),
        sums["big"][metric, :-1].double(),
        *(sums[name].double() for name in ("witness", "witness_squares", "witness_final")),
    )


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
