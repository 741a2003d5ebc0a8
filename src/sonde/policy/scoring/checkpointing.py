"""Gradient checkpointing of a model of transformers while the model is in evaluation mode."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from torch import nn

from sonde.parallel.unwrap import unwrap_model


def can_checkpoint(model: nn.Module) -> bool:
    """Whether the model has a method that turns gradient checkpointing on."""
    return callable(getattr(unwrap_model(model), "gradient_checkpointing_enable", None))


def is_checkpointing(model: nn.Module) -> bool:
    """Whether gradient checkpointing is on."""
    return bool(getattr(unwrap_model(model), "is_gradient_checkpointing", False))


@contextlib.contextmanager
def checkpointing(model: nn.Module) -> Iterator[None]:
    """Gradient checkpointing is on inside, also in evaluation mode, in which layers of transformers skip it."""
    inner: Any = unwrap_model(model)
    was_on = is_checkpointing(model)
    if not was_on:
        inner.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    layers = [m for m in inner.modules() if getattr(m, "gradient_checkpointing", False)]
    modes = [layer.training for layer in layers]
    try:
        for layer in layers:
            layer.training = True  # only the layer's own flag: dropout inside it stays off
        yield
    finally:
        for layer, mode in zip(layers, modes, strict=True):
            layer.training = mode
        if not was_on:
            inner.gradient_checkpointing_disable()
