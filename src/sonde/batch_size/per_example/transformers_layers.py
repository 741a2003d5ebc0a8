"""Rules for layers of the transformers library, found by their names: nothing is imported for them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from sonde.batch_size.per_example.gradients import OuterProducts, PerExample, wide
from sonde.batch_size.per_example.rules import (
    LINEAR,
    Inputs,
    LayerRule,
    add_positions,
    by_position,
    needs_examples,
    norm_bytes,
    of_scale_and_shift,
)


def transposed_linear(layer: Any, inputs: Inputs, grad: Tensor) -> dict[str, PerExample]:
    """`Conv1D` of GPT-2: a linear layer whose weight is [in, out]."""
    needs_examples(grad, 2)
    g, a = by_position(grad), by_position(inputs[0].to(grad.dtype))
    return {"weight": OuterProducts(a, g), "bias": add_positions(g, [1])}


def rms_norm(layer: Any, inputs: Inputs, grad: Tensor) -> dict[str, PerExample]:
    """`LlamaRMSNorm` and its likes: the input over its root mean square, times `weight` (or 1 + `weight`)."""
    needs_examples(grad, 2)
    x = wide(inputs[0])
    eps = vars(layer).get("variance_epsilon", vars(layer).get("eps"))
    normalised = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    return of_scale_and_shift(layer, normalised, grad, range(1, grad.dim() - 1))


_TRANSPOSED_LINEAR = LayerRule(transposed_linear, LINEAR.n_bytes)
_RMS_NORM = LayerRule(rms_norm, norm_bytes, adds_over_dim_1=lambda layer, grad: grad.dim() > 2)


def transformers_rule(layer: nn.Module) -> LayerRule | None:
    """The rule for a layer of transformers; None for other layers and those without a rule."""
    kind = type(layer)
    if not kind.__module__.startswith("transformers."):
        return None
    names = {name for name, _ in layer.named_parameters()}
    if kind.__name__ == "Conv1D" and names == {"weight", "bias"}:
        return _TRANSPOSED_LINEAR
    has_eps = not vars(layer).keys().isdisjoint(("variance_epsilon", "eps"))
    if kind.__name__.endswith("RMSNorm") and names == {"weight"} and has_eps:
        return _RMS_NORM
    return None
