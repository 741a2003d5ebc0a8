"""A device that exists only in tests: it computes on the CPU, works behind the host's back, and can forbid host reads.

Its tensors say that they are on "meta", hold real values all the same, and reach the host only by copies. A copy that
does not wait leaves NaN on the host until the device has come so far. So the paths of sonde that a GPU would take run
without one, and a read that would wait for a GPU raises here.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only, tree_unflatten

import sonde
from sonde.batch_size.per_example import norms
from sonde.gradient_norm.plan import NormPlan
from sonde.parallel import devices
from tests.recorded_graphs import RecordedGraph

DEVICE = torch.device("meta")
SONDE = f"{Path(sonde.__file__).parent}{os.sep}"

READS = frozenset(
    (
        *("_local_scalar_dense", "is_nonzero", "item", "equal", "allclose", "tolist"),
        *("nonzero", "masked_select", "unique", "_unique", "_unique2", "unique_consecutive", "unique_dim", "argwhere"),
        *("repeat_interleave", "bincount", "_coalesce"),
    )
)
"""Operators for which a GPU is waited for: they read a value, or their result's shape depends on one."""


VIEWS = frozenset(("view", "detach", "alias"))
"""Operators that launch nothing."""


TAKE_BOTH = frozenset(("copy_", "_to_copy", "_copy_from", "index", "index_put_", "_index_put_impl_", "is_set_to"))
"""Operators that take tensors of the device and of the host together."""


class HostReadError(AssertionError):
    """The device has been waited for."""


class MixedDevicesError(AssertionError):
    """An operator was given tensors of the device and of the host, which a GPU refuses."""


def sonde_functions() -> list[str]:
    """The functions of sonde that run now, as file:function, the innermost first; empty if sonde was not called."""
    frame: Any = sys._getframe(1)
    found = []
    while frame is not None:
        if frame.f_code.co_filename.startswith(SONDE):
            found.append(f"{frame.f_code.co_filename[len(SONDE) :]}:{frame.f_code.co_name}")
        frame = frame.f_back
    return found


def reads_host(function: Any, args: Any, kwargs: Any, is_on_device: Callable[[Any], bool]) -> bool:
    """Whether a GPU would be waited for, if the tensors that `is_on_device` picks were on it."""
    name = function.overloadpacket.__name__
    if name in READS:
        return any(is_on_device(x) for x in tree_leaves((args, kwargs)))
    if name in ("index", "index_put_") and is_on_device(args[0]):
        indices = [x for x in args[1] if x is not None]
        # A mask's result has as many elements as the mask is true. Indices on the host are copied to the device.
        has_mask = name == "index" and any(x.dtype in (torch.bool, torch.uint8) for x in indices)
        return has_mask or not all(map(is_on_device, indices))
    if name == "copy_":
        waits = not (kwargs.get("non_blocking") or (len(args) > 2 and args[2]))
        return waits and is_on_device(args[1]) != is_on_device(args[0])
    if name == "_to_copy":
        to = kwargs.get("device")
        if to is None or is_on_device(args[0]) == (torch.device(to).type == DEVICE.type):
            return False
        return is_on_device(args[0]) or not kwargs.get("non_blocking")
    return False


class DeviceTensor(Tensor):
    """A tensor of the pretended device.

    Args:
        inner: its values, on the CPU.
    """

    inner: Tensor
    is_meta = False  # it has values
    is_number = False
    """Whether it is a Python number: on a GPU, `vector[0] = 1.0` copies it from the host, and waits."""
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, inner: Tensor) -> DeviceTensor:
        new: Any = Tensor._make_wrapper_subclass
        strides, offset = inner.stride(), inner.storage_offset()
        tensor: DeviceTensor = new(
            cls, inner.shape, strides=strides, storage_offset=offset, dtype=inner.dtype, device=DEVICE
        )
        return tensor

    def __init__(self, inner: Tensor) -> None:
        self.inner = inner

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"DeviceTensor({tuple(self.shape)}, {self.dtype})"

    def tolist(self) -> Any:
        """The values, which torch reads without an operator."""
        assert PretendDevice.present is not None
        PretendDevice.present.waited("tolist")
        return self.inner.tolist()

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        raise AssertionError(f"{function} was called outside of PretendDevice")


def is_device_tensor(x: object) -> bool:
    return isinstance(x, DeviceTensor)


def is_host_tensor(x: object) -> bool:
    """Whether x lies on the host, and is no number: operators of a GPU take tensors without dims as numbers."""
    return isinstance(x, Tensor) and not is_device_tensor(x) and x.device.type == "cpu" and x.dim() > 0


