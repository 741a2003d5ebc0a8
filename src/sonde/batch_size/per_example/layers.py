"""Which layers of a model are measured, by which rule: those of `rules.py`, convolutions, and attention.

Which models cannot be measured is here too.
"""

from __future__ import annotations

import fnmatch
import inspect
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.grad import conv1d_weight, conv2d_weight, conv3d_weight

from sonde.batch_size.batch_dim import batch_dim
from sonde.batch_size.hooks import is_compiled
from sonde.batch_size.per_example.gradients import OuterProducts, PerExample, wide
from sonde.batch_size.per_example.rules import (
    BY_NAME,
    COMPUTED,
    RULES,
    GradientsOf,
    Inputs,
    LayerRule,
    NotCoveredError,
    add_positions,
    needs_examples,
    own_rule,
    tensor_of,
)
from sonde.parallel.placements import is_dtensor

_WEIGHT_GRADIENTS = {1: conv1d_weight, 2: conv2d_weight, 3: conv3d_weight}


def convolution(layer: Any, inputs: Inputs, grad: Tensor) -> dict[str, PerExample]:
    """`nn.Conv1d` to `3d`: at each place of the output, the weight meets one patch of the input.

    Where there are few places, the gradients stay factors: the output's gradient and the patches. Otherwise the weight
    gradients are formed by the kernel that backward itself uses, with the examples as groups of one convolution.
    """
    n_dims = len(layer.kernel_size)
    needs_examples(grad, n_dims + 2)
    # Under autocast the layer has cast its input to the dtype of its output.
    x, g = _padded(layer, wide(inputs[0].to(grad.dtype))), wide(grad)
    found: dict[str, PerExample] = {}
    if tensor_of(layer, "bias") is not None:
        found["bias"] = add_positions(g, range(2, g.dim()))
    weight = tensor_of(layer, "weight")
    if weight is None or not weight.requires_grad:
        return found
    if _stays_factors(layer, grad):
        found["weight"] = OuterProducts(g.flatten(2).unflatten(1, (layer.groups, -1)).mT, _patches(layer, x))
        return found
    n = len(g)
    weight_gradient: Any = _WEIGHT_GRADIENTS[n_dims]
    shape = (n * weight.shape[0], *weight.shape[1:])
    options = {"stride": layer.stride, "dilation": layer.dilation, "groups": n * layer.groups}
    formed = weight_gradient(x.flatten(0, 1)[None], shape, g.flatten(0, 1)[None], **options)
    found["weight"] = formed.unflatten(0, (n, -1))
    return found


