"""Passes of a model that leave no trace: what a forward changes is put back, and what cannot be put back is refused."""

from __future__ import annotations

import contextlib
import functools
import io
import logging
import random
import sys
import types
import warnings
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from sonde.parallel.model_state import own_passes, preserve_modes_and_randomness, without_autocast_cache
from sonde.parallel.placements import is_dtensor

_MOST_OBJECTS = 300_000
"""Objects that are looked at. A model that reaches more is refused."""
_MOST_BYTES = 64 * 2**20
"""Memory for copies of buffers."""
_GLOBAL_HOOKS = [table for name, table in vars(torch_module).items() if name.startswith("_global_") and "hooks" in name]
_WAITS_FOR_RANKS = ("c10d", "_c10d_functional", "_c10d_functional_autograd")
_ENDS = (type, types.ModuleType, types.BuiltinFunctionType, Tensor, str, bytes, int, float, complex, type(None))
"""Where the search for what a forward may change ends."""


class LeavesTraceError(RuntimeError):
    """Raised where a pass would change what cannot be put back."""


class QuietPasses:
    """Calls a model's forward as often as asked. Inside `with`, each call finds what the first one found.

    On exit, all is as before: parameters, buffers, modes, random numbers, and what the model, and the functions of the
    user's own code, hold in attributes, containers, closures and globals. Hooks of modules are not called, nothing is
    printed or logged, and nothing is compiled. A write to a tensor from outside raises before it is done, and so does
    a collective.

    Args:
        model: without its wrapper, and not cut over ranks.
        given: what it will be called with; objects in it are put back too.

    Raises:
        LeavesTraceError: for a model whose forward changes what cannot be put back.
    """

    def __init__(self, model: nn.Module, given: object) -> None:
        if any(is_dtensor(p) for p in model.parameters()):
            raise LeavesTraceError("the model is cut over ranks")
        self._model, self._stack = model, contextlib.ExitStack()
        self._kept = _Kept(model, given)
        self.keeps_hooks = False
        """Whether hooks of libraries are called: some models return what their hooks have seen."""

    def __enter__(self) -> QuietPasses:
        with contextlib.ExitStack() as stack:
            stack.callback(self._kept.put_back)
            silent = io.StringIO()
            for context in (
                own_passes(self._model),
                preserve_modes_and_randomness(self._model),
                without_autocast_cache(),
                contextlib.redirect_stdout(silent),
                contextlib.redirect_stderr(silent),
                warnings.catch_warnings(),
                _logging_off(),
                _uncompiled(),
                _without_global_hooks(),
            ):
                stack.enter_context(context)
            warnings.simplefilter("ignore")
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any], prepare: Callable[[], None]) -> Any:
        """What the model returns.

        Args:
            args: what it is called with; copies are made of tensors.
            kwargs: likewise.
            prepare: called before the forward, once hooks are off and buffers are copies.
        """
        with preserve_modes_and_randomness(self._model):
            try:
                with _NoWrites():
                    self._take_apart()
                    prepare()
                    copies = torch.utils._pytree.tree_map(_copied, (args, kwargs))
                    return self._model.forward(*copies[0], **copies[1])
            finally:
                self._kept.put_back()

    def _take_apart(self) -> None:
        n_bytes = 0
        for module in self._model.modules():
            for name in vars(module):
                if name.endswith("_hooks"):
                    hooks = vars(module)[name].items() if self.keeps_hooks else ()
                    vars(module)[name] = OrderedDict((n, hook) for n, hook in hooks if _is_of_library(hook))
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    n_bytes += buffer.nbytes
                    module._buffers[name] = buffer.clone()
        if n_bytes > _MOST_BYTES:
            raise LeavesTraceError(f"the model's buffers take {n_bytes:,} bytes")


def _copied(value: object) -> object:
    return value.detach().clone() if isinstance(value, Tensor) and not value.is_nested else value


def _uncompiled() -> contextlib.AbstractContextManager[object]:
    """What is compiled runs as it was written. Where nothing is, the compiler, which takes seconds, is not imported."""
    return torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else contextlib.nullcontext()


@contextlib.contextmanager
def _logging_off() -> Iterator[None]:
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(before)


@contextlib.contextmanager
def _without_global_hooks() -> Iterator[None]:
    before = [dict(table) for table in _GLOBAL_HOOKS]
    for table in _GLOBAL_HOOKS:
        table.clear()
    try:
        yield
    finally:
        for table, hooks in zip(_GLOBAL_HOOKS, before, strict=True):
            table.update(hooks)


