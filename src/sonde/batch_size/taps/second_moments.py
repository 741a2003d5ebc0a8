"""Adam's second moments, as the optimizer holds them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from sonde.parallel.devices import widened
from sonde.parallel.placements import local_tensor


class SecondMoments:
    """The second moments of an optimizer's previous step.

    Args:
        optimizer: keeps `exp_avg_sq` and `step`, and has `betas` and `eps` in its groups.
        parameters: that the optimizer steps, in the order of the indices.

    Raises:
        ValueError: when a parameter is not in the optimizer, or its group has no `betas` and `eps`.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, parameters: Sequence[Tensor]) -> None:
        self._optimizer = optimizer  # state and groups are looked up at each use: load_state_dict replaces both
        self._parameters = list(parameters)
        groups = {id(p): i for i, group in enumerate(optimizer.param_groups) for p in group["params"]}
        has_moments = [{"betas", "eps"} <= group.keys() for group in optimizer.param_groups]
        fits = all(id(p) in groups and has_moments[groups[id(p)]] for p in parameters)
        if not fits or isinstance(optimizer, torch.optim.Adamax):  # Adamax keeps a maximum instead of v̂
            raise ValueError(
                f"metric='adam' needs an optimizer of Adam's kind that holds every trainable parameter, "
                f"got {type(optimizer).__name__}: use Adam or AdamW, or metric='euclidean'"
            )
        self._groups = [groups[id(p)] for p in parameters]

    def scale(self, index: int) -> tuple[Any, float]:
        """The bias correction of √v, a number or 0-dim tensor, and ε, of a parameter that has a second moment."""
        group = self._optimizer.param_groups[self._groups[index]]
        # `step` is a 0-dim tensor on the CPU, or on the device for fused and capturable optimizers. Either kind divides
        # a tensor on the device without being read on the host.
        step = self._optimizer.state[self._parameters[index]]["step"]
        if isinstance(step, Tensor):  # in fp32, 1 − β₂ of the first step would keep 4 digits
            step = widened(step)
        return (1.0 - group["betas"][1] ** step) ** 0.5, group["eps"]

    def of(self, index: int) -> Tensor | None:
        """v of what this rank holds of a parameter; None where the optimizer has none."""
        state = self._optimizer.state.get(self._parameters[index], {})
        group = self._optimizer.param_groups[self._groups[index]]
        moment = state.get("max_exp_avg_sq" if group.get("amsgrad") else "exp_avg_sq")
        return None if moment is None else local_tensor(moment)
