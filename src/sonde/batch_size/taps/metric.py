"""The metric in which gradients are squared: the plain one, or Adam's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from sonde.batch_size.taps.further_metrics import Adds
from sonde.batch_size.taps.second_moments import MomentPart, SecondMoments
from sonde.batch_size.taps.squared_norms import Part, gradient_parts, norms, roots
from sonde.batch_size.taps.tap import Problem
from sonde.parallel.devices import to_device, zero_sums

MetricName = Literal["euclidean", "adam", "sign", "spectral"]

CHUNK = 2**18
"""Elements worked on at a time, so that no temporary is of gradient size."""


class GradientMetric(Protocol):
    """How gradients are measured."""

    name: str
    """The name that `attach(metric=...)` takes."""
    is_plain: bool
    """Whether it is the plain 2-norm, which a clip measures too."""

    def roots(self, index: int, grad: Tensor) -> Tensor:
        """Numbers whose squares add up to the squared norm of the gradient of parameter `index`."""

    def norms(self, indices: Sequence[int], grads: Sequence[Tensor]) -> Tensor:
        """The norm of each of several small dense gradients on one device; [gradients]."""

    def parts(self, indices: Sequence[int], grads: Sequence[Tensor]) -> list[Part]:
        """The roots of several gradients on one device, in few kernels."""

    def dot(self, index: int, a: Tensor, b: Tensor) -> Tensor:
        """The inner product of two dense gradients of parameter `index`; 0-dim."""

    def take_problems(self) -> list[Problem]:
        """Problems that were met since the last call."""


class Euclidean:
    """|g|² = Σ g_j²."""

    name = "euclidean"
    is_plain = True

    def roots(self, index: int, grad: Tensor) -> Tensor:
        """Norms of its rows, or its norm."""
        return roots(grad)

    def norms(self, indices: Sequence[int], grads: Sequence[Tensor]) -> Tensor:
        """The 2-norm of each gradient."""
        return norms(grads)

    def parts(self, indices: Sequence[int], grads: Sequence[Tensor]) -> list[Part]:
        """The norms of rows, or norms; small gradients share a kernel."""
        return gradient_parts(indices, grads)

    def dot(self, index: int, a: Tensor, b: Tensor) -> Tensor:
        """Σ a_j b_j."""
        total = zero_sums(device=a.device)
        # Upcast chunk by chunk, so that no temporary has the size of a gradient.
        for x, y in zip(a.reshape(-1).split(CHUNK), b.reshape(-1).split(CHUNK), strict=True):
            total += (x.to(total.dtype) * y).sum()
        return total

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
    is_plain = False

    def __init__(self, moments: SecondMoments) -> None:
        self.moments = moments
        self._problems: dict[Problem, None] = {}

    def take_problems(self) -> list[Problem]:
        """Whether a second moment was missing since the last call, or was cut in another way than its gradient."""
        problems, self._problems = list(self._problems), {}
        return problems

    def roots(self, index: int, grad: Tensor) -> Tensor:
        """√(Σ P_j g_j²)."""
        if grad.is_sparse:
            grad = grad.to_dense()
        return self.dot(index, grad, grad).sqrt_()

    def parts(self, indices: Sequence[int], grads: Sequence[Tensor]) -> list[Part]:
        """√(Σ P_j g_j²) of each gradient, one by one."""
        return [((i,), self.roots(i, g)) for i, g in zip(indices, grads, strict=True)]

    def norms(self, indices: Sequence[int], grads: Sequence[Tensor]) -> Tensor:
        """√(Σ P_j g_j²) of each gradient."""
        return torch.stack([self.roots(i, g) for i, g in zip(indices, grads, strict=True)])

    def dot(self, index: int, a: Tensor, b: Tensor) -> Tensor:
        """Σ P_j a_j b_j."""
        return self._product(index, a, b, self.moments.of_leaf(index))

    def norm_of_sum(self, index: int, a: Tensor, b: Tensor) -> Tensor:
        """√(Σ P_j (a_j + b_j)²) of two dense gradients."""
        parts = self.moments.of_leaf(index)
        aa, ab, bb = (self._product(index, x, y, parts) for x, y in ((a, a), (a, b), (b, b)))
        return (aa + 2 * ab + bb).clamp_(min=0.0).sqrt_()

    def norm_of_range(self, index: int, values: Tensor, start: int, shape: torch.Size, *, is_known: bool) -> Tensor:
        """√(Σ P_j g_j²) of some elements that follow each other in a gradient."""
        total = zero_sums(device=values.device)
        moments = self.moments.of_leaf(index)
        if not moments and not is_known:  # a parameter that is never reached has no second moment, and needs none
            return torch.where(values.any(), torch.nan, total)
        if not self._may_weigh(moments, shape):
            return total.fill_(torch.nan)
        correction, eps = self.moments.scale(index)
        for moment in moments:
            for own, v_of_own in moment.along(shape, start, values):
                for x, v in zip(own.split(CHUNK), v_of_own.split(CHUNK), strict=True):
                    total += moment.weight * _weighted(x, x, v, moment.rounded_to, correction, eps, total.dtype)
        return total.sqrt_()

    def norm_of_shard(self, index: int, grad: Tensor) -> Tensor:
        """√(Σ P_j g_j²) of the elements that this rank's optimizer holds."""
        return self._product(index, grad, grad, self.moments.own(index)).sqrt_()

    def _product(self, index: int, a: Tensor, b: Tensor, moments: Sequence[MomentPart]) -> Tensor:
        """Σ P_j a_j b_j; NaN where the second moment is not known."""
        total = zero_sums(device=a.device)
        if not self._may_weigh(moments, a.shape):
            return total.fill_(torch.nan)
        correction, eps = self.moments.scale(index)
        for moment in moments:
            part = torch.zeros_like(total)
            # Chunk by chunk, so that no temporary has the size of a gradient.
            chunks = (t.reshape(-1).split(CHUNK) for t in (moment.range_of(a), moment.range_of(b), moment.values))
            for x, y, v in zip(*chunks, strict=True):
                part += _weighted(x, x if a is b else y, v, moment.rounded_to, correction, eps, total.dtype)
            total += moment.weight * part
        return total

    def _may_weigh(self, moments: Sequence[MomentPart], shape: torch.Size) -> bool:
        """Whether the second moment of a gradient of this shape is known; if not, that is noted as a problem."""
        if not moments:
            self._problems[Problem.NO_SECOND_MOMENT] = None
        elif not all(moment.fits(shape) for moment in moments):
            self._problems[Problem.MOMENT_CUT_APART] = None
        else:
            return True
        return False


def _weighted(
    x: Tensor, y: Tensor, v: Tensor, rounded_to: torch.dtype | None, correction: Any, eps: float, dtype: torch.dtype
) -> Tensor:
    """Σ P_j x_j y_j; 0-dim, in a dtype."""
    v = v if rounded_to is None else v.to(rounded_to)
    wide = v if v.dtype.itemsize >= 4 else v.float()
    root = wide.sqrt().div_(correction).add_(eps)  # not sqrt_: v belongs to the optimizer
    root = to_device(root.masked_fill_(v == 0, torch.inf).sqrt_(), x.device)
    # Each factor is divided by the fourth root of v̂ before they are multiplied, so that squares of small gradients do
    # not vanish in fp32.
    weighted = x / root
    return (weighted.square_() if x is y else weighted.mul_(y / root)).sum(dtype=dtype)
