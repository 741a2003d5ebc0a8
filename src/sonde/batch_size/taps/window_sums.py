"""The sums of one window by name: on the device without host synchronisation, then on the host as its rows."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from sonde.batch_size.stats.comparisons import (
    FEWEST_PIECES,
    neighbour_products,
    order_of_pieces,
    rank_mark,
    same_ranks,
    scores_of_pieces,
)
from sonde.batch_size.stats.window_row import Drop, SumsApart, WindowRow
from sonde.batch_size.taps.leaf_hooks import GradientSummary
from sonde.batch_size.taps.metric import Adds, GradientMetric
from sonde.batch_size.taps.problems import Problem
from sonde.batch_size.taps.shared_pieces import PieceClass
from sonde.batch_size.taps.witness import Witness, elements_of
from sonde.batch_size.units import Number, PieceCounts, as_vector
from sonde.parallel.data_ranks import DataRanks
from sonde.parallel.devices import accumulation_dtype, to_device

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


def prefixed(prefix: str, tensors: Named) -> dict[str, Tensor]:
    """The tensors with longer names: `prefix/name`."""
    return {f"{prefix}/{name}": tensor for name, tensor in tensors.items()}


def unprefixed(prefix: str, tensors: Named) -> dict[str, Tensor]:
    """The tensors whose names begin with `prefix/`, by the rest of their names."""
    start = f"{prefix}/"
    return {name.removeprefix(start): tensor for name, tensor in tensors.items() if name.startswith(start)}


_COUNTS = (
    "weight",
    "weight_over_units",
    "sq_weight_over_units",
    "n_units",
    "n_pieces",
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
        columns: where the sums of each parameter go, [parameters]: its group, with `n_groups` added for each class up
            to its own.
        n_groups: number of groups.
        metrics: in which gradients are measured.
        witness: which elements are compared.
        device: where the sums live.
        data: this rank's place among those that have data of their own.
        classes: of parameters that are solved apart from the rest.
        has_loss_scale: whether gradients were multiplied by a GradScaler's scale.
        n_further_units: how many further units pieces are counted in.
    """

    def __init__(
        self,
        columns: Sequence[int],
        *,
        n_groups: int,
        metrics: Sequence[GradientMetric],
        witness: Witness,
        device: torch.device,
        data: DataRanks,
        classes: Sequence[PieceClass] = (),
        has_loss_scale: bool = False,
        n_further_units: int = 0,
    ) -> None:
        self._not_finite = Problem.LOSS_SCALE if has_loss_scale else Problem.NOT_FINITE
        self._n_further_units, self.device, self._dtype = n_further_units, device, accumulation_dtype(device)
        self._metrics, self._n_groups, self._witness_of, self._classes = metrics, n_groups, witness, classes
        self._columns = to_device(torch.tensor(columns, device="cpu"), device)
        self._n_columns = n_groups * (1 + len(classes))
        self._rank, self._n_marked = data.rank, min(data.n_ranks, _MOST_MARKED) if data.n_ranks > 1 else 0
        self._counts_pieces = data.counts_pieces
        """Whether this rank counts the pieces of its data. Ranks that share a piece hold parts of its gradient: all add
        their squares, and one of them counts the piece."""
        self._of_norms = [i for i, metric in enumerate(metrics) if metric.adds == "norms"]
        self.forget()

    def forget(self) -> None:
        """Begin a window."""
        zeros = functools.partial(torch.zeros, dtype=self._dtype, device=self.device)
        self._small = zeros(len(self._metrics), len(self._columns))
        """Σ |h_k|²/w_k per metric and parameter, where squares add up over parameters."""
        self._small_of_norms = zeros(len(self._of_norms), self._n_columns + 1)
        """The same per group and, last, of the whole model, where norms add up before they are squared."""
        self._witness, self._witness_squares = zeros(2, self._witness_of.size)
        self._witness_small, self._bad_counts = zeros(2)
        self._own_pieces = {place: each.begin() for place, each in enumerate(self._classes, 1)}
        """Of each class, by its place: after 0, which is that of the rest."""
        self.n_pieces = 0
        self._counts: list[Number] = [0.0] * 4
        """Σ w_k, Σ w_k/n_k, Σ w_k²/n_k and the units, as `_COUNTS` names them."""
        self._further_units: list[Number] = [0.0] * self._n_further_units
        self._compared: list[Tensor] = []
        self._sizes: list[Tensor] = []
        """|h_k|²/w_k² of the pieces, on the device."""
        self._units_of_pieces: list[float] = []

    def add(self, gradient: GradientSummary, counts: PieceCounts) -> None:
        """Add one piece's gradient h_k with its weight w_k and its effective number of units n_k."""
        self._add_gradient(gradient, counts.weight)
        self._count(counts)
        if self._own_pieces:
            squares = self.per_group(gradient.terms)[:, :-1].unflatten(1, (-1, self._n_groups))
            for place, pieces in self._own_pieces.items():
                pieces.add(squares[:, place], counts)
        if len(self._compared) < _MOST_COMPARED:
            # Multiplied by 0, not left out: what is not finite stays so, and drops the window.
            witness = gradient.witness if not self._classes else gradient.witness * self._witness_of.rest(self.device)
            self._compared.append(witness / counts.weight)
            if not isinstance(counts.units, Tensor):
                self._sizes.append(gradient.terms[0].sum() / counts.weight / counts.weight)
                self._units_of_pieces.append(counts.units)

    def _count(self, counts: PieceCounts) -> None:
        self.n_pieces += 1
        weight, n = counts.weight, counts.effective_units
        of_piece = (weight, weight / n, weight * weight / n, counts.units)
        self._counts = [total + number for total, number in zip(self._counts, of_piece, strict=True)]
        self._further_units = [a + b for a, b in zip(self._further_units, counts.further, strict=True)]
        for number in (counts.weight, counts.effective_units, counts.units, *counts.further):
            # `piece_counts` has checked Python numbers. Tensors cannot be checked without waiting for the device.
            if isinstance(number, Tensor):
                self._bad_counts += ~(torch.isfinite(number) & (number > 0))

    def _add_gradient(self, gradient: GradientSummary, weight: Number) -> None:
        self._small += gradient.terms / weight
        if self._of_norms:
            of_norms = torch.stack([gradient.terms[i] for i in self._of_norms])
            self._small_of_norms += self.per_group(of_norms).square() / weight
        squares = gradient.witness.square()
        self._witness += gradient.witness
        self._witness_squares += squares if gradient.witness_squares is None else gradient.witness_squares
        of_rest = squares if not self._classes else squares * self._witness_of.rest(self.device)
        self._witness_small += of_rest.sum() / weight

    @property
    def sq_norms_over_weight(self) -> Tensor:
        """Σ |h_k|²/w_k of this rank's pieces so far in the first metric, per parameter; [parameters]."""
        return self._small[0]

    def per_group(self, terms: Tensor) -> Tensor:
        """Sums over the parameters of each group and, last, over all; [metrics, parameters] → [metrics, columns + 1].

        The columns are those of the rest, [groups], then those of each class: [classes, groups].
        """
        sums = torch.zeros(len(terms), self._n_columns + 1, dtype=self._dtype, device=self.device)
        sums.index_add_(1, self._columns, terms)
        sums[:, -1] = terms.sum(1)
        return sums

    def end_window(
        self, problems: Mapping[Problem, Number], costs: Sequence[float] = (), *, declares: bool = False
    ) -> dict[str, Tensor]:
        """This rank's sums by name; starts the next window.

        Args:
            problems: that were met, with their counts.
            costs: what the rank has spent, which rides along.
            declares: whether this rank takes only declared pieces by now.
        """
        may_compare = self._counts_pieces and len(self._compared) >= FEWEST_PIECES
        # The last ratio is one of this rank's own sums: it is formed before the sum over ranks.
        weight, _, sq_weight_over_units, _ = self._counts
        counts: list[Number] = [
            *self._counts,
            float(self.n_pieces),
            sq_weight_over_units / weight if self.n_pieces else 0.0,
            float(may_compare),
            *order_of_pieces(self._sizes, self._units_of_pieces),
        ]
        further = self._further_units
        if not self._counts_pieces:
            counts, further = [0.0] * len(counts), [0.0] * len(further)
        small = self.per_group(self._small)
        met: dict[Problem, Number] = {
            Problem.BAD_COUNTS: self._bad_counts,
            self._not_finite: ~torch.isfinite(small[0, -1]),
        }
        for i, of_metric in zip(self._of_norms, self._small_of_norms, strict=True):
            small[i] = of_metric
        sums: dict[str, Tensor] = {"sq_norm_over_weight": small}
        for place, pieces in self._own_pieces.items():
            squares = small[:, :-1].unflatten(1, (-1, self._n_groups))[:, place]
            squares[:], numbers, met_in_class = pieces.sum(squares)
            is_counted = float(self._counts_pieces)
            sums |= {f"{self._classes[place - 1].name}/{name}": n * is_counted for name, n in numbers.items()}
            met |= {problem: met.get(problem, 0.0) + n for problem, n in met_in_class.items()}
        of_host: dict[str, Sequence[Number]] = {
            "counts": [*counts, float(declares)],
            "further_units": further,
            "costs": costs,
            "problems": [problems.get(p, 0) + met.get(p, 0) for p in Problem],
        }
        # One copy brings all numbers of the host to the device.
        sizes = {name: len(each) for name, each in of_host.items()}
        vector = as_vector([n for each in of_host.values() for n in each], self.device)
        sums |= zip(sizes, vector.split([*sizes.values()]), strict=True)
        witness = self._witness if not self._classes else self._witness * self._witness_of.rest(self.device)
        # A ratio of this rank's own sums is formed before the sum over ranks.
        of_rank = witness.square().sum() / weight if self.n_pieces else witness.new_zeros(())
        marks = witness.new_zeros(self._n_marked, 2)
        if self._counts_pieces and self._rank < self._n_marked:
            marks[self._rank] = rank_mark(witness)
        sums |= {
            "witness_small": self._witness_small,
            "witness_ranks": of_rank,
            "compared": neighbour_products(torch.stack(self._compared)) if may_compare else witness.new_zeros(2),
            "witness": self._witness,
            "witness_squares": self._witness_squares,
            "marks": marks,  # each rank's in its own place, so that the sum over ranks holds those of all
        }
        self.forget()
        return sums


