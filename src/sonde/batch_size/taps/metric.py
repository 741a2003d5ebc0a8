"""The metric in which gradients are squared: the plain one, or Adam's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Protocol, TypeGuard

import torch
from torch import Tensor

from sonde.batch_size.taps.further_metrics import Adds
from sonde.batch_size.taps.second_moments import SecondMoments
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
        self._moments = moments
        self._problems: dict[Problem, None] = {}

    def take_problems(self) -> list[Problem]:
        """Whether a second moment was missing since the last call."""
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
        return self._product(index, a, b)

    def norm_of_sum(self, index: int, a: Tensor, b: Tensor) -> Tensor:
        """√(Σ P_j (a_j + b_j)²) of two dense gradients."""
        aa, ab, bb = (self._product(index, x, y) for x, y in ((a, a), (a, b), (b, b)))
        return (aa + 2 * ab + bb).clamp_(min=0.0).sqrt_()

    def norm_of_range(self, index: int, values: Tensor, start: int, shape: torch.Size, *, is_known: bool) -> Tensor:
        """√(Σ P_j g_j²) of some elements that follow each other in a gradient."""
        zero = zero_sums(device=values.device)
        moment = self._moments.of(index)
        if moment is None and not is_known:  # a parameter that is never reached has no second moment, and needs none
            return torch.where(values.any(), torch.nan, zero)
        if not self._may_weigh(moment, shape):
            return zero.fill_(torch.nan)
        v = moment.reshape(-1)[start : start + len(values)]
        return self._weighted(index, values, values, v).sqrt_()

    def norm_of_shard(self, index: int, grad: Tensor) -> Tensor:
        """√(Σ P_j g_j²) of the elements that this rank's optimizer holds."""
        return self.roots(index, grad)

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
            root = widened(v).sqrt().div_(correction).add_(eps)  # not sqrt_: v belongs to the optimizer
            root = to_device(root.masked_fill_(v == 0, torch.inf).sqrt_(), x.device)
            # Each factor is divided by the fourth root of v̂ before they are multiplied, so that squares of small
            # gradients do not vanish in fp32.
            weighted = x / root
            total += (weighted.square_() if a is b else weighted.mul_(y / root)).sum(dtype=total.dtype)
        return total


def widened(values: Tensor) -> Tensor:
    """The values in fp32, or in fp64 if they are."""
    return values if values.dtype.itemsize >= 4 else values.float()
