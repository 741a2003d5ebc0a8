"""Rules: how a layer's input and the gradient of its output give each example's gradient of its parameters.

A rule is one small function for each type of layer. `RULES` lists those of small layers that are built in, and
`BY_NAME` those of layers of transformers. Convolutions and attention are in `layers.py`.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sonde.batch_size.per_example.gradients import OuterProducts, PerExample, RowSums, chunks, wide

Inputs = tuple[Any, ...]
"""What a layer was called with. Tensors have the examples in their first dim, and no graph."""

GradientsOf = Callable[[Any, Inputs, Tensor], Mapping[str, PerExample]]
"""(layer, inputs, gradient of the output) → each example's gradient, by the parameter's name within the layer."""


COMPUTED = "a parametrization computes its tensors, and would compute them again when they are read"
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


def own_rule(gradients: GradientsOf) -> LayerRule:
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


def add_positions(tensor: Tensor, dims: Sequence[int]) -> Tensor:
    """The sum over some dims, in fp32 or better."""
    return tensor.sum(tuple(dims), dtype=torch.float32 if tensor.dtype.itemsize < 4 else None) if dims else wide(tensor)


def by_position(tensor: Tensor) -> Tensor:
    """[examples, …, features] as [examples, positions, features]."""
    return tensor.flatten(1, -2) if tensor.dim() > 2 else tensor[:, None]


def tensor_of(layer: Any, name: str) -> Tensor | None:
    """A layer's own parameter or buffer; None without one.

    Not read as an attribute: there may be a parametrization or a property in its place, which computes at each read. It
    may iterate, as torch's `spectral_norm` does, or draw random numbers, so that the training would change.
    """
    held = itertools.chain(
        layer.named_parameters(recurse=False, remove_duplicate=False),
        layer.named_buffers(recurse=False, remove_duplicate=False),
    )
    return dict(held).get(name)


def needs_examples(tensor: Tensor, n_dims: int) -> None:
    """Refuse a layer that was called without a dim of examples."""
    if tensor.dim() < n_dims:
        raise NotCoveredError(
            f"its output has {tensor.dim()} dims where {n_dims} are needed: call the layer with the examples in the "
            "first dim"
        )


def copied_bytes(*tensors: Tensor, dtype: torch.dtype | None = None) -> int:
    """Bytes for each example of the tensors that a rule copies: to another dtype, or to another order in memory."""
    needs_copy = [t for t in tensors if not t[0].is_contiguous() or (dtype is not None and t.dtype != dtype)]
    return sum(t[0].numel() * t.element_size() for t in needs_copy)


def linear(layer: nn.Linear, inputs: Inputs, grad: Tensor) -> dict[str, PerExample]:
    """`nn.Linear`: h_b = Σ_t g[b, t] ⊗ a[b, t]."""
    needs_examples(grad, 2)
    # Under autocast the layer has cast its input to the dtype of its output.
    g, a = by_position(grad), by_position(inputs[0].to(grad.dtype))
    has_bias = tensor_of(layer, "bias") is not None
    return {"weight": OuterProducts(g, a), **({"bias": add_positions(g, [1])} if has_bias else {})}


def transposed_linear(layer: Any, inputs: Inputs, grad: Tensor) -> dict[str, PerExample]:
    """`Conv1D` of GPT-2: a linear layer whose weight is [in, out]."""
    needs_examples(grad, 2)
    g, a = by_position(grad), by_position(inputs[0].to(grad.dtype))
    return {"weight": OuterProducts(a, g), "bias": add_positions(g, [1])}


def embedding(layer: nn.Embedding, inputs: Inputs, grad: Tensor) -> dict[str, PerExample]:
    """`nn.Embedding`: h_b adds g[b, t] to row ids[b, t]; a row `padding_idx` gets nothing."""
    if layer.scale_grad_by_freq:
        raise NotCoveredError(
            "scale_grad_by_freq divides by counts over all examples, so no example has a gradient of its own: "
            "turn it off"
        )
    rows, values = _rows(layer, inputs), by_position(grad)
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
    return of_scale_and_shift(layer, normalised, grad, range(-len(layer.normalized_shape), 0))


def rms_norm(layer: nn.RMSNorm, inputs: Inputs, grad: Tensor) -> dict[str, PerExample]:
    """`nn.RMSNorm`: as `nn.LayerNorm`, without mean and shift."""
    # The default eps depends on the input's dtype, so a 16-bit input stays as it is.
    x = inputs[0] if layer.eps is None else wide(inputs[0])
    normalised = F.rms_norm(x, layer.normalized_shape, eps=layer.eps)
    return of_scale_and_shift(layer, normalised, grad, range(-len(layer.normalized_shape), 0))


def rms_norm_of_transformers(layer: Any, inputs: Inputs, grad: Tensor) -> dict[str, PerExample]:
    """`LlamaRMSNorm` and its likes: the input over its root mean square, times `weight` (or 1 + `weight`)."""
    eps = vars(layer).get("variance_epsilon", vars(layer).get("eps"))
    if eps is None:
        raise NotCoveredError("it has neither variance_epsilon nor eps, so no rule fits it: give one in rules=")
    return of_scale_and_shift(layer, F.rms_norm(wide(inputs[0]), inputs[0].shape[-1:], eps=eps), grad, (-1,))


def of_scale_and_shift(layer: Any, normalised: Tensor, grad: Tensor, own: Sequence[int]) -> dict[str, PerExample]:
    """Gradients of `weight` and `bias` of a layer that returns `weight` × a normalised input + `bias`.

    Args:
        layer: has `weight` and `bias`, or one of them, or none.
        normalised: the normalised input.
        grad: gradient of the output.
        own: dims of the output that are the parameters' own; they are the same over the others.
    """
    needs_examples(grad, 1 + len(own))
    dims = [dim for dim in range(1, grad.dim()) if dim not in own and dim - grad.dim() not in own]
    found: dict[str, PerExample] = {}
    if tensor_of(layer, "weight") is not None:
        found["weight"] = add_positions(wide(grad) * normalised, dims)
    if tensor_of(layer, "bias") is not None:
        found["bias"] = add_positions(grad, dims)
    return found


def group_norm(layer: nn.GroupNorm, inputs: Inputs, grad: Tensor) -> dict[str, PerExample]:
    """`nn.GroupNorm`: a scale and a shift for each channel."""
    return of_scale_and_shift(layer, F.group_norm(wide(inputs[0]), layer.num_groups, eps=layer.eps), grad, (1,))


def channel_norm(n_dims: int, layer: Any, inputs: Inputs, grad: Tensor) -> dict[str, PerExample]:
    """`nn.InstanceNorm1d` to `3d` and `nn.BatchNorm1d` to `3d`: channels normalised by running statistics, or now.

    Instance normalisation takes each channel of each example by itself. Batch normalisation couples the examples then.
    """
    needs_examples(grad, n_dims + 2)
    if couples_examples(layer):
        raise NotCoveredError(COUPLES_EXAMPLES)
    if layer.training or tensor_of(layer, "running_mean") is None:
        return of_scale_and_shift(layer, F.instance_norm(wide(inputs[0]), eps=layer.eps), grad, (1,))
    return of_scale_and_shift(layer, _by_running_statistics(layer, inputs[0]), grad, (1,))


COUPLES_EXAMPLES = (
    "batch normalisation in train mode couples the examples, so no example has a gradient of its own: "
    "use GroupNorm, or put these layers in evaluation mode"
)


def couples_examples(layer: nn.Module) -> bool:
    """Whether a layer is batch normalisation that uses the statistics of its batch now."""
    return isinstance(layer, BATCH_NORMS) and (layer.training or tensor_of(layer, "running_mean") is None)


def _by_running_statistics(layer: Any, x: Tensor) -> Tensor:
    per_channel = (1, -1, *[1] * (x.dim() - 2))
    mean, variance = tensor_of(layer, "running_mean"), tensor_of(layer, "running_var")
    if mean is None or variance is None:
        raise NotCoveredError(COMPUTED)
    scale = torch.rsqrt(wide(variance) + layer.eps)
    return (wide(x) - mean.view(per_channel)) * scale.view(per_channel)


def norm_bytes(layer: Any, inputs: Inputs, grad: Tensor) -> int:
    """What `of_scale_and_shift` takes: the input in fp32, the normalised input, and its product with the gradient."""
    return 4 * 4 * grad[0].numel()


def _linear_bytes(layer: Any, inputs: Inputs, grad: Tensor) -> int:
    return copied_bytes(inputs[0], grad, dtype=grad.dtype)


def _embedding_bytes(layer: nn.Embedding, inputs: Inputs, grad: Tensor) -> int:
    return copied_bytes(grad) if layer.padding_idx is None else grad[0].numel() * grad.element_size()


def _has_positions(layer: Any, grad: Tensor) -> bool:
    return grad.dim() > len(layer.normalized_shape) + 1


BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
_INSTANCE_NORMS = (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)

RULES: dict[type[nn.Module], LayerRule] = {
    nn.Linear: LayerRule(linear, _linear_bytes, may_read_time_first=True),
    nn.Embedding: LayerRule(embedding, _embedding_bytes, may_read_time_first=True, rows=_rows),
    nn.LayerNorm: LayerRule(layer_norm, norm_bytes, adds_over_dim_1=_has_positions, may_read_time_first=True),
    nn.RMSNorm: LayerRule(rms_norm, norm_bytes, adds_over_dim_1=_has_positions, may_read_time_first=True),
    nn.GroupNorm: LayerRule(group_norm, norm_bytes),
    **{kind: LayerRule(functools.partial(channel_norm, 0), norm_bytes) for kind in BATCH_NORMS},
    **{kind: LayerRule(functools.partial(channel_norm, n), norm_bytes) for n, kind in enumerate(_INSTANCE_NORMS, 1)},
}
"""Rules of torch's layers, but for convolutions and attention."""

BY_NAME: dict[str, tuple[set[str], LayerRule]] = {
    "Conv1D": ({"weight", "bias"}, LayerRule(transposed_linear, _linear_bytes)),
    "*RMSNorm": (
        {"weight"},
        LayerRule(rms_norm_of_transformers, norm_bytes, adds_over_dim_1=lambda layer, grad: grad.dim() > 2),
    ),
}
"""Rules of layers of transformers, by their names and parameters: nothing is imported for them."""