def on_host(tensor: Tensor) -> Tensor:
    """The values, for the test itself."""
    return tensor.inner if isinstance(tensor, DeviceTensor) else tensor


class PretendEvent:
    """In place of torch.Event. It has passed when the device has come to it."""

    def __init__(self, device: Any = None, *, enable_timing: bool = False) -> None:
        self.at, self.time = -1, 0.0

    def record(self, stream: PretendStream) -> None:
        """At the end of the work so far."""
        stream.of.note_recorded("Event.record")
        self.of, self.time = stream.of, time.perf_counter()
        self.of.n_events += 1
        self.at = self.of.n_events

    def query(self) -> bool:
        """Whether the device has come so far."""
        self.of.note_recorded("Event.query")
        return self.of.n_passed >= self.at

    def synchronize(self) -> None:
        """Wait."""
        if not self.query():
            self.of.waited("Event.synchronize")
            self.of.run_to(self.at)

    def elapsed_time(self, later: PretendEvent) -> float:
        """Milliseconds between two events that have passed."""
        assert self.query()
        assert later.query()
        return (later.time - self.time) * 1e3


class PretendStream:
    """The device's only stream."""

    def __init__(self, of: PretendDevice) -> None:
        self.of = of
        self.device = DEVICE

    def is_capturing(self) -> bool:
        """Whether its work is recorded into a graph."""
        return self.of.graph is not None

    def wait_stream(self, other: PretendStream) -> None:
        """Nothing: there is one stream."""

    def __enter__(self) -> PretendStream:
        return self

    def __exit__(self, *_: object) -> None:
        pass


_unscale = torch.amp.GradScaler.unscale_


def _unscale_as_on_mps(scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer) -> None:
    """torch divides by the scale in fp64, except on a device that is called "mps"."""
    with mock.patch.object(Tensor, "double", lambda scale: scale):
        _unscale(scaler, optimizer)