class _NoWrites(TorchDispatchMode):
    """Refuses what would change a tensor that was there before, wait for ranks, or draw from a generator of its own."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._made: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace in _WAITS_FOR_RANKS:
            raise LeavesTraceError(f"forward waits for other ranks ({func})")
        if any(isinstance(each, torch.Generator) for each in (*args, *kwargs.values())):
            raise LeavesTraceError(f"forward draws from a generator of its own ({func})")
        outside = {_memory(each) for each in _tensors((args, kwargs))} - self._made
        for argument, value in zip(func._schema.arguments, args, strict=False):
            if argument.alias_info is not None and argument.alias_info.is_write:
                self._refuse_writes(func, value, outside)
        for argument in func._schema.arguments:
            if argument.name in kwargs and argument.alias_info is not None and argument.alias_info.is_write:
                self._refuse_writes(func, kwargs[argument.name], outside)
        result = func(*args, **kwargs)
        self._made |= {_memory(each) for each in _tensors(result)} - outside
        return result

    def _refuse_writes(self, func: Any, written: object, outside: set[int]) -> None:
        if any(_memory(each) in outside for each in _tensors(written)):
            raise LeavesTraceError(f"forward writes to a tensor that was there before ({func})")


def _tensors(tree: object) -> Iterator[Tensor]:
    return (each for each in tree_leaves(tree) if isinstance(each, Tensor))


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr() if tensor.layout is torch.strided else id(tensor)


class _Kept:
    """What a forward may change of Python objects, to be put back as often as asked.

    Args:
        *roots: where the search begins. It follows attributes, containers and closures, and of code that is not a
            library's, classes' attributes and the globals that functions name.
    """

    def __init__(self, *roots: object) -> None:
        self._put_back: list[Callable[[], object]] = []
        seen: dict[int, object] = {}  # kept, so that ids stay their own
        left = list(roots)
        while left:
            value = left.pop()
            if id(value) not in seen and not isinstance(value, _ENDS):
                seen[id(value)] = value
                left += self._keep(value)
            if len(seen) > _MOST_OBJECTS:
                raise LeavesTraceError("the model reaches too many objects")

    def put_back(self) -> None:
        for each in self._put_back:
            each()

    def _keep(self, value: Any) -> Iterable[object]:
        """Note how a value is put back; what it holds."""
        if isinstance(value, io.IOBase) or hasattr(type(value), "__next__"):
            raise LeavesTraceError(f"the model holds a {type(value).__name__}, which cannot go back")
        if isinstance(value, random.Random):
            self._on_return(value.setstate, value.getstate())
        elif hasattr(value, "bit_generator"):  # of numpy
            self._on_return(functools.partial(setattr, value.bit_generator, "state"), value.bit_generator.state)
        elif hasattr(value, "__array_interface__"):
            self._on_return(functools.partial(value.__setitem__, ...), value.copy())
        elif isinstance(value, dict):
            self._on_return(functools.partial(_refill, value, value.update), dict(value))
            return list(value.values())
        elif isinstance(value, list | deque | bytearray):
            self._on_return(functools.partial(_refill, value, value.extend), list(value))
            return list(value)
        elif isinstance(value, set):
            self._on_return(functools.partial(_refill, value, value.update), set(value))
        elif isinstance(value, tuple):
            return value
        elif isinstance(value, types.MethodType):
            return value.__self__, value.__func__
        elif isinstance(value, types.CellType):
            return self._keep_cell(value)
        elif isinstance(value, types.FunctionType):
            return () if _is_of_library(value) else self._keep_globals(value)
        elif isinstance(own := getattr(value, "__dict__", None), dict):
            return [own, *(self._keep_class(type(value)) if isinstance(value, nn.Module) else ())]
        return ()

    def _on_return(self, give: Callable[[Any], object], before: object) -> None:
        self._put_back.append(lambda: give(before))

    def _keep_cell(self, cell: types.CellType) -> Iterable[object]:
        try:
            before = cell.cell_contents
        except ValueError:  # it is empty
            return ()
        self._on_return(functools.partial(setattr, cell, "cell_contents"), before)
        return (before,)

    def _keep_globals(self, function: types.FunctionType) -> Iterable[object]:
        table = function.__globals__
        named = {name: table[name] for name in _names_in(function.__code__) if name in table}
        self._on_return(table.update, named)
        return [*named.values(), *(function.__closure__ or ()), *(function.__defaults__ or ())]

    def _keep_class(self, kind: type) -> Iterable[object]:
        found: list[object] = []
        for each in kind.__mro__:
            own = {name: value for name, value in vars(each).items() if not name.startswith("__")}
            functions = [value for value in own.values() if isinstance(value, types.FunctionType)]
            if not functions or any(map(_is_of_library, functions)):
                continue
            found += [*own.values()]
            plain = {name: value for name, value in own.items() if not callable(value)}
            self._on_return(functools.partial(_set_attributes, each), plain)
        return found


def _refill(container: Any, add: Callable[[Any], object], before: Any) -> None:
    now = container.items() if isinstance(before, dict) else container
    then = before.items() if isinstance(before, dict) else before
    if len(now) != len(then) or any(a is not b for a, b in zip(_flat(now), _flat(then), strict=True)):
        container.clear()
        add(before)


def _flat(values: Iterable[object]) -> Iterator[object]:
    for value in values:
        if isinstance(value, tuple):
            yield from value
        else:
            yield value


def _set_attributes(kind: type, attributes: dict[str, object]) -> None:
    for name, value in attributes.items():
        if vars(kind).get(name) is not value:
            setattr(kind, name, value)


def _names_in(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names_in(constant)


def _is_of_library(function: Any) -> bool:
    code = getattr(getattr(function, "__func__", function), "__code__", None)
    file = "" if code is None else code.co_filename
    return "-packages" in file or file.startswith(("<frozen", sys.base_prefix))
