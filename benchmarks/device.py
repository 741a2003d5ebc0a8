"""The device that a benchmark runs on: asked for by `--device`, refused if it is not there, named in the results."""

from __future__ import annotations

import argparse
import re
import time
from collections.abc import Callable

import torch


def add_option(parser: argparse.ArgumentParser) -> None:
    """The option `--device`."""
    parser.add_argument("--device", type=checked, default="cpu", help="cpu, or an accelerator of torch: cuda, xpu, mps")


def checked(name: str) -> str:
    """The name of a device that is there.

    Raises:
        ArgumentTypeError: for another; `argparse` prints its message and ends the program.
    """
    there = torch.accelerator.current_accelerator(check_available=True)
    known = ["cpu", *([there.type] if there is not None else [])]
    if name not in known:
        raise argparse.ArgumentTypeError(
            f"there is no device {name!r} on this machine, where torch {torch.__version__} finds "
            f"{' and '.join(known)}: pass --device {known[-1]}"
        )
    return name


def count(device: str) -> int:
    """How many of them there are."""
    return 1 if device == "cpu" else torch.accelerator.device_count()


def full_name(device: str) -> str:
    """The name that its driver gives it; else its type."""
    name = getattr(torch.get_device_module(device), "get_device_name", None) if device != "cpu" else None
    return str(name()) if name is not None else device


def stem(benchmark: str, device: str) -> str:
    """The name of the files with the results on a device, without an ending: it has the device's own name."""
    return f"{benchmark}_{re.sub(r'[^a-z0-9]+', '_', full_name(device).lower()).strip('_')}"


def synchronize(device: str) -> None:
    """Wait until the device has done its work."""
    if device != "cpu":
        torch.accelerator.synchronize()


def seconds_of(work: Callable[[], object], device: str) -> float:
    """Time until the device has done some work, begun when it has nothing else to do."""
    synchronize(device)
    start = time.perf_counter()
    work()
    synchronize(device)
    return time.perf_counter() - start
