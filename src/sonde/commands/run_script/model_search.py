"""Looks for the models of a script's optimizers in the modules that the script calls."""

from __future__ import annotations

import contextlib
import sys
import types
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from sonde.parallel.refused_models import kinds_of, living_of
from sonde.parallel.unwrap import parameters_of

_ENOUGH = 0.99
"""Part of an optimizer's elements that its model must hold. The rest may be a temperature, or an entropy's weight."""
_MOST_STEPS = 100
"""Steps of other optimizers after which a model is no longer looked for. Its optimizer's first step begins it again."""
_MOST_UNSEEN = 3
"""Steps of an optimizer, after which its model is certainly not called as a module."""
_HOMELESS = (
    "no module holds the parameters that {} steps: put its modules into one nn.Module, or attach by sonde.attach"
)
_NOT_CALLED = (
    "the script does not call the model of {} as a module, model(...), so that no forward can be seen: attach by "
    "sonde.attach"
)


class ModelOfOptimizers(NamedTuple):
    """A model as the script calls it, and the optimizers that step it, in the order in which they were made."""

    model: nn.Module
    optimizers: tuple[Any, ...]


class ModelSearch:
    """Looks for the model of each optimizer, from when it is made until its model is called.

    Args:
        before_call: called before each call of a module while the search goes on.
        attach: called with a model that was found.
        refuse: called with optimizers without a model, and why.
        why_not_reduced: says of a model why it cannot be measured in a job of several processes; empty if it can.
    """

    def __init__(
        self,
        before_call: Callable[[nn.Module], None],
        attach: Callable[[ModelOfOptimizers], None],
        refuse: Callable[[Sequence[Any], str], None],
        why_not_reduced: Callable[[nn.Module], str],
    ) -> None:
        self._before_call, self._attach, self._refuse = before_call, attach, refuse
        self._why_not_reduced = why_not_reduced
        self._steps: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        """Steps of optimizers whose model has not been called yet, in the order in which they were made."""
        self._n_steps = 0
        """Steps of any optimizer since the search began."""
        self._end_watch: Callable[[], None] | None = None

    def pending(self) -> list[Any]:
        """Optimizers whose model has not been called yet."""
        return list(self._steps)

    def add(self, optimizer: Any, n_steps: int = 0) -> None:
        """Look for the model of an optimizer that has taken so many steps."""
        self._steps[optimizer] = n_steps
        self._n_steps = 0
        if self._end_watch is None:
            with contextlib.suppress(RuntimeError):  # another tool has replaced the calls of modules
                self._end_watch = watch_calls(self._before_call)

    def stop(self) -> None:
        """Look no more, until an optimizer is made or steps whose model is not known."""
        if self._end_watch is not None:
            self._end_watch()
            self._end_watch = None

    def look_in(self, called: nn.Module) -> None:
        """Attach to the models of optimizers whose parameters a module holds, before the module is called."""
        if not self._steps:  # the script has let go of them
            self.stop()
            return
        touched = self._touched(called)
        found = models_in(called, touched)
        if not found and _reshard(called):
            touched = self._touched(called)
            found = models_in(called, touched)
        if self._why_not_reduced(called):
            # One rank alone may call what is not wrapped yet, or what DDP holds, as to show its layers. Attaching takes
            # all ranks, so the call is passed over. If the optimizer steps without another, its model is refused then.
            return
        if not found:  # the script may call a part of a model
            for optimizer in touched:
                if (model := model_among_living(optimizer)) is not None:
                    found.append(ModelOfOptimizers(model, (optimizer,)))
                else:
                    self._give_up(optimizer, _HOMELESS)
        for each in found:
            self._attach(each)
        self.done_with([optimizer for each in found for optimizer in each.optimizers])

    def _touched(self, called: nn.Module) -> list[Any]:
        """The optimizers that step any parameter of a module."""
        held = trainable(called.parameters()).keys()
        return [optimizer for optimizer in self._steps if not held.isdisjoint(stepped_by(optimizer))]

    def done_with(self, optimizers: Sequence[Any]) -> None:
        """Look no more for the models of these optimizers."""
        for optimizer in optimizers:
            self._steps.pop(optimizer, None)
        if not self._steps:
            self.stop()

    def any_stepped(self) -> None:
        """Count a step of any optimizer: the search must not go on for ever."""
        self._n_steps += 1
        if self._n_steps == _MOST_STEPS:
            self.stop()

    def stepped_unseen(self, optimizer: Any) -> None:
        """An optimizer steps whose model is not known. Its window is lost, and its model is looked for in later calls.

        Nothing can be attached here: torch goes through the hooks of steps, and another hook would be an error.
        """
        n_steps = self._steps.get(optimizer, 0) + 1
        if n_steps == _MOST_UNSEEN:
            self._give_up(optimizer, _NOT_CALLED)
        elif n_steps > 1:
            self._steps[optimizer] = n_steps
        elif (model := model_among_living(optimizer)) is None:
            self._give_up(optimizer, _HOMELESS)
        elif why := self._why_not_reduced(model):
            self._give_up(optimizer, why)
        else:
            self.add(optimizer, n_steps)

    def _give_up(self, optimizer: Any, why: str) -> None:
        self.done_with([optimizer])
        self._refuse([optimizer], why.format(type(optimizer).__name__))


# Which module is the model of which optimizer.


def trainable(tensors: Iterable[Tensor]) -> dict[int, int]:
    """The number of elements of each tensor that is trained, by its identity."""
    return {id(t): t.numel() for t in tensors if t.requires_grad}


