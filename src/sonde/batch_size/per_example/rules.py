"""Rules: how a layer's input and the gradient of its output give each example's gradient of its parameters.

A rule is one small function for each type of layer. `RULES` lists those that are built in, and `_BY_NAME` those of
layers of transformers.
"""

from __future__ import annotations

import fnmatch
import functools
import inspect
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.grad import conv1d_weight, conv2d_weight, conv3d_weight

from sonde.batch_size.batch_dim import batch_dim
from sonde.batch_size.per_example.gradients import OuterProducts, PerExample, RowSums, chunks, wide

Inputs = tuple[Any, ...]
"""What a layer was called with. Tensors have the examples in their first dim, and no graph."""

GradientsOf = Callable[[Any, Inputs, Tensor], Mapping[str, PerExample]]
"""(layer, inputs, gradient of the output) → each example's gradient, by the parameter's name within the layer."""


_COMPUTED = "a parametrization computes its tensors, and would compute them again when they are read"
"""Why a layer is not covered whose rule needs the values of its tensors."""


class NotCoveredError(Exception):
    """Raised by a rule for a layer whose per-example gradients it cannot give. The message says why."""


def _as_called(layer: Any, inputs: Inputs, keywords: dict[str, Any]) -> Inputs:
    return (*inputs, *keywords.values())


@dataclass(frozen=True)
class LayerRule:
    """A rule and what is needed to apply it in chunks.

    Attributes:
        gradients: the rule itself.
        n_bytes: memory that `gradients` takes for each example, of (layer, inputs, gradient of the output).
        arrange: the layer's positional and keyword arguments as `Inputs`, with the examples first.
        example_dim: the dim of the output that holds the examples.
        adds_over_dim_1: whether gradients of slices along dim 1 add up to the whole gradient.
        may_read_time_first: whether the input may be [time, examples, …] too, as linear layers do not mind.
        rows: for a table, which rows each example looks up, [examples, positions].
    """

    gradients: GradientsOf
    n_bytes: Callable[[Any, Inputs, Tensor], int]
    arrange: Callable[[Any, Inputs, dict[str, Any]], Inputs] = _as_called
    example_dim: Callable[[Any], int] = lambda layer: 0
    adds_over_dim_1: Callable[[Any, Tensor], bool] = lambda layer, grad: False
    may_read_time_first: bool = False
    rows: Callable[[Any, Inputs], Tensor] | None = None


def _own_rule(gradients: GradientsOf) -> LayerRule:
    """The rule of a user's own layer: called in fp32 or better, and in chunks if the layer takes a single tensor."""

    def in_fp32(layer: nn.Module, inputs: Inputs, grad: Tensor) -> Mapping[str, PerExample]:
        floats = tuple(wide(t) if isinstance(t, Tensor) and t.is_floating_point() else t for t in inputs)
        return gradients(layer, floats, wide(grad))

    def n_bytes(layer: nn.Module, inputs: Inputs, grad: Tensor) -> int:
        tensors = [t for t in inputs if isinstance(t, Tensor)]
        if len(tensors) != 1 or len(tensors[0]) != len(grad):
            return 0  # which of them hold the examples is not known, so they are not cut
        return 4 * (3 * tensors[0][0].numel() + 3 * grad[0].numel() + sum(p.numel() for p in layer.parameters()))

    return LayerRule(in_fp32, n_bytes)


