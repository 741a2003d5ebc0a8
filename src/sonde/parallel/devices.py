"""What depends on a device: streams and events beside the host, copies that do not wait, and the precision of sums.

The only file that asks for devices by name. torch calls the device that works beside the host the accelerator: CUDA,
ROCm, XPU, MPS and others. A process has at most one kind of it.
"""

from __future__ import annotations

import contextlib
import functools
import math
import warnings
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor


def default_device() -> torch.device:
    """The accelerator if there is one, else the CPU."""
    return torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")


def is_at_hand(device: torch.device) -> bool:
    """Whether a value on the device can be read without waiting for it."""
    return device.type == "cpu"


def runs_beside_host(device: torch.device) -> bool:
    """Whether the host may run ahead of the device, which then has streams and events."""
    return device.type != "cpu" and _is_accelerator(device.type)


@functools.cache  # asked by every hook of a backward
def _is_accelerator(device_type: str) -> bool:
    return default_device().type == device_type


def default_staging_bytes(device: torch.device) -> int:
    """Memory for intermediate results: more beside an accelerator, where each operator costs a launch."""
    return (128 if runs_beside_host(device) else 8) * 2**20


# Streams.


def stream_of(tensor: Tensor) -> torch.Stream | None:
    """The present stream of a tensor's device; None on a device that has none."""
    if tensor.is_cpu or not _is_accelerator(tensor.device.type):
        return None
    return torch.accelerator.current_stream(tensor.get_device())  # the index: torch looks a device up each time


def keep_for_present_stream(tensor: Tensor) -> None:
    """Tell the allocator that the present stream reads a tensor which may have been made on another one.

    Otherwise the tensor's memory could be used again before the present stream has read it.
    """
    if (stream := stream_of(tensor)) is not None and tensor.device.type != "mps":  # MPS has one stream alone
        tensor.record_stream(stream)


def is_capturing(device: torch.device) -> bool:
    """Whether the device's present stream is recorded into a graph, which a look at an event would spoil."""
    if not runs_beside_host(device):
        return False
    if device.type == "cuda":  # torch.Stream has `is_capturing` only from torch 2.13 on
        return torch.cuda.is_current_stream_capturing()
    asks = getattr(torch.accelerator.current_stream(device), "is_capturing", None)
    try:
        return asks is not None and bool(asks())
    except (RuntimeError, NotImplementedError):  # a device without graphs
        return False


# Events.


def record_event(device: torch.device, *, enable_timing: bool = False) -> torch.Event:
    """An event at the end of the work that the device's present stream has been given so far."""
    event = torch.Event(device=device, enable_timing=enable_timing)
    event.record(torch.accelerator.current_stream(device))
    return event


@functools.cache
def has_timed_events(device: torch.device) -> bool:
    """Whether the device's events tell the time between them. Asks the device once, and waits for its answer."""
    if not runs_beside_host(device):
        return False
    try:
        first, second = (record_event(device, enable_timing=True) for _ in range(2))
        second.synchronize()
        first.elapsed_time(second)
    except (RuntimeError, NotImplementedError) as error:
        warnings.warn(
            f"events on {device} cannot be timed ({str(error).partition(chr(10))[0]}): windows are timed on the host's "
            "clock, which shows when work was given to the device, not when it was done",
            stacklevel=2,
        )
        return False
    return True


# Copies.


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """A tensor on another device; the tensor itself if it is there already.

    A copy to the CPU waits, since the values could otherwise be read before they arrive. Every other copy does not. On
    a device without fp64, fp64 numbers arrive in fp32.
    """
    if tensor.device == device:
        return tensor
    if tensor.dtype == torch.float64:
        tensor = tensor.to(accumulation_dtype(device))
    if tensor.device.type == "cpu" and runs_beside_host(device) and _can_pin(device.type):
        # Only a copy from pinned memory does not wait. The allocator keeps that memory until the copy is done.
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=device.type != "cpu")


@dataclass(frozen=True)
class HostCopy:
    """A copy of a tensor on the host, which the device may still be filling."""

    host: Tensor
    """The values; only after they have arrived."""
    copied: torch.Event | None

    def has_arrived(self) -> bool:
        """Whether the values are there; never waits."""
        return self.copied is None or self.copied.query()

    def wait(self) -> None:
        """Wait for the values."""
        if self.copied is not None:
            self.copied.synchronize()


def start_copy_to_host(tensor: Tensor) -> HostCopy:
    """Start copying a tensor to the host, beside the device's other work."""
    if not runs_beside_host(tensor.device):
        return HostCopy(tensor.cpu(), None)
    # Only a copy into pinned memory does not wait; the event shows when it is done.
    pins = _can_pin(tensor.device.type)
    host = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=pins)
    host.copy_(tensor, non_blocking=pins)
    return HostCopy(host, record_event(tensor.device))


@functools.cache
def _can_pin(device_type: str) -> bool:
    """Whether the accelerator gives out pinned memory. A copy without it is right, but waits."""
    try:
        torch.empty(1, device="cpu", pin_memory=True)
    except (RuntimeError, NotImplementedError):
        return False
    return True


# The precision of sums.


@functools.cache
def has_float64(device: torch.device) -> bool:
    """Whether a device computes in fp64. Asks it once, where the answer is not known: some XPUs have no fp64."""
    if device.type in ("cpu", "cuda", "mps"):
        return device.type != "mps"
    try:
        torch.zeros(1, dtype=torch.float64, device=device).add_(1.0)
    except (RuntimeError, TypeError, NotImplementedError):
        return False
    return True


def accumulation_dtype(device: torch.device) -> torch.dtype:
    """The dtype of sums on a device: fp64, or fp32 on devices without it."""
    return torch.float64 if has_float64(device) else torch.float32


def exact_bits(device: torch.device, n_ranks: int) -> int:
    """Bits of whole numbers, as large on one rank as on another, whose sum over ranks is exact on a device."""
    return (53 if has_float64(device) else 24) - math.ceil(math.log2(n_ranks))


def zero_sums(*shape: int, device: torch.device) -> Tensor:
    """Zeros to add to, in the dtype of sums."""
    return torch.zeros(shape, dtype=accumulation_dtype(device), device=device)


def widened(tensor: Tensor) -> Tensor:
    """A tensor in the dtype of sums on its device."""
    return tensor.to(accumulation_dtype(tensor.device))


# Random numbers.


@contextlib.contextmanager
def preserve_randomness() -> Iterator[None]:
    """On exit, the random generators of the CPU and of every accelerator are in the state that they had."""
    device = default_device()
    if device.type == "mps":  # its only generator takes no number, which `fork_rng` would pass
        state = torch.mps.get_rng_state()
        try:
            with torch.random.fork_rng(devices=[]):
                yield
        finally:
            torch.mps.set_rng_state(state)
        return
    # Of every device: seeding changes all of them.
    on = [] if device.type == "cpu" else list(range(torch.accelerator.device_count()))
    with torch.random.fork_rng(devices=on, device_type="cuda" if device.type == "cpu" else device.type):
        yield
