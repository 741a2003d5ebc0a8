"""Further metrics of the same gradients: one run logs its noise scale in several."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, final

import torch
from torch import Tensor

from sonde.batch_size.taps.tap import Problem
from sonde.parallel.devices import to_device, widened, zero_sums

Adds = Literal["squares", "norms"]
"""What adds up over parameters: squared norms, or the norms themselves."""
Norms = tuple[tuple[int, ...], Tensor]
"""Parameters, by index, and the norm of the gradient of each in each metric: [metrics, parameters]."""


class FurtherMetric(Protocol):
    """A norm of gradients that is taken beside the plain one."""

    name: str
    """The name that `attach(metric=...)` takes."""
    adds: Adds

    def norms(self, indices: Sequence[int], grads: Sequence[Tensor]) -> Tensor:
        """The norm of each of several gradients on one device, as hooks see them; [gradients]."""

    def norm_of_sum(self, index: int, a: Tensor, b: Tensor) -> Tensor:
        """The norm of the sum of two dense gradients of parameter `index`; 0-dim."""

    def norm_of_range(self, index: int, values: Tensor, start: int, shape: torch.Size, *, is_known: bool) -> Tensor:
        """The norm of some elements that follow each other in a gradient; 0-dim.

        Args:
            index: of the parameter.
            values: the elements, 1-D.
            start: the first of them.
            shape: of the whole gradient, as hooks see it.
            is_known: whether a backward of this rank has reached the parameter. Otherwise the elements may be 0 because
                no rank's has.
        """

    def norm_of_shard(self, index: int, grad: Tensor) -> Tensor:
        """The norm of the part of a gradient in `.grad` that this rank holds; 0-dim."""

    def take_problems(self) -> list[Problem]:
        """Problems that were met since the last call."""


@final
@dataclass(frozen=True)
class FurtherMetrics:
    """The metrics beside the first, in order, and what they take of a gradient."""

    metrics: tuple[FurtherMetric, ...]

    def norms(self, indices: Sequence[int], grads: Sequence[Tensor]) -> Norms:
        """The norms of several gradients on one device, as hooks see them."""
        return tuple(indices), self._stacked([metric.norms(indices, grads) for metric in self.metrics])

    def norms_of_sum(self, index: int, a: Tensor, b: Tensor) -> Norms:
        """The norms of the sum of two gradients of one parameter."""
        return (index,), self._stacked([metric.norm_of_sum(index, a, b).view(1) for metric in self.metrics])

    def norms_of_range(self, index: int, values: Tensor, start: int, shape: torch.Size, *, is_known: bool) -> Norms:
        """The norms of some elements that follow each other in a gradient; see `FurtherMetric.norm_of_range`."""
        norms = [metric.norm_of_range(index, values, start, shape, is_known=is_known) for metric in self.metrics]
        return (index,), self._stacked([norm.view(1) for norm in norms])

    def norms_of_shard(self, index: int, grad: Tensor) -> Norms:
        """The norms of what this rank holds of a gradient in `.grad`."""
        return (index,), self._stacked([metric.norm_of_shard(index, grad).view(1) for metric in self.metrics])

    @staticmethod
    def _stacked(norms: Sequence[Tensor]) -> Tensor:
        return torch.stack([widened(each) for each in norms])

    def join(self, parts: Sequence[Norms], n_parameters: int, device: torch.device) -> Tensor:
        """The norms of all parameters, 0 where there is none; [metrics, parameters].

        Args:
            parts: on any devices. If a parameter is in several, the last counts.
            n_parameters: number of parameters.
            device: of the result.
        """
        joined = zero_sums(len(self.metrics), n_parameters, device=device)
        if not parts:
            return joined
        norms = torch.cat([to_device(each, device).to(joined.dtype) for _, each in parts], 1)
        owners = tuple(index for indices, _ in parts for index in indices)
        last = tuple({index: at for at, index in enumerate(owners)}.values())
        if len(last) < len(owners):
            norms, owners = norms[:, _indices(last, device)], tuple(owners[at] for at in last)
        return joined.index_copy_(1, _indices(owners, device), norms)

    def join_ranges(self, parts: Sequence[Norms], n_parameters: int, device: torch.device) -> Tensor:
        """The norms of all parameters from those of ranges, 0 where there is none; [metrics, parameters].

        Args:
            parts: of ranges that do not overlap, on one device. A parameter may have several.
            n_parameters: number of parameters.
            device: of the result.
        """
        sums = zero_sums(len(self.metrics), n_parameters, device=device)
        if not parts:
            return sums
        norms = to_device(torch.cat([each for _, each in parts], 1), device).to(sums.dtype)
        owners = tuple(index for indices, _ in parts for index in indices)
        adds_squares = to_device(torch.tensor([[m.adds == "squares"] for m in self.metrics], device="cpu"), device)
        sums.index_add_(1, _indices(owners, device), torch.where(adds_squares, norms.square(), norms))
        return torch.where(adds_squares, sums.sqrt(), sums)

    def take_problems(self) -> list[list[Problem]]:
        """The problems that each metric has met since the last call."""
        return [metric.take_problems() for metric in self.metrics]


@functools.lru_cache(maxsize=64)  # backward visits parameters in the same order in every window
def _indices(indices: tuple[int, ...], device: torch.device) -> Tensor:
    return to_device(torch.tensor(indices, device="cpu"), device)