def layer_gradients(
    rule: LayerRule, layer: nn.Module, inputs: Inputs, grad: Tensor, staging_bytes: int
) -> Iterator[tuple[slice, Mapping[str, PerExample]]]:
    """Apply a rule to some examples at a time.

    Args:
        rule: of this type of layer.
        layer: the layer.
        inputs: as `rule.arrange` gives them.
        grad: gradient of the layer's output, [examples, …].
        staging_bytes: memory that a chunk may take. A single example may take more.

    Yields:
        Which examples, and their gradients by the parameter's name.
    """
    n_bytes = rule.n_bytes(layer, inputs, grad)
    for s in chunks(len(grad), n_bytes, staging_bytes):
        if (s.stop - s.start) * n_bytes > staging_bytes and rule.adds_over_dim_1(layer, grad):
            total: dict[str, PerExample] = {}
            for t in chunks(grad.shape[1], n_bytes // grad.shape[1], staging_bytes):
                part = rule.gradients(layer, _cut(inputs, (s, t)), grad[s, t])
                total = {name: total[name] + g if name in total else g for name, g in part.items()}  # type: ignore[operator]
            yield s, total
        elif s == slice(0, len(grad)):
            yield s, rule.gradients(layer, inputs, grad)
        else:
            yield s, rule.gradients(layer, _cut(inputs, (s,)), grad[s])


def _cut(inputs: Inputs, where: tuple[slice, ...]) -> Inputs:
    return tuple(t[where] if isinstance(t, Tensor) else t for t in inputs)


def _add_positions(tensor: Tensor, dims: Sequence[int]) -> Tensor:
    """The sum over some dims, in fp32 or better."""
    return tensor.sum(tuple(dims), dtype=torch.float32 if tensor.dtype.itemsize < 4 else None) if dims else wide(tensor)


def _by_position(tensor: Tensor) -> Tensor:
    """[examples, …, features] as [examples, positions, features]."""
    return tensor.flatten(1, -2) if tensor.dim() > 2 else tensor[:, None]


def _tensor_of(layer: Any, name: str) -> Tensor | None:
    """A layer's own parameter or buffer; None without one.

    Not read as an attribute: there may be a parametrization or a property in its place, which computes at each read. It
    may iterate, as torch's `spectral_norm` does, or draw random numbers, so that the training would change.
    """
    held = itertools.chain(
        layer.named_parameters(recurse=False, remove_duplicate=False),
        layer.named_buffers(recurse=False, remove_duplicate=False),
    )
    return dict(held).get(name)


def _needs_examples(tensor: Tensor, n_dims: int) -> None:
    """Refuse a layer that was called without a dim of examples."""
    if tensor.dim() < n_dims:
        raise NotCoveredError(
            f"its output has {tensor.dim()} dims where {n_dims} are needed: call the layer with the examples in the "
            "first dim"
        )


def _copied_bytes(*tensors: Tensor, dtype: torch.dtype | None = None) -> int:
    """Bytes for each example of the tensors that a rule copies: to another dtype, or to another order in memory."""
    needs_copy = [t for t in tensors if not t[0].is_contiguous() or (dtype is not None and t.dtype != dtype)]
    return sum(t[0].numel() * t.element_size() for t in needs_copy)


def linear(layer: nn.Linear, inputs: Inputs, grad: Tensor) -> dict[str, PerExample]:
    """`nn.Linear`: h_b = Σ_t g[b, t] ⊗ a[b, t]."""
    _needs_examples(grad, 2)
    # Under autocast the layer has cast its input to the dtype of its output.
    g, a = _by_position(grad), _by_position(inputs[0].to(grad.dtype))
    has_bias = _tensor_of(layer, "bias") is not None
    return {"weight": OuterProducts(g, a), **({"bias": _add_positions(g, [1])} if has_bias else {})}


def transposed_linear(layer: Any, inputs: Inputs, grad: Tensor) -> dict[str, PerExample]:
    """`Conv1D` of GPT-2: a linear layer whose weight is [in, out]."""
    _needs_examples(grad, 2)
    g, a = _by_position(grad), _by_position(inputs[0].to(grad.dtype))
    return {"weight": OuterProducts(a, g), "bias": _add_positions(g, [1])}


def embedding(layer: nn.Embedding, inputs: Inputs, grad: Tensor) -> dict[str, PerExample]:
    """`nn.Embedding`: h_b adds g[b, t] to row ids[b, t]; a row `padding_idx` gets nothing."""
    if layer.scale_grad_by_freq:
        raise NotCoveredError(
            "scale_grad_by_freq divides by counts over all examples, so no example has a gradient of its own: "
            "turn it off"
        )
    rows, values = _rows(layer, inputs), _by_position(grad)
    if layer.padding_idx is not None:
        values = values.masked_fill((rows == layer.padding_idx)[:, :, None], 0.0)
    return {"weight": RowSums(rows, values, layer.num_embeddings)}


def _rows(layer: nn.Embedding, inputs: Inputs) -> Tensor:
    ids: Tensor = inputs[0]
    if ids.dim() == 0:
        raise NotCoveredError("it looks up a single row: call it with the examples in the first dim")
    return (ids.flatten(1) if ids.dim() > 1 else ids[:, None]).long()


def layer_norm(layer: nn.LayerNorm, inputs: Inputs, grad: Tensor) -> dict[str, PerExample]:
    """`nn.LayerNorm`: h_b = Σ_t g[b, t] x̂[b, t]."""
    normalised = F.layer_norm(wide(inputs[0]), layer.normalized_shape, eps=layer.eps)
    return _of_scale_and_shift(layer, normalised, grad, range(-len(layer.normalized_shape), 0))


def rms_norm(layer: nn.RMSNorm, inputs: Inputs, grad: Tensor) -> dict[str, PerExample]:
    """`nn.RMSNorm`: as `nn.LayerNorm`, without mean and shift."""
    # The default eps depends on the input's dtype, so a 16-bit input stays as it is.
    x = inputs[0] if layer.eps is None else wide(inputs[0])
    normalised = F.rms_norm(x, layer.normalized_shape, eps=layer.eps)
    return _of_scale_and_shift(layer, normalised, grad, range(-len(layer.normalized_shape), 0))


def rms_norm_of_transformers(layer: Any, inputs: Inputs, grad: Tensor) -> dict[str, PerExample]:
    """`LlamaRMSNorm` and its likes: the input over its root mean square, times `weight` (or 1 + `weight`)."""
    eps = vars(layer).get("variance_epsilon", vars(layer).get("eps"))
    if eps is None:
        raise NotCoveredError("it has neither variance_epsilon nor eps, so no rule fits it: give one in rules=")
    return _of_scale_and_shift(layer, F.rms_norm(wide(inputs[0]), inputs[0].shape[-1:], eps=eps), grad, (-1,))


def _of_scale_and_shift(layer: Any, normalised: Tensor, grad: Tensor, own: Sequence[int]) -> dict[str, PerExample]:
    """Gradients of `weight` and `bias` of a layer that returns `weight` × a normalised input + `bias`.

    Args:
        layer: has `weight` and `bias`, or one of them, or none.
        normalised: the normalised input.
        grad: gradient of the output.
        own: dims of the output that are the parameters' own; they are the same over the others.
    """
    _needs_examples(grad, 1 + len(own))
    dims = [dim for dim in range(1, grad.dim()) if dim not in own and dim - grad.dim() not in own]
    found: dict[str, PerExample] = {}
    if _tensor_of(layer, "weight") is not None:
        found["weight"] = _add_positions(wide(grad) * normalised, dims)
    if _tensor_of(layer, "bias") is not None:
        found["bias"] = _add_positions(grad, dims)
    return found


def group_norm(layer: nn.GroupNorm, inputs: Inputs, grad: Tensor) -> dict[str, PerExample]:
    """`nn.GroupNorm`: a scale and a shift for each channel."""
    return _of_scale_and_shift(layer, F.group_norm(wide(inputs[0]), layer.num_groups, eps=layer.eps), grad, (1,))


def channel_norm(n_dims: int, layer: Any, inputs: Inputs, grad: Tensor) -> dict[str, PerExample]:
    """`nn.InstanceNorm1d` to `3d` and `nn.BatchNorm1d` to `3d`: channels normalised by running statistics, or now.

    Instance normalisation takes each channel of each example by itself. Batch normalisation couples the examples then.
    """
    _needs_examples(grad, n_dims + 2)
    if couples_examples(layer):
        raise NotCoveredError(COUPLES_EXAMPLES)
    if layer.training or _tensor_of(layer, "running_mean") is None:
        return _of_scale_and_shift(layer, F.instance_norm(wide(inputs[0]), eps=layer.eps), grad, (1,))
    return _of_scale_and_shift(layer, _by_running_statistics(layer, inputs[0]), grad, (1,))


COUPLES_EXAMPLES = (
    "batch normalisation in train mode couples the examples, so no example has a gradient of its own. The shortest way "
    "to a number is sonde.measure(model, loss, loader, unit='images') on a checkpoint, in train mode, with the loader "
    "of the training: batches are then the pieces. Or use GroupNorm"
)


def couples_examples(layer: nn.Module) -> bool:
    """Whether a layer is batch normalisation that uses the statistics of its batch now."""
    return isinstance(layer, BATCH_NORMS) and (layer.training or _tensor_of(layer, "running_mean") is None)


def _by_running_statistics(layer: Any, x: Tensor) -> Tensor:
    per_channel = (1, -1, *[1] * (x.dim() - 2))
    mean, variance = _tensor_of(layer, "running_mean"), _tensor_of(layer, "running_var")
    if mean is None or variance is None:
        raise NotCoveredError(_COMPUTED)
    scale = torch.rsqrt(wide(variance) + layer.eps)
    return (wide(x) - mean.view(per_channel)) * scale.view(per_channel)


def _norm_bytes(layer: Any, inputs: Inputs, grad: Tensor) -> int:
    """What `_of_scale_and_shift` takes: the input in fp32, the normalised input, and its product with the gradient."""
    return 4 * 4 * grad[0].numel()


def _linear_bytes(layer: Any, inputs: Inputs, grad: Tensor) -> int:
    return _copied_bytes(inputs[0], grad, dtype=grad.dtype)


def _embedding_bytes(layer: nn.Embedding, inputs: Inputs, grad: Tensor) -> int:
    return _copied_bytes(grad) if layer.padding_idx is None else grad[0].numel() * grad.element_size()


def _has_positions(layer: Any, grad: Tensor) -> bool:
    return grad.dim() > len(layer.normalized_shape) + 1


# Convolutions and attention.


_WEIGHT_GRADIENTS = {1: conv1d_weight, 2: conv2d_weight, 3: conv3d_weight}


def convolution(layer: Any, inputs: Inputs, grad: Tensor) -> dict[str, PerExample]:
    """`nn.Conv1d` to `3d`: at each place of the output, the weight meets one patch of the input.

    Where there are few places, the gradients stay factors: the output's gradient and the patches. Otherwise the weight
    gradients are formed by the kernel that backward itself uses, with the examples as groups of one convolution.
    """
    n_dims = len(layer.kernel_size)
    _needs_examples(grad, n_dims + 2)
    # Under autocast the layer has cast its input to the dtype of its output.
    x, g = _padded(layer, wide(inputs[0].to(grad.dtype))), wide(grad)
    found: dict[str, PerExample] = {}
    if _tensor_of(layer, "bias") is not None:
        found["bias"] = _add_positions(g, range(2, g.dim()))
    weight = _tensor_of(layer, "weight")
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
        raise NotCoveredError(_COMPUTED)
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
        found["out_proj.bias"] = _add_positions(grad, [1])
        found["in_proj_bias"] = torch.cat([_add_positions(g, [1]) for g in grads], dim=1)
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


# All of them.


BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
_INSTANCE_NORMS = (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)

RULES: dict[type[nn.Module], LayerRule] = {
    nn.Linear: LayerRule(linear, _linear_bytes, may_read_time_first=True),
    nn.Embedding: LayerRule(embedding, _embedding_bytes, may_read_time_first=True, rows=_rows),
    nn.LayerNorm: LayerRule(layer_norm, _norm_bytes, adds_over_dim_1=_has_positions, may_read_time_first=True),
    nn.RMSNorm: LayerRule(rms_norm, _norm_bytes, adds_over_dim_1=_has_positions, may_read_time_first=True),
    nn.GroupNorm: LayerRule(group_norm, _norm_bytes),
    **{kind: LayerRule(functools.partial(channel_norm, 0), _norm_bytes) for kind in BATCH_NORMS},
    **{kind: LayerRule(functools.partial(channel_norm, n), _norm_bytes) for n, kind in enumerate(_INSTANCE_NORMS, 1)},
    **{kind: LayerRule(convolution, _convolution_bytes) for kind in (nn.Conv1d, nn.Conv2d, nn.Conv3d)},
    nn.MultiheadAttention: LayerRule(attention, _attention_bytes, arrange=_arrange, example_dim=batch_dim),
}
"""Rules of torch's layers."""

_BY_NAME: dict[str, tuple[set[str], LayerRule]] = {
    "Conv1D": ({"weight", "bias"}, LayerRule(transposed_linear, _linear_bytes)),
    "*RMSNorm": (
        {"weight"},
        LayerRule(rms_norm_of_transformers, _norm_bytes, adds_over_dim_1=lambda layer, grad: grad.dim() > 2),
    ),
}
"""Rules of layers of transformers, by their names and parameters: nothing is imported for them."""


def rules_by_type(own: Mapping[type[nn.Module], GradientsOf]) -> dict[type[nn.Module], LayerRule]:
    """The rules of all types of layers that have one.

    Args:
        own: rules of the user, which replace those of sonde.
    """
    return {**RULES, **{kind: _own_rule(rule) for kind, rule in own.items()}}


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
        for pattern, (names, rule) in _BY_NAME.items():
            if fnmatch.fnmatchcase(type(layer).__name__, pattern) and held == names:
                return rule
    return None
