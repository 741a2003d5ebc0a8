"""The rule of `nn.MultiheadAttention`, whose projections are no calls of layers."""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sonde.batch_size.batch_dim import batch_dim
from sonde.batch_size.per_example.gradients import OuterProducts, PerExample, wide
from sonde.batch_size.per_example.rules import COMPUTED, Inputs, LayerRule, NotCoveredError, add_positions


def _arrange(layer: nn.MultiheadAttention, args: Inputs, keywords: dict[str, Any]) -> Inputs:
    """Query, key, value [examples, positions, features]; masks [examples, heads or 1, queries or 1, keys]."""
    call = inspect.signature(nn.MultiheadAttention.forward).bind(layer, *args, **keywords)
    call.apply_defaults()
    given = call.arguments
    query, key, value = given["query"], given["key"], given["value"]
    _refuse(layer, query)
    if not layer.batch_first:
        query, key, value = (t.transpose(0, 1) for t in (query, key, value))
    pairs = given["attn_mask"]
    if given["is_causal"] and given["key_padding_mask"] is None and not given["need_weights"]:
        # The layer then goes by this hint, and never reads the mask.
        pairs = torch.ones(query.shape[1], key.shape[1], dtype=torch.bool, device=query.device).triu(1)
    if pairs is not None:
        n = len(query)
        pairs = pairs.expand(n, 1, *pairs.shape) if pairs.dim() == 2 else pairs.unflatten(0, (n, layer.num_heads))
    keys = given["key_padding_mask"]
    masks = (pairs, None if keys is None else keys[:, None, None, :])
    return query, key, value, *(mask for mask in masks if mask is not None)


def _refuse(layer: nn.MultiheadAttention, query: Tensor) -> None:
    if any("parametrizations" in dict(part.named_children()) for part in layer.modules()):
        raise NotCoveredError(COMPUTED)
    if query.dim() != 3 or query.is_nested:
        raise NotCoveredError("attention was called without a dim of examples: give [examples, positions, features]")
    if layer.dropout > 0 and layer.training:
        raise NotCoveredError(
            f"nn.MultiheadAttention(dropout={layer.dropout}) draws a mask that cannot be drawn again: "
            "set its dropout to 0"
        )
    if layer.bias_k is not None or layer.add_zero_attn:
        raise NotCoveredError("add_bias_kv and add_zero_attn have no rule: build nn.MultiheadAttention without them")


def attention(layer: nn.MultiheadAttention, inputs: Inputs, grad: Tensor) -> dict[str, PerExample]:
    """Computes the attention again, then its gradients by hand: at the projections of query, key, value, and output."""
    query, key, value, *masks = inputs
    dtype = grad.dtype  # under autocast, that of every projection
    given = [t.to(dtype) for t in (query, key, value)]
    # [examples, heads, positions, features of a head]
    q, k, v = (
        _split(layer, wide(F.linear(x, w.to(dtype), None if b is None else b.to(dtype))))
        for x, (w, b) in zip(given, _projections(layer), strict=True)
    )
    scale = 1 / math.sqrt(layer.head_dim)
    attended = _softmax(scale * (q @ k.mT), masks)
    output = _join(attended @ v).to(dtype)
    g = _split(layer, wide(grad @ layer.out_proj.weight.to(dtype)))
    # With P = softmax(s q kᵀ): ∂L/∂v = Pᵀ g, ∂L/∂P = g vᵀ, ∂L/∂(s q kᵀ) = P (∂L/∂P − Σ P ∂L/∂P).
    grad_v = attended.mT @ g
    slope = g @ v.mT
    slope = attended * (slope - (slope * attended).sum(-1, keepdim=True)) * scale
    grads = [_join(t).to(dtype) for t in (slope @ k, slope.mT @ q, grad_v)]
    found: dict[str, PerExample] = {"out_proj.weight": OuterProducts(grad, output)}
    if layer.out_proj.bias is not None:
        found["out_proj.bias"] = add_positions(grad, [1])
        found["in_proj_bias"] = torch.cat([add_positions(g, [1]) for g in grads], dim=1)
    return found | _of_inputs(layer, grads, given)


def _of_inputs(layer: nn.MultiheadAttention, grads: list[Tensor], given: list[Tensor]) -> dict[str, PerExample]:
    if layer.in_proj_weight is None:
        names = ("q_proj_weight", "k_proj_weight", "v_proj_weight")
        return {name: OuterProducts(g, x) for name, g, x in zip(names, grads, given, strict=True)}
    if given[0].shape[1] == given[1].shape[1]:
        # One group of rows for each of query, key and value.
        return {"in_proj_weight": OuterProducts(torch.stack(grads, dim=1), torch.stack(given, dim=1))}
    # Queries have other positions than keys and values. Zeros in the gradient's rows keep them apart.
    parts = [F.pad(g, (i * layer.embed_dim, (2 - i) * layer.embed_dim)) for i, g in enumerate(grads)]
    return {"in_proj_weight": OuterProducts(torch.cat(parts, dim=1), torch.cat(given, dim=1))}


def _projections(layer: nn.MultiheadAttention) -> Iterator[tuple[Tensor, Tensor | None]]:
    """Weight and bias of query, key and value."""
    packed, biases = layer.in_proj_weight, layer.in_proj_bias
    apart = (layer.q_proj_weight, layer.k_proj_weight, layer.v_proj_weight)
    return zip(
        apart if packed is None else packed.chunk(3), [None] * 3 if biases is None else biases.chunk(3), strict=True
    )


def _softmax(scores: Tensor, masks: list[Tensor]) -> Tensor:
    """Attention of every query to every key; a query that may attend to none gets zeros."""
    for mask in masks:
        scores = scores.masked_fill(mask, -math.inf) if mask.dtype == torch.bool else scores + mask
    return scores.softmax(-1).masked_fill((scores == -math.inf).all(-1, keepdim=True), 0.0)


def _split(layer: nn.MultiheadAttention, x: Tensor) -> Tensor:
    split: Tensor = x.unflatten(-1, (layer.num_heads, -1)).transpose(1, 2)
    return split


def _join(x: Tensor) -> Tensor:
    return x.transpose(1, 2).flatten(2)


def _bytes(layer: nn.MultiheadAttention, inputs: Inputs, grad: Tensor) -> int:
    n_queries, n_keys = inputs[0].shape[1], inputs[1].shape[1]
    n_scores: int = layer.num_heads * n_queries * n_keys
    n_features: int = layer.embed_dim * (n_queries + n_keys)
    return 4 * (4 * n_scores + 9 * n_features)


RULES: dict[type[nn.Module], LayerRule] = {
    nn.MultiheadAttention: LayerRule(attention, _bytes, arrange=_arrange, example_dim=batch_dim)
}