def stepped_by(optimizer: Any) -> dict[int, int]:
    """The number of elements of each tensor that an optimizer steps, by its identity."""
    return trainable(parameters_of(optimizer))


def models_in(called: nn.Module, optimizers: Sequence[Any]) -> list[ModelOfOptimizers]:
    """The models of those optimizers whose parameters a module holds.

    If the optimizers step all of the module, it is the model of all of them. Otherwise each has the smallest part of
    the module that holds its parameters. If one of two such parts is inside the other, their optimizers share the outer
    one, as Muon and AdamW share a model.

    Args:
        called: the outermost module that the script calls with any of their parameters.
        optimizers: in the order in which they were made.
    """
    held = trainable(called.parameters())
    inside = [o for o in optimizers if _holds(held, stepped_by(o))]
    stepped: dict[int, int] = {}
    for optimizer in inside:
        stepped |= stepped_by(optimizer)
    if inside and _holds(stepped, held):
        return [ModelOfOptimizers(called, tuple(inside))]
    modules = list(called.modules())
    parts = [(part, o) for o in inside if (part := _model_of(o, modules)) is not None]
    outer = dict.fromkeys(part for part, _ in parts if not any(_is_inside(part, other) for other, _ in parts))
    return [
        ModelOfOptimizers(model, tuple(o for part, o in parts if part is model or _is_inside(part, model)))
        for model in outer
    ]


def model_among_living(optimizer: Any) -> nn.Module | None:
    """The model of an optimizer, of all modules that are alive: the smallest that holds its parameters, or its wrapper.

    This looks at every living object, which takes some hundredths of a second.
    """
    return _model_of(optimizer, list(living_of(kinds_of(nn.Module))))


def _model_of(optimizer: Any, modules: Sequence[nn.Module]) -> nn.Module | None:
    """The module with the fewest trained elements of those that hold an optimizer's; of equals the outermost.

    The outermost is DDP's, or that of `torch.compile`.
    """
    wanted = stepped_by(optimizer)
    holding = [(m, held) for m in modules if _holds(held := trainable(m.parameters()), wanted)]
    if not holding:
        return None
    smallest, own = min(holding, key=lambda each: sum(each[1].values()))
    alike = [m for m, held in holding if held.keys() == own.keys()]
    return next((m for m in alike if not any(_is_inside(m, other) for other in alike)), smallest)


def _holds(held: dict[int, int], wanted: dict[int, int]) -> bool:
    """Whether of the wanted tensors nearly all elements are held."""
    n_held = sum(n for key, n in wanted.items() if key in held)
    return n_held > 0 and n_held >= _ENOUGH * sum(wanted.values())


def _is_inside(module: nn.Module, other: nn.Module) -> bool:
    return module is not other and any(m is module for m in other.modules())


def _reshard(called: nn.Module) -> bool:
    """Let FSDP2 show the parameters that optimizers step: after a forward, its outermost module shows others.

    Returns:
        Whether the module has any of FSDP2's.
    """
    fsdp = sys.modules.get("torch.distributed.fsdp")
    cut = [] if fsdp is None else [m for m in called.modules() if isinstance(m, fsdp.FSDPModule)]
    for module in cut:
        module.reshard()  # the forward that follows gathers again
    return bool(cut)


# The calls of modules, seen by a change to `nn.Module.__call__` that lasts until the models are found. A global forward
# hook would do the same, but `torch.compile` warns about such hooks and compiles what they do. A replaced
# `nn.Module.__call__` would stay behind in every compiled module, and torch's compiler compares its identity. So the
# function stays, and its code is exchanged for a while. The compiler leaves this code alone, since it names the same
# file as the code that it stands for.


def callback(module: nn.Module) -> None:
    """Called before each call of a module, while any are watched. Module-level, as code in torch reaches no objects."""


def unwatched(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """`nn.Module.__call__` with its own code."""
    raise AssertionError("replaced in `watch_calls`")


def _watched(self: Any, *args: Any, **kwargs: Any) -> Any:
    # Its names are those of torch's file, so what it needs is imported here.
    import torch.compiler

    from sonde.commands.run_script import model_search

    if not torch.compiler.is_compiling():
        model_search.callback(self)
    return model_search.unwatched(self, *args, **kwargs)


def watch_calls(before_call: Callable[[nn.Module], None]) -> Callable[[], None]:
    """Call a function before each call of a module. There is one such function at a time.

    Args:
        before_call: gets the module. It must not raise.

    Returns:
        A function that ends it.

    Raises:
        RuntimeError: when another tool has replaced `nn.Module.__call__` by something of another kind.
    """
    global unwatched, callback
    call: Any = nn.Module.__call__
    if not isinstance(call, types.FunctionType) or call.__closure__ is not None:
        raise RuntimeError("nn.Module.__call__ has been replaced by another tool")
    code = call.__code__
    # torch's compiler looks at every call that is made inside a compiled model, and must not look at ours.
    callback = torch.compiler.disable(before_call)
    unwatched = types.FunctionType(code, call.__globals__, call.__name__, call.__defaults__)
    own = _watched.__code__
    # In a traceback, the call on the last line of this code shows the last line of torch's, which makes the same call.
    first_line = own.co_firstlineno + _last_line(code) - _last_line(own)
    call.__code__ = own.replace(co_filename=code.co_filename, co_name=code.co_name, co_firstlineno=first_line)

    def end() -> None:
        call.__code__ = code

    return end


def _last_line(code: types.CodeType) -> int:
    return max(line for _, _, line in code.co_lines() if line is not None)
