"""The squared norms of each example's gradient in one piece, and which parameters they do not cover."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sonde.batch_size.per_example.projection import rounding, tolerance
from sonde.batch_size.per_example.uses import Uses
from sonde.parallel.devices import to_device


@dataclass(frozen=True)
class PerExampleSquares:
    """Squared norms of each example's own gradient, for every parameter.

    Attributes:
        names: the parameters, in the model's order.
        sq_norms: |h_b|², [parameters, examples], in fp64 where the device has it. h_b is what example b has added to
            `.grad` in this piece: under a GradScaler still scaled, under a mean over B examples already divided by B.
            A row is NaN if its parameter is not covered, and 0 if it had no gradient.
        unexplained: the part of each parameter's gradient that no rule has seen, [parameters]: 0 to rounding for a
            parameter that is covered, NaN where its gradient or its squares are out of range.
        tolerances: how large `unexplained` may be, [parameters].
        reasons: why parameters are not covered, as far as that is known without waiting for the device.
        projections: random projections of each example's gradient, as far as a rule has seen it; [examples, 4].
    """

    names: tuple[str, ...]
    sq_norms: Tensor
    unexplained: Tensor
    tolerances: Tensor
    reasons: Mapping[str, str]
    projections: Tensor

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
                else "its gradient is not finite, or its squares are beyond the range of fp32"
            )
        return {name: found[name] for name in self.names if name in found}

    def totals(self) -> Tensor:
        """|h_b|² over all covered parameters, [examples]. Say what `not_covered()` says beside it."""
        return self.sq_norms.nansum(0)


def compared(
    names: tuple[str, ...], uses: Sequence[Uses], reasons: Mapping[str, str], projections: Tensor
) -> PerExampleSquares:
    """Compare what the rules have seen with the whole gradients, and blank the rows that are not covered.

    Args:
        names: the parameters.
        uses: what the piece has of each.
        reasons: why parameters are not covered, as far as known.
        projections: of each example's gradient, [examples, projections].
    """
    n_examples, n_projections = projections.shape

    def column(values: Iterable[Tensor | None], n: int) -> Tensor:
        nothing = projections.new_zeros(n)
        return torch.stack([nothing if v is None else to_device(v, projections.device) for v in values])

    def on_device(values: list[float]) -> Tensor:
        return to_device(torch.tensor(values, dtype=projections.dtype, device="cpu"), projections.device)

    # A parameter without a gradient adds nothing, whatever its layers did: `backward(inputs=…)` leaves it out.
    has_row = [each.whole is not None and each.sizes == {n_examples} for each in uses]
    squares = column((each.sq_norms if has else None for each, has in zip(uses, has_row, strict=True)), n_examples)
    whole = column((each.whole for each in uses), n_projections)
    seen = column((None if each.whole is None else each.seen for each in uses), n_projections)
    tolerances = on_device([tolerance(each.dtypes, each.parameter.device) for each in uses])
    # A bias of attention's keys, for one, has a gradient that is nothing but rounding of the layer's largest gradient.
    part_of_layer = on_device([rounding(each.dtypes) for each in uses]) / tolerances
    is_known = on_device([float(name not in reasons) for name in names]) > 0
    # A projection has the variance |H|². Where examples cancel, rounding goes by their own norms, not by the sum's.
    scale = whole.square().sum(1) + n_projections * squares.sum(1)
    difference = (whole - seen).square().sum(1)
    part = (difference / (scale + part_of_layer.square() * _largest_in_layer(names, scale))).sqrt()
    # |Σ h_b|² ≤ B Σ |h_b|², and a projection is hardly ever ten times as large as expected. If it is, squares have
    # vanished.
    has_vanished = whole.square().sum(1) > 100 * n_projections * n_examples * squares.sum(1)
    is_out_of_range = has_vanished | ~squares.isfinite().all(1)
    unexplained = torch.where(difference == 0, 0.0, part).masked_fill(is_out_of_range, float("nan"))
    is_covered = is_known & (unexplained <= tolerances)
    return PerExampleSquares(
        names, squares.where(is_covered[:, None], float("nan")), unexplained, tolerances, dict(reasons), projections
    )


def _largest_in_layer(names: tuple[str, ...], values: Tensor) -> Tensor:
    """For each parameter, the largest finite value in its layer, by the names: [parameters]."""
    numbers: dict[str, int] = {}
    layers = [numbers.setdefault(name.rpartition(".")[0], len(numbers)) for name in names]
    index = to_device(torch.tensor(layers, device="cpu"), values.device)
    finite = values.nan_to_num(nan=0.0, posinf=0.0)
    return torch.zeros_like(values).scatter_reduce(0, index, finite, "amax")[index]