def read_rows(
    sums: Named, metrics: Sequence[Adds], witness_sizes: Mapping[int, int], classes: Sequence[PieceClass] = ()
) -> list[WindowRow]:
    """The row of a window in each metric, once its numbers are on the host.

    Args:
        sums: by name, summed over ranks; on the CPU.
        metrics: what each adds.
        witness_sizes: elements that the witness read of each parameter, in order, by index.
        classes: that are solved apart from the rest.
    """
    counts: dict[str, float] = dict(zip(_COUNTS, sums["counts"].tolist(), strict=True))
    met = [p for p, n in zip(Problem, sums["problems"].tolist(), strict=True) if n > 0]
    n_declaring = round(counts["n_declaring"])
    drops = [p for p in met if p.applies(are_declared=n_declaring > 0)]
    weight, witness_small, witness_ranks = counts["weight"], *map(float, (sums["witness_small"], sums["witness_ranks"]))
    small, big = sums["sq_norm_over_weight"].double(), sums["sq_norm_big"].double()
    elements = [sums["witness"].double(), sums["witness_squares"].double(), sums["witness_final"].double()]
    apart: dict[str, SumsApart] = {}
    for each in classes:
        own = counts | {name: float(n) for name, n in unprefixed(each.name, sums).items()}
        numbers = own["weight"], own["weight_over_units"], own["sq_weight_over_units"], round(own["n_pieces"])
        mask = elements_of(each.indices, witness_sizes, len(elements[0]))
        # Multiplied by 0, not left out: what is not finite stays so, and drops the window.
        own_elements, elements = [part * mask for part in elements], [part * (1.0 - mask) for part in elements]
        apart[each.name] = SumsApart(*numbers, small[0], big[0], *own_elements, likely_cause=each.likely_cause)
    witness_sum, witness_squares, witness_final = elements
    plain = WindowRow(
        sq_norm_over_weight=small[0],
        sq_norm_big=big[0],
        weight=weight,
        weight_over_units=counts["weight_over_units"],
        sq_weight_over_units=counts["sq_weight_over_units"],
        n_pieces=round(counts["n_pieces"]),
        n_ranks_declaring=n_declaring,
        stepped_alone=Problem.STEP_ALONE in met and Problem.FORWARD_ALONE not in met,
        n_units=counts["n_units"],
        further_units=sums["further_units"].tolist(),
        in_fp32=sums["sq_norm_over_weight"].dtype == torch.float32,
        rank_sq_weight_over_units=counts["rank_sq_weight_over_units"],
        problems=[_drop(p) for p in drops if not p.only_explains],
        explanations=[_drop(p) for p in drops if p.only_explains],
        witness_small=witness_small,
        witness_ranks=witness_ranks,
        witness_sizes=witness_sizes,
        witness_sum=witness_sum,
        witness_squares=witness_squares,
        witness_final=witness_final,
        scores=scores_of_pieces(
            counts, *sums["compared"].tolist(), mean_square=witness_small / weight if weight else 0.0
        ),
        same_ranks=same_ranks(sums["marks"].double(), spread=_spread(weight * witness_ranks, witness_sum)),
    )
    rows = []
    for of_metric, big_of_metric, adds in zip(small, big, metrics, strict=True):
        big_of_metric = big_of_metric.square() if adds == "norms" else big_of_metric
        whole = (float(of_metric[-1]), float(big_of_metric[-1])) if adds == "norms" else None
        # [classes, groups]: the first are those of the rest.
        squares, squares_big = of_metric[:-1].view(1 + len(classes), -1), big_of_metric[:-1].view(1 + len(classes), -1)
        of_classes = {
            name: replace(of_class, sq_norm_over_weight=own_squares, sq_norm_big=own_big)
            for (name, of_class), own_squares, own_big in zip(apart.items(), squares[1:], squares_big[1:], strict=True)
        }
        row = replace(plain, sq_norm_over_weight=squares[0], sq_norm_big=squares_big[0], whole=whole, apart=of_classes)
        # What is finite in the first metric alone lacks a second moment.
        if not plain.problems and math.isfinite(small[0, -1]) and not math.isfinite(of_metric[-1]):
            row = replace(row, problems=[_drop(Problem.NO_SECOND_MOMENT)])
        rows.append(row)
    return rows


def _drop(problem: Problem) -> Drop:
    return Drop(problem.name.lower(), problem.message)


def _spread(mean_square: float, rank_total: Tensor) -> float:
    """The variance of the ranks' gradients over their mean square; 0 where they are 0 or not finite."""
    difference = mean_square - float(rank_total.square().sum())
    return difference / mean_square if 0 < mean_square < math.inf else 0.0
