"""The norms in which gradients are measured: one value of the metric axis for each, and how they are taken together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Protocol, TypeGuard

import torch
from torch import Tensor

from sonde.batch_size.taps.second_moments import SecondMoments
from sonde.batch_size.taps.squared_norms import Part, add_parts, gradient_parts, roots
from sonde.batch_size.taps.tap import Problem
from sonde.parallel.devices import to_device, zero_sums

MetricName = Literal["euclidean", "adam", "sign", "spectral"]
Adds = Literal["squares", "norms"]
"""What adds up over parameters: squared norms, or the norms themselves, whose sum is squared."""

CHUNK = 2**18
"""Elements worked on at a time, so that no temporary is of gradient size."""


class GradientMetric(Protocol):
    """A norm of gradients.

    Its *terms* add up over elements, parameters and ranks: squares, or absolute values. A part holds their roots, if
    squares add up, or the terms themselves.
    """

    name: str
    """The name that `attach(metric=...)` takes."""
    adds: Adds

    def parts(self, indices: Sequence[int], grads: Sequence[Tensor]) -> list[Part]:
        """The parts of several gradients on one device, or of what this rank holds of them, in few kernels."""

    def part_of_range(self, index: int, values: Tensor, start: int, shape: torch.Size, *, is_known: bool) -> Part:
        """The part of some elements that follow each other in a gradient.

        Args:
            index: of the parameter.
            values: the elements, 1-D.
            start: the first of them.
            shape: of the whole gradient, as hooks see it.
            is_known: whether a backward of this rank has reached the parameter. Otherwise the elements may be 0 because
                no rank's has.
        """

    def excess_of_sum(self, index: int, a: Tensor, b: Tensor) -> Tensor:
        """What the term of a + b exceeds those of a and of b by: two dense gradients of one parameter; 0-dim."""

    def take_problems(self) -> list[Problem]:
        """Problems that were met since the last call."""


class Metrics:
    """The metrics of a probe: those whose squares add up over parameters come before those whose norms do.

    Args:
        metrics: the first is the one whose squares the checks of every window use.
    """

    def __init__(self, metrics: Sequence[GradientMetric]) -> None:
        self.all = sorted(metrics, key=lambda metric: metric.adds != "squares")
        self.names = [metric.name for metric in self.all]
        self.adds = [metric.adds for metric in self.all]
        self.n_squares = self.adds.count("squares")
        """How many come first; their squares add up."""

    @property
    def is_plain(self) -> bool:
        """Whether the first is the plain 2-norm, which a clip measures too."""
        return self.names[0] == "euclidean"

    def without_first(self) -> Metrics:
        """The others, which may be none."""
        return Metrics(self.all[1:])

    def take_problems(self) -> list[list[Problem]]:
        """The problems that each has met since the last call."""
        return [metric.take_problems() for metric in self.all]


class GradientTerms:
    """The parts of one gradient in every metric, until all parameters have come.

    Args:
        metrics: of the probe.
        n_parameters: how many there are.
        device: of the sums.
    """

    def __init__(self, metrics: Metrics, n_parameters: int, device: torch.device) -> None:
        self._metrics, self._n, self._device = metrics, n_parameters, device
        self._parts: list[list[Part]] = [[] for _ in metrics.all]
        self._excess: list[tuple[int, int, Tensor]] = []

    def take(self, indices: Sequence[int], grads: Sequence[Tensor]) -> list[Tensor]:
        """Add gradients on one device; returns what was computed, for whoever manages streams."""
        return self.add([metric.parts(indices, grads) for metric in self._metrics.all])

    def take_range(self, index: int, values: Tensor, start: int, shape: torch.Size, *, is_known: bool) -> None:
        """Add some elements of a gradient; see `GradientMetric.part_of_range`."""
        of_each = [m.part_of_range(index, values, start, shape, is_known=is_known) for m in self._metrics.all]
        self.add([[part] for part in of_each])

    def add(self, parts: Sequence[list[Part]]) -> list[Tensor]:
        """Add parts, [metrics]; returns their values."""
        for own, new in zip(self._parts, parts, strict=True):
            own += new
        return [values for new in parts for _, values in new]

    def take_again(self, index: int, so_far: Tensor, grad: Tensor) -> list[Tensor]:
        """Add a second gradient of a parameter, whose first is `so_far`: |a + b|² = |a|² + |b|² + 2⟨a, b⟩."""
        excess = [metric.excess_of_sum(index, so_far, grad) for metric in self._metrics.all]
        self._excess += [(i, index, each) for i, each in enumerate(excess)]
        return [*excess, *self.take((index,), (grad,))]

    @property
    def device(self) -> torch.device | None:
        """Where the first part lies; None before it."""
        return self._parts[0][0][1].device if self._parts[0] else None

    def sum(self) -> Tensor:
        """The terms, 0 for a parameter without a part; [metrics, parameters]."""
        sums = [
            add_parts(self._n, parts, self._device, squares=adds == "squares")
            for adds, parts in zip(self._metrics.adds, self._parts, strict=True)
        ]
        for i, index, each in self._excess:
            sums[i][index] += to_device(each, self._device)
        return torch.stack(sums) if sums else zero_sums(0, self._n, device=self._device)


class Euclidean:
    """|g|² = Σ g_j²."""

    name = "euclidean"
    adds: Adds = "squares"

    def parts(self, indices: Sequence[int], grads: Sequence[Tensor]) -> list[Part]:
        """The norms of rows, or norms; small gradients share a kernel."""
        return gradient_parts(indices, grads)

    def part_of_range(self, index: int, values: Tensor, start: int, shape: torch.Size, *, is_known: bool) -> Part:
        """The norms of rows."""
        return (index,), roots(values)

    def excess_of_sum(self, index: int, a: Tensor, b: Tensor) -> Tensor:
        """2 Σ a_j b_j."""
        total = zero_sums(device=a.device)
        # Upcast chunk by chunk, so that no temporary has the size of a gradient.
        for x, y in zip(a.reshape(-1).split(CHUNK), b.reshape(-1).split(CHUNK), strict=True):
            total += (x.to(total.dtype) * y).sum()
        return 2 * total

    def take_problems(self) -> list[Problem]:
        """Always empty: every gradient has a norm."""
        return []


class AdamMetric:
    """|g|² = Σ P_j g_j² with P = 1/(√v̂ + ε), where v̂ is the second moment of the optimizer's previous step.

    Before the optimizer's first step there is no v̂: norms are NaN, and the window is dropped. With amsgrad, v̂ is the
    largest second moment so far, as in the optimizer. P is 0 where v̂ is 0. Such an element has had no gradient yet, as
    in an embedding's row whose token has not come. Its P would be 1/ε, so that a few of them would outweigh the model.

    Args:
        moments: of the optimizer.
    """

    name = "adam"
    adds: Adds = "squares"

    def __init__(self, moments: SecondMoments) -> None:
        self._moments = moments
        self._problems: dict[Problem, None] = {}

    def take_problems(self) -> list[Problem]:
        """Whether a second moment was missing since the last call."""
        problems, self._problems = list(self._problems), {}
        return problems

    def parts(self, indices: Sequence[int], grads: Sequence[Tensor]) -> list[Part]:
        """√(Σ P_j g_j²) of each gradient, one by one."""
        return [((i,), self._root(i, g.to_dense() if g.is_sparse else g)) for i, g in zip(indices, grads, strict=True)]

    def part_of_range(self, index: int, values: Tensor, start: int, shape: torch.Size, *, is_known: bool) -> Part:
        """√(Σ P_j g_j²) of some elements that follow each other in a gradient."""
        moment, zero = self._moments.of(index), zero_sums(device=values.device)
        if moment is None and not is_known:  # a parameter that is never reached has no second moment, and needs none
            return (index,), torch.where(values.any(), torch.nan, zero)
        if not self._may_weigh(moment, shape):
            return (index,), zero.fill_(torch.nan)
        v = moment.reshape(-1)[start : start + len(values)]
        return (index,), self._weighted(index, values, values, v).sqrt_()

    def excess_of_sum(self, index: int, a: Tensor, b: Tensor) -> Tensor:
        """2 Σ P_j a_j b_j."""
        return 2 * self._product(index, a, b)

    def _root(self, index: int, grad: Tensor) -> Tensor:
        return self._product(index, grad, grad).sqrt_()

    def _product(self, index: int, a: Tensor, b: Tensor) -> Tensor:
        """Σ P_j a_j b_j; NaN where the second moment is not known."""
        moment = self._moments.of(index)
        if not self._may_weigh(moment, a.shape):
            return zero_sums(device=a.device).fill_(torch.nan)
        x = a.reshape(-1)
        return self._weighted(index, x, x if a is b else b.reshape(-1), moment.reshape(-1))

    def _may_weigh(self, moment: Tensor | None, shape: torch.Size) -> TypeGuard[Tensor]:
        """Whether the second moment of a gradient of this shape is known; if not, that is noted as a problem."""
        if moment is not None and moment.shape == shape:
            return True
        self._problems[Problem.NO_SECOND_MOMENT] = None
        return False

    def _weighted(self, index: int, a: Tensor, b: Tensor, moment: Tensor) -> Tensor:
        """Σ P_j a_j b_j of elements with their second moments: [elements] each."""
        correction, eps = self._moments.scale(index)
        total = zero_sums(device=a.device)
        # Chunk by chunk, so that no temporary has the size of a gradient.
        for x, y, v in zip(*(t.split(CHUNK) for t in (a, b, moment)), strict=True):
            root = _in_fp32(v).sqrt().div_(correction).add_(eps)  # not sqrt_: v belongs to the optimizer
            root = to_device(root.masked_fill_(v == 0, torch.inf).sqrt_(), x.device)
            # Each factor is divided by the fourth root of v̂ before they are multiplied, so that squares of small
            # gradients do not vanish in fp32.
            weighted = x / root
            total += (weighted.square_() if a is b else weighted.mul_(y / root)).sum(dtype=total.dtype)
        return total


def _in_fp32(values: Tensor) -> Tensor:
    """The values in fp32, or in fp64 if they are."""
    return values if values.dtype.itemsize >= 4 else values.float()
