"""What a measurement leaves as it found it: modes, random numbers, `.grad`, buffers, cuts, and other probes' counts."""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn

from sonde.parallel.devices import preserve_randomness
from sonde.parallel.placements import fsdp_groups, reshard

_ATTRIBUTES = (bool, int, float, str, type(None), torch.Tensor)
"""Kinds of a module's attributes that a forward may replace by another value."""


@contextlib.contextmanager
def preserve_modes_and_randomness(model: nn.Module) -> Iterator[None]:
    """On exit, modules are in train or evaluation mode as before, and random generators have their former states."""
    reshard(model)
    modes = [(module, module.training) for module in model.modules()]
    numpy: Any = sys.modules.get("numpy")
    numpy_state, python_state = numpy and numpy.random.get_state(), random.getstate()
    with preserve_randomness():
        try:
            yield
        finally:
            reshard(model)
            for module, mode in modes:
                module.training = mode
            random.setstate(python_state)
            if numpy:
                numpy.random.set_state(numpy_state)


@contextlib.contextmanager
def preserve_gradients(parameters: Iterable[torch.Tensor]) -> Iterator[None]:
    """No parameter has a gradient inside. On exit `.grad` and `requires_grad` are as before."""
    before = [(p, p.grad, p.requires_grad) for p in parameters]
    for p, _, _ in before:
        p.grad = None
    try:
        yield
    finally:
        for p, grad, requires_grad in before:
            p.requires_grad_(requires_grad)
            p.grad = grad


@contextlib.contextmanager
def preserve_buffers(model: nn.Module) -> Iterator[None]:
    """On exit buffers are as before, bit for bit, and so are the modules' own numbers, texts and tensors.

    Holds a copy of each of these tensors, since a forward may write to any of them: running statistics, queues,
    codebooks, an expert's count of tokens. A module may also keep the longest length that it has seen, or a table for
    it. What a module keeps in lists, dicts and objects of its own is not looked at.
    """
    buffers = [(m, name, b, b.detach().clone()) for m in model.modules() for name, b in m.named_buffers(recurse=False)]
    attributes = [(m, {name: v for name, v in vars(m).items() if _is_kept(name, v)}) for m in model.modules()]
    tensors = [
        (m, name, v, v.detach().clone())
        for m, own in attributes
        for name, v in own.items()
        if isinstance(v, torch.Tensor)
    ]
    try:
        yield
    finally:
        for module, own in attributes:
            for name in [name for name, v in vars(module).items() if _is_kept(name, v) and name not in own]:
                delattr(module, name)  # made by a forward
            for name, value in own.items():
                if vars(module).get(name) is not value:
                    setattr(module, name, value)
        with torch.no_grad():
            for module, name, tensor, before in [*buffers, *tensors]:
                # Compared by value: batch normalisation changes its statistics without counting their version up. What
                # is unchanged is not written to, since the graph of a forward before may need it.
                if not torch.equal(tensor, before):
                    tensor.copy_(before)
                now = dict(module.named_buffers(recurse=False)) | vars(module)
                if now.get(name) is not tensor:  # the forward pass has put another tensor in its place
                    setattr(module, name, tensor)


def _is_kept(name: str, value: object) -> bool:
    return name != "training" and isinstance(value, _ATTRIBUTES)


_running: dict[int, int] = {}
"""How many of sonde's own passes go on, by the `id` of each module and parameter that they use.

Module-level, because the hooks of one probe must know of the passes of another, and autograd calls hooks on threads of
its own.
"""


@contextlib.contextmanager
def own_passes(model: nn.Module) -> Iterator[None]:
    """Passes of the model inside are sonde's own."""
    gathered = (vars(p).get("_unsharded_param") for group in fsdp_groups(model) for p in group.fsdp_params)
    parts = [*model.modules(), *model.parameters(), *(p for p in gathered if p is not None)]  # keeps the ids in use
    for part in parts:
        _running[id(part)] = _running.get(id(part), 0) + 1
    try:
        yield
    finally:
        for part in parts:
            _running[id(part)] -= 1
            if not _running[id(part)]:
                del _running[id(part)]


def is_in_own_pass(part: object) -> bool:
    """Whether the pass that uses a module or a parameter now is sonde's own."""
    return bool(_running) and id(part) in _running


@contextlib.contextmanager
def preserve_training_state(model: nn.Module) -> Iterator[None]:
    """Modules are in evaluation mode inside. On exit, modules, buffers and random numbers are as before."""
    with own_passes(model), preserve_modes_and_randomness(model), preserve_buffers(model), without_autocast_cache():
        set_evaluation_mode(model)
        yield


@contextlib.contextmanager
def without_autocast_cache() -> Iterator[None]:
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


@contextlib.contextmanager
def checkpointing(model: nn.Module) -> Iterator[None]:
    """Layers of transformers that checkpoint do so in evaluation mode too, in which they skip it otherwise."""
    layers = [module for module in model.modules() if vars(module).get("gradient_checkpointing") is True]
    modes = [layer.training for layer in layers]
    try:
        for layer in layers:
            layer.training = True  # the layer's own: dropout inside stays off
        yield
    finally:
        for layer, mode in zip(layers, modes, strict=True):
            layer.training = mode
