"""The clip that ends a window: what was asked for, and the norm that it gives."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

from sonde.batch_size.log import CLIP_FRACTION, NORM
from sonde.gradient_norm.global_norm import GlobalNorm, global_norm
from sonde.gradient_norm.plan import NormPlan
from sonde.gradient_norm.scaling import Nonfinite, check_options, check_order, clip_measured_


@dataclass(frozen=True)
class WindowClip:
    """A clip by the joint norm of all gradients.

    Attributes:
        max_norm: the largest norm allowed; None only measures.
        order: p of the p-norm.
        nonfinite: what to do when the norm is not finite.
    """

    max_norm: float | None
    order: float
    nonfinite: Nonfinite

    def apply(self, plan: NormPlan, measured: GlobalNorm | None = None) -> Tensor:
        """Clip.

        Args:
            plan: the gradients.
            measured: their 2-norm, where it has been measured.

        Returns:
            The norm before clipping.

        Raises:
            RuntimeError: when the norm is not finite, if that was asked for.
        """
        if measured is None or self.order != 2.0:
            measured = global_norm(plan, self.order)
        return clip_measured_(plan, measured, self.max_norm, nonfinite=self.nonfinite)

    def scalars(self, norm: Tensor) -> dict[str, float | Tensor]:
        """What the log gets of the clip, by metric name. The log has the norm for p = 2 alone."""
        most = math.inf if self.max_norm is None else self.max_norm
        clipped: dict[str, float | Tensor] = {CLIP_FRACTION: norm > most}
        return clipped | {NORM: norm} if self.order == 2.0 else clipped


def checked_clip(max_norm: float | None, norm_type: float, *, error_if_nonfinite: bool) -> WindowClip:
    """A clip with the arguments of `clip_grad_norm_`.

    Raises:
        ValueError: when `max_norm` is negative or NaN, or `norm_type` is neither from above 0 to 6 nor infinite.
    """
    nonfinite: Nonfinite = "raise" if error_if_nonfinite else "ignore"
    max_norm, order = check_options(max_norm, nonfinite, None), check_order(norm_type)
    return WindowClip(max_norm, order, nonfinite)