class PretendDevice(TorchDispatchMode):
    """While it is entered, device="meta" is this device, and torch.accelerator knows it.

    Args:
        has_float64: whether it has fp64.
    """

    present: ClassVar[PretendDevice | None] = None
    """The one that is entered."""

    def __init__(self, *, has_float64: bool = True) -> None:
        super().__init__()
        self.has_float64 = has_float64
        self.n_events = self.n_passed = 0
        self.stream = PretendStream(self)
        self.reads: list[str] = []
        """What sonde has waited for, and where."""
        self.forbids_reads = self.forbids_reads_of_anyone = False
        self.graph: RecordedGraph | None = None
        self.recorded: list[str] = []
        """What sonde has launched while a graph was recorded, and where."""
        self._copies: list[tuple[int, Tensor, Tensor]] = []

    def run_to(self, event: int) -> None:
        """Let the device do its work up to an event."""
        self.n_passed = max(self.n_passed, event)
        due = [copy for copy in self._copies if copy[0] <= self.n_passed]
        self._copies = [copy for copy in self._copies if copy[0] > self.n_passed]
        for _, host, values in due:
            host.copy_(values)

    def catch_up(self, *, but: int = 0) -> None:
        """Let the device do all its work, but for the last events."""
        self.run_to(self.n_events - but)

    def waited(self, what: str) -> None:
        """Somebody waits for the device: sonde, or the loop around it, which may wait unless that is forbidden too."""
        if functions := sonde_functions():
            self.reads.append(f"{functions[0]} {what}")
            if self.forbids_reads:
                raise HostReadError(f"{what} in {functions[0]}")
        elif self.forbids_reads_of_anyone:
            raise HostReadError(f"{what} outside of sonde")

    @contextlib.contextmanager
    def no_reads(self, *, of_anyone: bool = False) -> Iterator[None]:
        """Inside, sonde must not wait; nor must the loop, if `of_anyone`."""
        self.forbids_reads, self.forbids_reads_of_anyone = True, of_anyone
        try:
            yield
        finally:
            self.forbids_reads = self.forbids_reads_of_anyone = False

    @contextlib.contextmanager
    def capture(self) -> Iterator[RecordedGraph]:
        """Record the device's work into a graph. (The work is done too; a CUDA graph would only record it.)"""
        self.graph = RecordedGraph()
        try:
            yield self.graph
        finally:
            self.graph = None

    def note_recorded(self, what: str) -> None:
        """Note what sonde does while a graph is recorded: nothing is allowed."""
        if self.graph is not None and (functions := sonde_functions()):
            self.recorded.append(f"{functions[0]} {what}")

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        is_pinned = bool(kwargs.pop("pin_memory", False))
        name, to = function.overloadpacket.__name__, kwargs.get("device")
        asks_for_device = to is not None and torch.device(to).type == DEVICE.type
        if asks_for_device:
            kwargs["device"] = torch.device("cpu")
        leaves, spec = tree_flatten((args, kwargs))  # once: most of this device's time
        has_device = any(map(is_device_tensor, leaves))
        on_device = has_device if to is None else asks_for_device
        if not (has_device or on_device):
            return self._of_host(name, function, args, kwargs, is_pinned)
        if on_device and not self.has_float64 and self._asks_for_float64(leaves, kwargs):
            raise TypeError("Cannot convert a tensor to float64 dtype as the device framework doesn't support float64")
        if any(isinstance(x, Tensor) and not is_device_tensor(x) and x.device == DEVICE for x in leaves):
            raise HostReadError(
                "torch.tensor(..., device=...) waits for the device: make it on the CPU, then to_device"
            )
        if has_device and name not in TAKE_BOTH and any(map(is_host_tensor, leaves)):
            raise MixedDevicesError(f"{name} takes tensors of the device and of the host")
        if reads_host(function, args, kwargs, is_device_tensor):
            self.waited(name)
        if name == "copy_" and getattr(args[1], "is_number", False):
            self.waited("a number is assigned to one element: use fill_")
        if name == "copy_" and not is_device_tensor(args[0]) and (kwargs.get("non_blocking") or (*args, False)[2]):
            self._copies.append((self.n_events + 1, args[0], on_host(args[1]).clone()))
            return args[0].fill_(torch.nan)
        on_cpu = tree_unflatten(list(map(on_host, leaves)), spec)
        result = function(*on_cpu[0], **on_cpu[1])
        if name not in VIEWS:
            self.note_recorded(name)
        if self.graph is not None:
            self.graph.record(function, *on_cpu, result)
        if name.endswith("_") and not name.endswith("__") and "::" not in name and isinstance(result, Tensor):
            return args[0]
        if "out" in kwargs:
            return kwargs["out"]
        if not on_device or name in ("record_stream",):
            return result
        if not self.has_float64 and any(
            isinstance(x, Tensor) and x.dtype == torch.float64 for x in tree_leaves(result)
        ):
            raise TypeError(f"{name} makes a float64 tensor on a device that has no float64")
        made = DeviceTensor(result) if isinstance(result, Tensor) else tree_map_only(Tensor, DeviceTensor, result)
        if name == "scalar_tensor":
            made.is_number = True
        return made

    def _of_host(self, name: str, function: Any, args: Any, kwargs: Any, is_pinned: bool) -> Any:
        self.note_recorded(f"{name} on the host")
        if name in ("pin_memory", "_pin_memory"):
            return args[0].clone()
        return False if name == "is_pinned" else function(*args, **kwargs)

    def _asks_for_float64(self, leaves: list[Any], kwargs: Any) -> bool:
        tensors = [x for x in leaves if isinstance(x, Tensor) and x.dim()]
        return kwargs.get("dtype") == torch.float64 or any(x.dtype == torch.float64 for x in tensors)

    def __enter__(self) -> PretendDevice:
        accelerator = {
            "current_accelerator": lambda check_available=False: DEVICE,
            "is_available": lambda: True,
            "current_stream": lambda device=None: self.stream,
            "device_count": lambda: 1,
        }
        self._patches = contextlib.ExitStack()
        for name, function in accelerator.items():
            self._patches.enter_context(mock.patch.object(torch.accelerator, name, function))
        self._patches.enter_context(mock.patch.object(torch, "Event", PretendEvent))
        # Before torch forks random numbers, it looks for the device's module, which has none of its own here.
        self._patches.enter_context(mock.patch.object(torch, DEVICE.type, SimpleNamespace(), create=True))
        if not self.has_float64:
            unscale = mock.patch.object(torch.amp.GradScaler, "unscale_", _unscale_as_on_mps)
            self._patches.enter_context(unscale)
        # A plan leaves out what is on "meta", since it has no values: here it has.
        self._patches.enter_context(mock.patch.object(NormPlan, "_device_of_sums", return_value=DEVICE))
        # Single examples are not read from tensors of unknown classes.
        self._patches.enter_context(mock.patch.object(norms, "PLAIN", (*norms.PLAIN, DeviceTensor)))
        self._forget()
        super().__enter__()
        PretendDevice.present = self
        return self

    def __exit__(self, *error: Any) -> None:
        PretendDevice.present = None
        super().__exit__(*error)
        self._patches.close()
        self._forget()

    def _forget(self) -> None:
        """What sonde has asked the device once, it asks the next one again."""
        for name in vars(devices).values():
            if hasattr(name, "cache_clear"):
                name.cache_clear()
