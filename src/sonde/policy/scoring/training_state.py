"""What a measurement must leave as it found it: modes, random numbers, buffers, checkpointing, cuts."""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from sonde.parallel.model_state import preserve_buffers, preserve_modes_and_randomness
from sonde.parallel.own_passes import own_passes
from sonde.parallel.unwrap import unwrap_model


@contextlib.contextmanager
def preserve_training_state(model: nn.Module) -> Iterator[None]:
    """Modules are in evaluation mode inside. On exit, modules, buffers and random numbers are as before."""
    with (
        own_passes(model),
        preserve_modes_and_randomness(model),
        preserve_buffers(model),
        _without_autocast_cache(),
    ):
        set_evaluation_mode(model)
        yield


@contextlib.contextmanager
def _without_autocast_cache() -> Iterator[None]:
    """Autocast converts weights anew inside, and keeps nothing.

    Inside one region of autocast, its cache gives the weights of the region's first forward again: those before a
    step to a forward after it, and those of a measurement to the training.
    """
    was_on = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(was_on)


def set_evaluation_mode(model: nn.Module) -> None:
    """Put every module into evaluation mode. Unlike `model.eval()`, it runs no code of the modules."""
    for module in model.modules():
        module.training = False


def seed_everything(seed: int) -> None:
    """Seed every global generator that a sampler may draw from."""
    torch.manual_seed(seed)
    random.seed(seed)
    numpy: Any = sys.modules.get("numpy")
    if numpy:
        numpy.random.seed(seed % 2**32)


_HOOKS = "_require_grads_hooks"
_INPUT_HOOKS = (_HOOKS, "_require_grads_hook")
"""Where transformers keeps the hooks that it puts on embeddings."""


def can_checkpoint(model: nn.Module) -> bool:
    """Whether the model has a method that turns gradient checkpointing on."""
    return _method(model, "enable") is not None


def is_checkpointing(model: nn.Module) -> bool:
    """Whether gradient checkpointing is on."""
    return bool(_checkpointed(model))


def _checkpointed(model: nn.Module) -> list[nn.Module]:
    return [module for module in model.modules() if vars(module).get("gradient_checkpointing") is True]


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
    hooks = {m: {name: vars(m)[name] for name in _INPUT_HOOKS if name in vars(m)} for m in inner.modules()}
    if not was_on:
        assert enable is not None
        enable({"use_reentrant": False})
    layers = _checkpointed(inner)
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
            _remove_input_hooks(hooks)


def _remove_input_hooks(before: Mapping[nn.Module, Mapping[str, Any]]) -> None:
    """Remove the hooks by which turning checkpointing on makes embeddings require gradients: disabling keeps them."""
    for module, names in before.items():
        hooks = vars(module).get(_HOOKS)
        if hooks is names.get(_HOOKS):
            continue
        for hook in hooks or ():
            hook.remove()
        for name in _INPUT_HOOKS:
            vars(module).pop(name, None)
        vars(module).update(names)
