"""The squared norms of each example's gradient in one piece, and which parameters they do not cover."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class PerExampleSquares:
    """Squared norms of each example's own gradient, for every parameter.

    Attributes:
        names: the parameters, in the model's order.
        sq_norms: |h_b|², [parameters, examples], in fp64 where the device has it. h_b is what example b has added to
            `.grad` in this piece: under a GradScaler still scaled, under a mean over B examples already divided by B.
            A row is NaN if its parameter is not covered, and 0 if it had no gradient.
        unexplained: the part of each parameter's gradient that no rule has seen, [parameters]: 0 to rounding for a
            parameter that is covered.
        tolerances: how large `unexplained` may be, [parameters].
        reasons: why parameters are not covered, as far as that is known without waiting for the device.
    """

    names: tuple[str, ...]
    sq_norms: Tensor
    unexplained: Tensor
    tolerances: Tensor
    reasons: Mapping[str, str]

    def not_covered(self) -> dict[str, str]:
        """The parameters that are not covered, and why. This waits for the device."""
        found = dict(self.reasons)
        of_each = zip(self.names, self.unexplained.tolist(), self.tolerances.tolist(), strict=True)
        for name, part, most in of_each:
            if name in found or part <= most:
                continue
            found[name] = (
                f"{100 * part:.2g} % of its gradient is not what the rules have seen: it is used outside its layer's "
                "forward, or a hook changed its gradient, or its layer's backward lost as much to rounding in 16 bits"
                if part == part
                else "its gradient is not finite"
            )
        return {name: found[name] for name in self.names if name in found}

    def totals(self) -> Tensor:
        """|h_b|² over all covered parameters, [examples]. Say what `not_covered()` says beside it."""
        return self.sq_norms.nansum(0)


def assemble(
    names: tuple[str, ...],
    rows: list[Tensor],
    whole: Tensor,
    seen: Tensor,
    tolerances: list[float],
    reasons: Mapping[str, str],
) -> PerExampleSquares:
    """Compare what the rules have seen with the whole gradients, and blank the rows that are not covered.

    Args:
        names: the parameters.
        rows: |h_b|² of each parameter, each [examples].
        whole: projections of the whole gradients, [parameters, projections].
        seen: the same of what the rules have seen.
        tolerances: the largest part that may be rounding.
        reasons: why parameters are not covered, as far as known.
    """
    squares = torch.stack(rows)
    # A projection has the variance |H|². Where examples cancel, rounding goes by their own norms, not by the sum's.
    scale = whole.square().sum(1) + whole.shape[1] * squares.sum(1)
    difference = (whole - seen).square().sum(1)
    unexplained = torch.where(difference == 0, difference, difference / scale).sqrt()
    largest = torch.tensor(tolerances, dtype=squares.dtype).to(squares.device, non_blocking=True)
    is_known = torch.tensor([name not in reasons for name in names]).to(squares.device, non_blocking=True)
    is_covered = is_known & (unexplained <= largest)
    return PerExampleSquares(
        names, squares.where(is_covered[:, None], float("nan")), unexplained, largest, dict(reasons)
    )
