"""Responses that lie one after another in one row of tokens, as rows of their own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

_MADE_ANEW = ("input_ids", "attention_mask", "position_ids")
"""Inputs that are not cut: a model counts positions by itself, from the first token that it attends to."""


@dataclass(frozen=True)
class UnpackedRows:
    """Rows that are padded on the left.

    Attributes:
        inputs: `input_ids` and `attention_mask`, [responses, length]; and what else has a value for each token.
        per_token: values of the last columns, from the earliest sampled token on; [responses, tokens]. They are 0 or
            False where a row has no token.
    """

    inputs: dict[str, Tensor]
    per_token: dict[str, Any]


def unpacked(
    inputs: Mapping[str, Tensor], per_token: Mapping[str, Tensor], prompt: Tensor, cu_seqlens: Tensor | None
) -> UnpackedRows:
    """Cut a row into its responses.

    Args:
        inputs: `input_ids`, and `position_ids` unless `cu_seqlens` is given; [tokens] or [1, tokens].
        per_token: "mask", and other values of every token; [tokens] or [1, tokens].
        prompt: each response's prompt, [responses].
        cu_seqlens: where responses begin, and where the last one ends, [responses + 1].

    Raises:
        ValueError: if lengths disagree, or a response has no sampled token or no token before it.
    """
    if "input_ids" not in inputs:
        raise ValueError(f"packed rows need 'input_ids', got {sorted(inputs)}: add it to inputs")
    for name, value in inputs.items():
        if not isinstance(value, Tensor):
            raise ValueError(
                f"inputs[{name!r}] of packed rows must be a tensor, [tokens] or [1, tokens], got a "
                f"{type(value).__name__}: pass torch.tensor(...) of it"
            )
    ids = _flat("input_ids", inputs["input_ids"], None)
    if cu_seqlens is None:
        if "position_ids" not in inputs:
            raise ValueError("nothing says where packed responses begin: pass cu_seqlens=, or 'position_ids' in inputs")
        positions = _flat("position_ids", inputs["position_ids"], len(ids))
        if len(positions) and int(positions[0]) != 0:
            raise ValueError(
                f"the row begins at position {int(positions[0])}, in the middle of a sequence: pass whole sequences, "
                "whose position_ids begin with 0, or cu_seqlens="
            )
        starts = (positions == 0).nonzero()[:, 0].tolist()
        ends = [*starts[1:], len(ids)] if starts else []
    else:
        if cu_seqlens.dim() != 1 or cu_seqlens.is_floating_point():
            raise ValueError(
                f"cu_seqlens must be whole numbers, [responses + 1], got {list(cu_seqlens.shape)} of "
                f"{cu_seqlens.dtype}: pass where each response begins, and where the last one ends"
            )
        bounds = cu_seqlens.tolist()
        starts, ends = bounds[:-1], bounds[1:]
        if (
            not bounds
            or bounds[0] != 0
            or bounds[-1] != len(ids)
            or any(a >= b for a, b in zip(starts, ends, strict=True))
        ):
            raise ValueError(f"cu_seqlens must rise from 0 to the row's {len(ids)} tokens, got {bounds}")
    flat = {name: _flat(name, t, len(ids)) for name, t in per_token.items()}
    while len(starts) > len(prompt) and not bool(flat["mask"][starts[-1] : ends[-1]].any()):
        del starts[-1], ends[-1]  # padding
    if len(starts) != len(prompt):
        raise ValueError(f"the row holds {len(starts)} responses, and prompt {len(prompt)} numbers: give one for each")
    width = max((b - a for a, b in zip(starts, ends, strict=True)), default=0)
    n_tokens = 0
    for row, (a, b) in enumerate(zip(starts, ends, strict=True)):
        sampled = flat["mask"][a:b].nonzero()[:, 0]
        if not len(sampled) or int(sampled[0]) == 0:
            what = "no sampled token" if not len(sampled) else "no token before its first sampled one"
            raise ValueError(f"response {row} of the row has {what}: correct the mask, or leave the response out")
        n_tokens = max(n_tokens, b - a - int(sampled[0]))

    def rows(values: Tensor, n: int) -> Tensor:
        made = values.new_zeros(len(starts), n)
        for row, (a, b) in enumerate(zip(starts, ends, strict=True)):
            part = values[max(a, b - n) : b]
            made[row, n - len(part) :] = part
        return made

    more = {name: _flat(name, t, len(ids)) for name, t in inputs.items() if name not in _MADE_ANEW}
    attention = rows(torch.ones_like(ids), width)
    return UnpackedRows(
        {"input_ids": rows(ids, width), "attention_mask": attention, **{n: rows(t, width) for n, t in more.items()}},
        {name: rows(values, n_tokens) for name, values in flat.items()},
    )


def _flat(name: str, tensor: Tensor, length: int | None) -> Tensor:
    """[tokens] from [tokens] or [1, tokens].

    Raises:
        ValueError: for another shape.
    """
    flat = tensor[0] if tensor.dim() == 2 and len(tensor) == 1 else tensor
    if flat.dim() != 1 or (length is not None and len(flat) != length):
        expected = "[tokens] or [1, tokens]" if length is None else f"[{length}] or [1, {length}], as input_ids"
        raise ValueError(f"{name} of packed rows must be {expected}, got {list(tensor.shape)}")
    return flat
