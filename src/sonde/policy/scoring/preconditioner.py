"""Adam's preconditioner P: the factor of each element's gradient, before the learning rate."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from sonde.parallel.placements import local_tensor
from sonde.parallel.unwrap import unwrap_optimizer
from sonde.policy.scoring.optimizer_step import Direction, has_second_moment, widened


class Preconditioner:
    """Multiplies vectors by P = 1/(√v̂ + ε). v̂ is the second moment of Adam's previous step; SGD's P is 1.

    An element that never had a gradient has no second moment: √v̂ ≤ ε. P would be 1/ε there, and its step about 10⁸
    times as large as any that Adam takes, since Adam adds the new gradient to the second moment first. So v̂ of such an
    element is what Adam's next step adds: (1 − β₂)/(1 − β₂ᵗ⁺¹) times the mean square of the update's gradient. Without
    a gradient in the update either, the element does not move, and P is 0.

    Args:
        optimizer: torch's SGD, Adam or AdamW; may be wrapped by Accelerate.
        parts: the update's mean gradient, measured on independent parts of its prompts. One part would do for a large
            batch. With two, an element whose gradient happens to cancel over the batch does not get a huge P.

    Raises:
        ValueError: for Adam before its first step, when no element has a second moment.
    """

    @torch.no_grad()
    def __init__(self, optimizer: Any, parts: Sequence[Direction]) -> None:
        self._is_adam = has_second_moment(optimizer)
        optimizer = unwrap_optimizer(optimizer)
        self._groups = {p: group for group in optimizer.param_groups for p in group["params"]}
        self._state: Mapping[Tensor, Mapping[str, Any]] = optimizer.state
        self._without_memory: dict[Tensor, tuple[Tensor, Tensor]] = {}
        """Where a parameter's elements have no second moment, and P of these elements."""
        if not self._is_adam:
            return
        if not any("exp_avg_sq" in state for state in self._state.values()):
            raise ValueError(
                "the optimizer has no second moment of any parameter: take a step first, or load its state"
            )
        for parameter in parts[0]:
            if parameter in self._groups:
                self._add_without_memory(parameter, [local_tensor(part[parameter]) for part in parts])

    @torch.no_grad()
    def __call__(self, vector: Direction) -> None:
        """Multiply a vector in place. P is 0 for parameters that the optimizer does not hold: it does not move them."""
        for parameter, part in vector.items():
            if parameter not in self._groups:
                part.zero_()
            elif self._is_adam:
                local, root = local_tensor(part), self._root(parameter)
                if parameter in self._without_memory:
                    where, p = self._without_memory[parameter]
                    root[where] = 1.0
                    local[where] = (widened(local[where]) * p).to(local.dtype)
                local.div_(root)

    def _root(self, parameter: Tensor) -> Tensor:
        """√v̂ + ε of the previous step, of this rank's elements."""
        group, state = self._groups[parameter], self._state.get(parameter, {})
        if "exp_avg_sq" not in state:
            return torch.full_like(widened(local_tensor(parameter.detach())), group["eps"])
        v = widened(local_tensor(state["max_exp_avg_sq" if group["amsgrad"] else "exp_avg_sq"]))
        corrected = v / (1.0 - group["betas"][1] ** float(state["step"]))
        root: Tensor = corrected.sqrt_().add_(group["eps"])
        return root

    def _add_without_memory(self, parameter: Tensor, gradients: Sequence[Tensor]) -> None:
        """Note the elements of a parameter that have no second moment, with their P."""
        group, root = self._groups[parameter], self._root(parameter)
        where = root <= 2.0 * group["eps"]  # √v̂ ≤ ε
        if not bool(where.any()):
            return
        beta2, n_steps = group["betas"][1], 1.0 + float(self._state.get(parameter, {}).get("step", 0.0))
        # A norm of the parts rather than their squares, which would vanish in fp32 for small gradients.
        size = torch.stack([widened(g[where]) for g in gradients]).norm(dim=0) / len(gradients) ** 0.5
        added = ((1.0 - beta2) / (1.0 - beta2**n_steps)) ** 0.5 * size
        updated = torch.maximum(root[where] - group["eps"], added) + group["eps"]
        self._without_memory[parameter] = where, torch.where(size > 0.0, 1.0 / updated, 0.0)
