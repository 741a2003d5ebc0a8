"""Units and loss tokens of torchtitan's micro-batches."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from sonde.integrations.guarded import Counts, as_counts

IGNORE_INDEX = -100
"""torchtitan's label of a position that is not in the loss."""
_LEAST = 1e-6
"""Loss tokens of a row or document without any: weights must be positive, and to count these would wait for a GPU."""

Batch = Mapping[str, Any]
UnitsOfBatch = Callable[[Batch, Tensor], Any]
"""Called with `input_dict` and `labels`, it returns the number of units, or the weight of each in the loss, [units]."""


def rows(input_dict: Batch, labels: Tensor) -> Tensor:
    """The loss tokens of each row, [rows]; of each document where torchtitan hands over one long row without a dim.

    Args:
        input_dict: of the micro-batch.
        labels: of its tokens, [rows, tokens], or [tokens] in torchtitan after 0.3.

    Raises:
        ValueError: if there is no dim of rows, and nothing shows where documents begin.
    """
    if labels.dim() == 1:
        return documents(input_dict, labels)
    return labels.ne(IGNORE_INDEX).flatten(1).sum(1)


def documents(input_dict: Batch, labels: Tensor) -> Tensor:
    """The loss tokens of each document, and zeros up to the number of tokens, [tokens of the micro-batch].

    torchtitan's text loaders fill rows with documents. A document that goes on in the next row counts there as another.

    Args:
        input_dict: of the micro-batch; its `positions`, of the labels' shape, begin again at 0 with each document.
        labels: of its tokens, [rows, tokens] or [tokens].

    Raises:
        ValueError: if there are no such positions.
    """
    positions = input_dict.get("positions")
    if not isinstance(positions, Tensor) or positions.shape != labels.shape:
        raise ValueError(
            "the micro-batch has no positions of the labels' shape, which show where documents begin: pass units= to "
            "attach"
        )
    begins = positions.eq(0)
    begins[..., 0] = True
    tokens = torch.zeros(labels.numel(), device=labels.device)
    return tokens.index_add_(0, begins.flatten().cumsum(0) - 1, labels.ne(IGNORE_INDEX).flatten().to(tokens))


def counts_of(units: UnitsOfBatch | None, input_dict: Batch, labels: Tensor) -> Counts:
    """The counts of a micro-batch as a piece, without waiting for the device.

    Args:
        units: of the user; None for `rows`.
        input_dict: of the micro-batch.
        labels: of its tokens, on the device.
    """
    found = (units or rows)(input_dict, labels)
    counts = as_counts(found) | {"weight": labels.ne(IGNORE_INDEX).sum().clamp(min=_LEAST)}
    if isinstance(of_each := counts.get("unit_weights"), Tensor):
        counts["units"] = of_each.gt(0).sum().clamp(min=1)
        counts["unit_weights"] = of_each.clamp(min=_LEAST / len(of_each))
    return counts


def counts_of_each(units: UnitsOfBatch | None, batches: Sequence[Batch], labels: Sequence[Tensor]) -> dict[str, Any]:
    """The counts of the micro-batches of one step of a pipeline schedule, for `NoiseScaleProbe.pieces`."""
    each = [counts_of(units, batch, label) for batch, label in zip(batches, labels, strict=True)]
    counts: dict[str, Any] = {name: [of_piece[name] for of_piece in each] for name in each[0]}
    counts["weights"] = counts.pop("weight")
    if isinstance(first := each[0]["units"], Mapping):
        counts["units"] = {name: [of_piece[name] for of_piece in counts["units"]] for name in first}
    return counts
