"""Squared gradient norms of every prompt and of the halves of its group, with one backward for each half."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from sonde.parallel.placements import is_fully_sharded
from sonde.parallel.process_groups import start_reduce
from sonde.policy.scoring.summed_gradient import gradients_taken


class NestedNorms:
    """Sums the gradients of parts to the gradients of wholes, and these to the gradient of all; and squares each.

    It has two buffers of parameter size: the sum of the current whole, and the sum of all wholes so far.

    Args:
        model: plain or in DDP.

    Raises:
        ValueError: for a sharded model.
    """

    def __init__(self, model: nn.Module) -> None:
        if any(map(is_fully_sharded, model.modules())):
            raise ValueError("gradients of single prompts cannot be read under FSDP: measure the model under DDP")
        self._model = model
        parameters = [p for p in model.parameters() if p.requires_grad]
        self._all = torch.zeros(sum(p.numel() for p in parameters), device=parameters[0].device)
        self._whole = torch.zeros_like(self._all)
        sizes = [p.numel() for p in parameters]
        self._views: dict[Tensor, Tensor] = dict(zip(parameters, self._whole.split(sizes), strict=True))

    def add_whole(self, function: Callable[[Any], Tensor], parts: Sequence[Any]) -> tuple[Tensor, list[Tensor]]:
        """Add the gradients of a whole's parts.

        Returns:
            |Σ ∇function(part)|², and |∇function(part)|² of each part; 0-dim, fp64.
        """
        self._whole.zero_()
        squares = []
        for part in parts:
            square = torch.zeros((), dtype=torch.float64, device=self._all.device)

            def take(parameter: Tensor, grad: Tensor, square: Tensor = square) -> None:
                # A part's square is known parameter by parameter; the whole's needs the sum over its parts first.
                flat = grad.reshape(-1).float()
                square.add_(flat.square().sum(dtype=torch.float64))
                self._views[parameter].add_(flat)

            with gradients_taken(self._model, take), torch.enable_grad():
                function(part).backward()
            squares.append(square)
        self._all.add_(self._whole)
        return self._whole.square().sum(dtype=torch.float64), squares

    def reduce_all(self, group: dist.ProcessGroup | None) -> Tensor:
        """The squared norm of the sum of all wholes of all ranks, 0-dim, fp64; by one all-reduce."""
        if work := start_reduce(self._all, group):
            work.wait()
        return self._all.square().sum(dtype=torch.float64)
