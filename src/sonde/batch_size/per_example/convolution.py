"""The rule of convolutions."""

from __future__ import annotations

import math
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.grad import conv1d_weight, conv2d_weight, conv3d_weight

from sonde.batch_size.per_example.gradients import OuterProducts, PerExample, wide
from sonde.batch_size.per_example.rules import Inputs, LayerRule, add_positions, needs_examples, tensor_of

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


def _bytes(layer: Any, inputs: Inputs, grad: Tensor) -> int:
    n_places, n_columns = math.prod(grad.shape[2:]), _n_columns(layer)
    n_rows: int = layer.groups * n_places if _stays_factors(layer, grad) else layer.out_channels
    # The input is padded, and both are copied to fp32 where they are not.
    of_input: int = 2 * inputs[0][0].numel()
    return 4 * (n_rows * n_columns + of_input + (grad[0].numel() if grad.dtype.itemsize < 4 else 0))


RULES: dict[type[nn.Module], LayerRule] = {
    kind: LayerRule(convolution, _bytes) for kind in (nn.Conv1d, nn.Conv2d, nn.Conv3d)
}