def _padded(layer: Any, x: Tensor) -> Tensor:
    if layer.padding == "valid":
        return x
    pads: list[int] = []
    for d, size in reversed(list(enumerate(layer.kernel_size))):  # F.pad starts at the last dim
        if layer.padding == "same":
            total = layer.dilation[d] * (size - 1)
            pads += [total // 2, total - total // 2]
        else:
            pads += [layer.padding[d]] * 2
    mode = "constant" if layer.padding_mode == "zeros" else layer.padding_mode
    return F.pad(x, pads, mode=mode) if any(pads) else x


def _patches(layer: Any, x: Tensor) -> Tensor:
    """What the weight meets at each place of the output: [examples, groups, places, columns of the weight]."""
    n_dims = len(layer.kernel_size)
    for d in range(n_dims):
        reach = layer.dilation[d] * (layer.kernel_size[d] - 1) + 1
        x = x.unfold(2 + d, reach, layer.stride[d])[..., :: layer.dilation[d]]
    # [examples, channels, *places, *kernel] → [examples, groups, *places, channels of a group, *kernel]
    by_group = x.unflatten(1, (layer.groups, -1)).movedim(2, 2 + n_dims)
    patches: Tensor = by_group.flatten(2, 1 + n_dims).flatten(3)
    return patches


def _n_columns(layer: Any) -> int:
    """Columns of the weight as a matrix."""
    return int(layer.in_channels // layer.groups * math.prod(layer.kernel_size))


def _stays_factors(layer: Any, grad: Tensor) -> bool:
    n_places = math.prod(grad.shape[2:])
    n_rows, n_columns = int(layer.out_channels) // int(layer.groups), _n_columns(layer)
    return bool(n_places * (n_rows + n_columns) < n_rows * n_columns)


def _convolution_bytes(layer: Any, inputs: Inputs, grad: Tensor) -> int:
    n_places, n_columns = math.prod(grad.shape[2:]), _n_columns(layer)
    n_rows: int = layer.groups * n_places if _stays_factors(layer, grad) else layer.out_channels
    # The input is padded, and both are copied to fp32 where they are not.
    of_input: int = 2 * inputs[0][0].numel()
    return 4 * (n_rows * n_columns + of_input + (grad[0].numel() if grad.dtype.itemsize < 4 else 0))


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


def _attention_bytes(layer: nn.MultiheadAttention, inputs: Inputs, grad: Tensor) -> int:
    n_queries, n_keys = inputs[0].shape[1], inputs[1].shape[1]
    n_scores: int = layer.num_heads * n_queries * n_keys
    n_features: int = layer.embed_dim * (n_queries + n_keys)
    return 4 * (4 * n_scores + 9 * n_features)


_LARGER: dict[type[nn.Module], LayerRule] = {
    **{kind: LayerRule(convolution, _convolution_bytes) for kind in (nn.Conv1d, nn.Conv2d, nn.Conv3d)},
    nn.MultiheadAttention: LayerRule(attention, _attention_bytes, arrange=_arrange, example_dim=batch_dim),
}
"""The rules that are in this file."""


def rules_by_type(own: Mapping[type[nn.Module], GradientsOf]) -> dict[type[nn.Module], LayerRule]:
    """The rules of all types of layers that have one.

    Args:
        own: rules of the user, which replace those of sonde.
    """
    return {**RULES, **_LARGER, **{kind: own_rule(rule) for kind, rule in own.items()}}


def rule_of(layer: nn.Module, rules: dict[type[nn.Module], LayerRule]) -> LayerRule | None:
    """The rule of a layer's type, or of the type that it has its forward from; None without one.

    Args:
        layer: of any type.
        rules: the result of `rules_by_type`.
    """
    for kind in type(layer).__mro__:
        if kind in rules:
            return rules[kind] if type(layer).forward is kind.forward else None
    if type(layer).__module__.startswith("transformers."):
        held = {name for name, _ in layer.named_parameters()}
        for pattern, (names, rule) in BY_NAME.items():
            if fnmatch.fnmatchcase(type(layer).__name__, pattern) and held == names:
                return rule
    return None


def refuse_cut(parameters: Mapping[str, Tensor], leaves: Sequence[Tensor]) -> None:
    """Refuse parameters of which forward uses a part only.

    Args:
        parameters: what is measured, by name.
        leaves: the tensor that forward uses for each of them.

    Raises:
        ValueError: naming the first.
    """
    for name, leaf in zip(parameters, leaves, strict=True):
        if is_dtensor(leaf):
            raise ValueError(
                f"per-example norms need whole parameters in forward, and {name!r} is cut over ranks there: measure "
                "its pieces, as sonde.attach does"
            )


def refuse_model(model: nn.Module) -> None:
    """Refuse a model whose layers are not called one by one.

    Raises:
        ValueError: naming the first layer.
    """
    for name, layer in model.named_modules():
        is_graphed = getattr(vars(layer).get("forward"), "__module__", None) == "torch.cuda.graphs"
        if is_graphed or is_compiled(layer):
            how = "replayed as a whole by torch.cuda.make_graphed_callables" if is_graphed else "compiled"
            raise ValueError(
                f"per-example norms need the calls of single layers, and {name or 'the model'!r} is {how}: measure "
                "without that, or measure its pieces, as sonde.attach does with two or more in a window"
            )
