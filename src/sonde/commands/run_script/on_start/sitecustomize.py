"""Python imports this file at its start in each process of `sonde run`: the first `sitecustomize` on its path.

It waits until the script has imported torch and makes an optimizer. Only then is sonde imported: a launcher such as
torchrun makes no optimizer, and a script that never trains pays nothing.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import importlib
import importlib.util
import json
import os
import sys
import threading
from collections.abc import Callable
from typing import Any


class _AfterImports:
    """A finder of modules that leaves them to the others, and calls a function after the import of some.

    Args:
        callbacks: by the module's name.
    """

    def __init__(self, callbacks: dict[str, Callable[[], None]]) -> None:
        self._callbacks = callbacks

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        """The specification of such a module, as others find it; None for any other module."""
        if (callback := self._callbacks.pop(name, None)) is None:  # also while the others look for it
            return None
        spec = importlib.util.find_spec(name)
        self._callbacks[name] = callback
        if spec is not None and spec.loader is not None:
            self._call_after(name, spec.loader)
        return spec

    def _call_after(self, name: str, loader: Any) -> None:
        exec_module = loader.exec_module

        def exec_and_call(module: Any) -> None:
            del loader.exec_module  # the loader is as it was
            exec_module(module)
            self._callbacks.pop(name)()

        loader.exec_module = exec_and_call


def _watch_torch() -> None:
    """Tell sonde of the script's optimizers, of what it zeroes and clips, and of the end of its process group."""
    import torch.distributed
    import torch.jit

    def watched_init(init: Any, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        init(optimizer, *args, **kwargs)
        _tell("optimizer_made", optimizer)

    def watched_zero_grad(zero_grad: Any, owner: Any, *args: Any, **kwargs: Any) -> None:
        if _Watcher.is_on:
            _tell("zeroes", owner)
        zero_grad(owner, *args, **kwargs)

    def watched_script(script: Any, obj: Any, *args: Any, **kwargs: Any) -> Any:
        # Names in a scripted class are those of the frame that scripts it.
        kwargs["_frames_up"] = kwargs.get("_frames_up", 0) + 2
        if not (_Watcher.is_on and isinstance(obj, torch.nn.Module)):
            return script(obj, *args, **kwargs)
        with importlib.import_module("sonde.batch_size.hooks").lifted(obj):
            return script(obj, *args, **kwargs)

    _replace("__init__", watched_init, torch.optim.Optimizer)
    _replace("zero_grad", watched_zero_grad, torch.optim.Optimizer)
    _replace("zero_grad", watched_zero_grad, torch.nn.Module)
    _replace("script", watched_script, torch.jit)
    _watch_norms()
    if torch.distributed.is_available():
        from torch.distributed import distributed_c10d

        def watched_destroy(destroy: Any, group: Any = None) -> None:
            if _Watcher.is_on and group in (None, torch.distributed.group.WORLD):
                _tell("process_group_ends")
            destroy(group)

        _replace("destroy_process_group", watched_destroy, distributed_c10d, torch.distributed)


def _watch_norms() -> None:
    """Tell sonde of the norms that the script takes, and of those that it clips by."""
    import torch.nn.utils.clip_grad

    def note(*taken: Any) -> None:
        _Watcher.partial = _tell("clipped", *taken)

    def watched_norm(name: str, norm: Any, *args: Any, **kwargs: Any) -> Any:
        if not _Watcher.is_on:
            return norm(*args, **kwargs)
        return importlib.import_module("sonde.integrations.own_norms").FUNCTIONS[name](note, norm, *args, **kwargs)

    for name in ("clip_grad_norm_", "get_total_norm", "clip_grads_with_norm_"):
        owners = [each for each in (torch.nn.utils, torch.nn.utils.clip_grad) if hasattr(each, name)]
        _replace(name, functools.partial(watched_norm, name), *owners)


def _watch_dtensors() -> None:
    """Tell sonde where the script reads its own rank's part of a norm that is still to be summed over ranks."""
    from torch.distributed.tensor import DTensor

    def watched_read(read: Any, tensor: Any, *args: Any, **kwargs: Any) -> Any:
        if _Watcher.partial is not None and _Watcher.partial() is tensor:
            _tell("reads_part_of")
        return read(tensor, *args, **kwargs)

    for name in ("to_local", "item", "__float__"):
        _replace(name, watched_read, DTensor)


def _watch_trainer() -> None:
    """Tell sonde of each training of transformers' Trainer, before it begins and when it has ended."""
    from transformers.trainer import Trainer

    def watched_train(train: Any, trainer: Any, *args: Any, **kwargs: Any) -> Any:
        _tell("trainer_begins", trainer)
        try:
            return train(trainer, *args, **kwargs)
        finally:
            _tell("trainer_ends")

    _replace("train", watched_train, Trainer)


def _replace(name: str, watched: Callable[..., Any], *owners: Any) -> None:
    """Put a function in the place of another, with which it is called first. Compiled code is left alone.

    Args:
        name: of the function.
        watched: takes its place.
        owners: modules or classes that have it.
    """
    import torch

    original = getattr(owners[0], name)

    @functools.wraps(original)
    def replaced(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return original(*args, **kwargs)
        return watched(original, *args, **kwargs)

    for owner in owners:
        setattr(owner, name, replaced)


class _Watcher:
    """What is known of sonde's own watcher of this process, imported at the first optimizer."""

    is_on = False
    has_failed = False
    partial: Any = None
    """A weak reference to the last norm of the script, if that is a DTensor that is still to be summed."""
    watcher: Any = None
    lock = threading.RLock()


def _tell(method: str, *args: Any) -> Any:
    """Call a method of the watcher, one thread at a time. No error of it reaches the script."""
    if _Watcher.has_failed:
        return None
    with _Watcher.lock:
        try:
            if _Watcher.watcher is None:
                _Watcher.watcher = importlib.import_module("sonde.commands.run_script.watcher").ScriptWatcher(_tell)
                _Watcher.is_on = True
            if _Watcher.watcher.pid != os.getpid():  # a fork, such as a worker of a data loader
                return None
            return getattr(_Watcher.watcher, method)(*args)
        except Exception as error:
            _Watcher.has_failed, _Watcher.is_on = True, False
            if _Watcher.watcher is None:
                _say(f"not measured, since sonde failed ({type(error).__name__}: {error})")
            else:
                _Watcher.watcher.fail(error)


def _say_that_no_optimizer_was_made() -> None:
    """Say at the end of a script that was started by its file, not by a launcher, that there was nothing to measure.

    A script whose child processes have trained has a log.
    """
    is_the_script = os.getpid() == _SETTINGS["pid"] and _SETTINGS["command"][0].endswith(".py")
    log = os.path.join(_SETTINGS["folder"], "records.jsonl")
    if is_the_script and not (_Watcher.is_on or _Watcher.has_failed or os.path.exists(log)):
        _say("not measured: the script made no torch.optim.Optimizer")


def _say(text: str) -> None:
    """Write a sentence on the stderr of the process's start, on the first rank."""
    if os.environ.get("RANK", "0") == "0" and sys.__stderr__ is not None:
        with contextlib.suppress(OSError, ValueError):
            sys.__stderr__.write(f"sonde: {text}\n")


def _hand_on() -> None:
    """Take this folder off the path, and import the `sitecustomize` that Python would have found without it."""
    here = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [path for path in sys.path if path != here]
    own = sys.modules.pop("sitecustomize", None)
    try:
        importlib.import_module("sitecustomize")
    except ImportError as error:
        if error.name != "sitecustomize":
            raise
    finally:
        if own is not None:  # the import of this file ends with a module of its name
            sys.modules.setdefault("sitecustomize", own)


def _watch() -> None:
    """Watch torch, its DTensors and transformers once imported, or now if a .pth file has imported them."""
    atexit.register(_say_that_no_optimizer_was_made)
    callbacks = {
        "torch": _watch_torch,
        "torch.distributed.tensor": _watch_dtensors,
        "transformers.trainer": _watch_trainer,
    }
    sys.meta_path.insert(0, _AfterImports(callbacks))
    for name in list(callbacks):
        if name in sys.modules:
            callbacks.pop(name)()


def _time_steps() -> None:
    """Time the steps of a script that is tried, from when it has imported torch."""

    def watch() -> None:
        importlib.import_module("sonde.commands.trial.in_script").StepTimes()

    sys.meta_path.insert(0, _AfterImports({"torch": watch}))


if "SONDE_RUN" in os.environ:
    _SETTINGS: dict[str, Any] = json.loads(os.environ["SONDE_RUN"])  # the script may clear its environment
    _watch()
elif "SONDE_TRIAL" in os.environ:
    _time_steps()
_hand_on()
