"""The step that parameters have taken."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor


class StepMeter:
    """Copies parameters, and measures how far they have moved since."""

    @torch.no_grad()
    def __init__(self, parameters: Iterable[Tensor]) -> None:
        self._before = {p: p.detach().clone() for p in parameters}

    @torch.no_grad()
    def step(self) -> dict[Tensor, Tensor]:
        """θ⁺ − θ, in fp32 at least."""
        wide = {p: torch.promote_types(p.dtype, torch.float32) for p in self._before}
        return {p: p.detach().to(wide[p]) - old.to(wide[p]) for p, old in self._before.items()}
