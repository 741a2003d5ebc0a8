"""Gradient checkpointing of a model of transformers while the model is in evaluation mode."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

from sonde.parallel.unwrap import unwrap_model


def can_checkpoint(model: nn.Module) -> bool:
    """Whether the model has a method that turns gradient checkpointing on."""
    return _method(model, "enable") is not None


def is_checkpointing(model: nn.Module) -> bool:
    """Whether gradient checkpointing is on."""
    return any(getattr(module, "gradient_checkpointing", False) is True for module in model.modules())


def _method(model: nn.Module, what: str) -> Callable[..., Any] | None:
    """The method that turns checkpointing on or off, by its name since transformers 5.23 or by the older name."""
    inner = unwrap_model(model)
    for name in (f"activation_checkpointing_{what}", f"gradient_checkpointing_{what}"):
        if callable(method := getattr(inner, name, None)):
            return method  # type: ignore[no-any-return]
    return None


@contextlib.contextmanager
def checkpointing(model: nn.Module) -> Iterator[None]:
    """Gradient checkpointing is on inside, also in evaluation mode, in which layers of transformers skip it."""
    inner = unwrap_model(model)
    enable, disable = _method(model, "enable"), _method(model, "disable")
    was_on = is_checkpointing(model)
    if not was_on:
        assert enable is not None
        enable({"use_reentrant": False})
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
            assert disable is not None
            disable()
