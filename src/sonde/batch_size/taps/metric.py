"""The metric in which gradients are squared: the plain one, or Adam's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from sonde.batch_size.taps.squared_norms import Part, gradient_parts, norms, roots
from sonde.batch_size.taps.tap import Problem
from sonde.parallel.devices import accumulation_dtype

_CHUNK = 2**18
"""Elements weighted at a time, so that no temporary is of gradient size."""


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
        total = torch.zeros((), dtype=accumulation_dtype(a.device), device=a.device)
        # Upcast chunk by chunk, so that no temporary has the size of a gradient.
        for x, y in zip(a.reshape(-1).split(_CHUNK), b.reshape(-1).split(_CHUNK), strict=True):
            total += (x.to(total.dtype) * y).sum()
        return total

    def take_problems(self) -> list[Problem]:
        """Always empty: every gradient has a norm."""
        return []


class AdamMetric:
    """|g|² = Σ P_j g_j² with P = 1/(√v̂ + ε), where v̂ is the second moment of the optimizer's previous step.

    Before the optimizer's first step there is no v̂: norms are NaN, and the window is dropped. With amsgrad, v̂ is the
    largest second moment so far, as in the optimizer.

    Args:
        optimizer: Adam, AdamW or another that keeps `exp_avg_sq` and `step`, with `betas` and `eps` in its groups.
        parameters: in the order of the indices.

    Raises:
        ValueError: when a parameter is not in the optimizer, or its group has no `betas` and `eps`.
    """

    name = "adam"
    is_plain = False

    def __init__(self, optimizer: torch.optim.Optimizer, parameters: Sequence[Tensor]) -> None:
        self._optimizer = optimizer  # state and groups are looked up at each use: load_state_dict replaces both
        groups = {id(p): i for i, group in enumerate(optimizer.param_groups) for p in group["params"]}
        self._parameters = list(parameters)
        has_moments = [{"betas", "eps"} <= group.keys() for group in optimizer.param_groups]
        fits = all(id(p) in groups and has_moments[groups[id(p)]] for p in parameters)
        if not fits or isinstance(optimizer, torch.optim.Adamax):  # Adamax keeps a maximum instead of v̂
            raise ValueError(
                f"metric='adam' needs an optimizer of Adam's kind that holds every trainable parameter, "
                f"got {type(optimizer).__name__}: use Adam or AdamW, or metric='euclidean'"
            )
        self._groups = [groups[id(p)] for p in parameters]
        self._lacks_moments = False

    def take_problems(self) -> list[Problem]:
        """Whether a second moment was missing since the last call."""
        lacked, self._lacks_moments = self._lacks_moments, False
        return [Problem.NO_SECOND_MOMENT] if lacked else []

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
        state = self._optimizer.state.get(self._parameters[index], {})
        group = self._optimizer.param_groups[self._groups[index]]
        moment = "max_exp_avg_sq" if group.get("amsgrad") else "exp_avg_sq"
        if moment not in state:
            self._lacks_moments = True
            return torch.full((), torch.nan, dtype=accumulation_dtype(a.device), device=a.device)
        # `step` is a 0-dim tensor on the CPU, or on the device for fused and capturable optimizers. Either kind divides
        # a tensor on the device without being read on the host.
        correction = (1.0 - group["betas"][1] ** state["step"]) ** 0.5
        total = torch.zeros((), dtype=accumulation_dtype(a.device), device=a.device)
        # Chunk by chunk, so that no temporary has the size of a gradient.
        chunks = (t.reshape(-1).split(_CHUNK) for t in (a, b, state[moment]))
        for x, y, v in zip(*chunks, strict=True):
            root = v.sqrt().div_(correction).add_(group["eps"])  # not sqrt_: v belongs to the optimizer
            total += (x.to(root.dtype) * y).div_(root).sum()
        return total
