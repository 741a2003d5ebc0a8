"""What a forecast of the entropy coefficient must know of TRL's loss: its bonus, and how its gradient was clipped."""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor


def entropy_coefficient(trainer: Any) -> float:
    """The coefficient of the entropy bonus in the window that begins.

    TRL's adaptive controller changes the coefficient at the end of a window, and applies it only while the entropy of
    the window before is at or below its target.
    """
    coefficient = float(getattr(trainer, "entropy_coef", 0.0))
    if getattr(trainer, "use_adaptive_entropy", False) and trainer._last_world_entropy > trainer.args.entropy_target:
        return 0.0
    return coefficient


def clip_coefficient(norm: float | Tensor, max_norm: float) -> float | Tensor:
    """The factor by which torch clips gradients of this norm; no host synchronisation.

    It is 1 for a norm that is not finite: the step is not finite either, and says so itself.

    Example:
        >>> round(clip_coefficient(2.0, 1.0), 3), clip_coefficient(0.5, 1.0), clip_coefficient(math.nan, 1.0)
        (0.5, 1.0, 1.0)
    """
    if math.isinf(max_norm):
        return 1.0
    factor = max_norm / (norm + 1e-6)
    if isinstance(factor, Tensor):
        return factor.where(factor > 0.0, 1.0).clamp(max=1.0)
    return min(factor, 1.0) if factor > 0.0 else 1.0
