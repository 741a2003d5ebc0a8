"""The state of a training, kept once, and given back bit for bit after each of several trainings that start from it."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from sonde.parallel.model_state import preserve_buffers, preserve_gradients, preserve_modes_and_randomness
from sonde.parallel.placements import local_tensor, reshard
from sonde.parallel.unwrap import parameters_of, unwrap_optimizer
from sonde.policy.scoring.training_state import seed_everything

SaveAndLoad = tuple[Callable[[], Any], Callable[[Any], object]]
"""Returns a part of the state, and puts a part that was returned back."""
_PART = 2**20
"""Elements of a tensor that are compared at a time."""


class KeptState:
    """Everything that a training step changes, as it is when this object is made.

    Parameters, `.grad` and the tensors of optimizers are copied, and given back in place, so that they stay the same
    objects. Of a sharded tensor, this rank's part is copied. Other parts are asked for their state.

    Args:
        state: by name: modules, optimizers, generators of torch, objects with `state_dict` and `load_state_dict`, and
            pairs of functions (save, load).
        keep_on: the device of the copies of tensors; None for that of each tensor.

    Raises:
        ValueError: for a part that is none of these.
    """

    def __init__(self, state: Mapping[str, Any], keep_on: torch.device | str | None = None) -> None:
        parts = {  # a rate schedule has an `optimizer` too, but no groups
            name: unwrap_optimizer(part) if hasattr(part, "param_groups") else part for name, part in state.items()
        }
        self.model = nn.ModuleList(part for part in parts.values() if isinstance(part, nn.Module))
        self.optimizers = [part for part in parts.values() if isinstance(part, torch.optim.Optimizer)]
        self.generators = [part for part in parts.values() if isinstance(part, torch.Generator)]
        self._others = [
            (load, copy.deepcopy(save()))
            for save, load in (
                _save_and_load(name, part)
                for name, part in parts.items()
                if not isinstance(part, nn.Module | torch.optim.Optimizer)
            )
        ]
        reshard(self.model)  # otherwise FSDP2 may show what it has gathered
        # An optimizer may have parameters that are in no module, such as a temperature.
        parameters = list(dict.fromkeys((*self.model.parameters(), *parameters_of(*self.optimizers))))
        of_optimizers = [_KeptOptimizer(optimizer) for optimizer in self.optimizers]
        self._weights = [(p, _copy(p, keep_on)) for p in parameters]
        further = [p.grad for p in parameters if p.grad is not None]
        further += [tensor for kept in of_optimizers for tensor in kept.tensors()]
        self._tensors = [(tensor, _copy(tensor, keep_on)) for tensor in further]
        self._of_optimizers = of_optimizers

    @contextlib.contextmanager
    def given_back(self) -> Iterator[None]:
        """A training may go on inside, without gradients at first. On exit, everything is as it was kept."""
        with (
            torch.inference_mode(False),  # which also turns gradients on, where torch.no_grad() has turned them off
            preserve_modes_and_randomness(self.model),
            preserve_buffers(self.model),
            preserve_gradients([p for p, _ in self._weights]),
        ):
            try:
                yield
            finally:
                self._give_back()

    @torch.no_grad()
    def _give_back(self) -> None:
        for tensor, kept in (*self._weights, *self._tensors):
            local_tensor(tensor.detach()).copy_(kept)
        for optimizer in self._of_optimizers:
            optimizer.give_back()
        for load, kept in self._others:
            load(copy.deepcopy(kept))

    def seed(self, k: int) -> None:
        """Seed all global generators and those that were kept, each rank's by another number."""
        number = k * dist.get_world_size() + dist.get_rank() if dist.is_available() and dist.is_initialized() else k
        seed_everything(number)
        for generator in self.generators:
            generator.manual_seed(number)

    @torch.no_grad()
    def changes(self) -> tuple[bool, list[float]]:
        """Whether a parameter has moved on this rank; and numbers that tell what was done from all else.

        Gradients and the optimizers' state count too: steps that take a sign move a weight alike for most batches.
        """
        moves = (local_tensor(p).float() - kept.to(p.device).float() for p, kept in self._weights)
        has_moved, numbers = False, list[float]()
        for move in moves:
            has_moved |= bool(move.any())
            numbers += _projections(move)
        rest = [p.grad for p, _ in self._weights if p.grad is not None]
        rest += _tensors_in([of_p for each in self.optimizers for of_p in each.state.values()])
        for tensor in map(local_tensor, rest):
            if tensor.layout is torch.strided:
                numbers += _projections(tensor.float())
        return has_moved, numbers


class _KeptOptimizer:
    """The groups of an optimizer and the state of its parameters, but for the values of tensors."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._groups = [(group, dict(group)) for group in optimizer.param_groups]
        self._state = {p: _contents(of_p) for p, of_p in optimizer.state.items()}

    def tensors(self) -> Iterator[Tensor]:
        """The state's, and options that are tensors, such as a rate on the device."""
        yield from _tensors_in(list(self._state.values()))
        for _, options in self._groups:
            yield from _tensors_in([value for name, value in options.items() if name != "params"])

    def give_back(self) -> None:
        self._optimizer.param_groups[:] = [group for group, _ in self._groups]
        for group, options in self._groups:
            group.clear()
            group.update(options)
        self._optimizer.state.clear()
        self._optimizer.state.update(_contents(self._state))


def _copy(tensor: Tensor, device: torch.device | str | None) -> Tensor:
    return local_tensor(tensor.detach()).to(device=device or tensor.device, copy=True)


def _projections(tensor: Tensor) -> list[float]:
    """A number of each part of a tensor, which no change of signs or order leaves as it is."""
    wave = torch.arange(1, 1 + min(tensor.numel(), _PART), device=tensor.device).sin()
    return [float(part @ wave[: len(part)]) for part in tensor.flatten().split(_PART)]


def _contents(value: Any) -> Any:
    """The same values in new dicts and lists."""
    if isinstance(value, dict):
        return {name: _contents(each) for name, each in value.items()}
    return [_contents(each) for each in value] if isinstance(value, list) else value


def _tensors_in(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict | list | tuple):
        for each in value.values() if isinstance(value, dict) else value:
            yield from _tensors_in(each)


def _save_and_load(name: str, part: Any) -> SaveAndLoad:
    """The two functions of a part that is neither a module nor an optimizer of torch."""
    if isinstance(part, torch.Generator):
        return part.get_state, part.set_state
    if isinstance(part, tuple) and len(part) == 2 and all(map(callable, part)):
        return part
    if hasattr(part, "state_dict") and hasattr(part, "load_state_dict"):
        return part.state_dict, part.load_state_dict
    raise ValueError(
        f"state[{name!r}] cannot be saved and restored, got {type(part).__name__}, expected a module, an optimizer, a "
        "torch.Generator, or an object with state_dict and load_state_dict: pass two functions, (save, load)"
    )
