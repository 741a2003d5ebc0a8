"""Named tensors in one vector, so that one collective sums them and one copy brings them to the host.

A feature adds tensors by names of its own, and finds them by these names on the host.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

Named = Mapping[str, Tensor]
Shapes = Mapping[str, torch.Size]


def packed(tensors: Named) -> tuple[Tensor, Shapes]:
    """Copy tensors of one dtype and device into one vector; and their shapes, by which `named` finds them again."""
    vector = torch.cat([tensor.reshape(-1) for tensor in tensors.values()])
    return vector, {name: tensor.shape for name, tensor in tensors.items()}


def named(vector: Tensor, shapes: Shapes) -> dict[str, Tensor]:
    """The tensors in a vector, by name; views."""
    parts = vector.split([math.prod(shape) for shape in shapes.values()])
    return {name: part.view(shape) for part, (name, shape) in zip(parts, shapes.items(), strict=True)}


def under(prefix: str, tensors: Named) -> dict[str, Tensor]:
    """The tensors with longer names: `prefix/name`."""
    return {f"{prefix}/{name}": tensor for name, tensor in tensors.items()}


def those_under(prefix: str, tensors: Named) -> dict[str, Tensor]:
    """The tensors whose names begin with `prefix/`, by the rest of their names."""
    start = f"{prefix}/"
    return {name.removeprefix(start): tensor for name, tensor in tensors.items() if name.startswith(start)}
