"""The cost of a measurement: seconds by phase, and memory."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path

import torch

from sonde.parallel.devices import peak_bytes

_STATUS = Path("/proc/self/status")


class Cost:
    """Counts seconds and memory from its creation on.

    Args:
        device: the model's device.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._peak = _peak_bytes(device)
        self.seconds: dict[str, float] = {}
        """Seconds by phase."""

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count the seconds inside as this phase; a phase may come several times."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start

    def peak_bytes(self) -> int | None:
        """Growth of the process's peak memory; None if the system does not report it."""
        if self._peak is None:
            return None
        now = _peak_bytes(self._device)
        return None if now is None else now - self._peak


def _peak_bytes(device: torch.device) -> int | None:
    """The peak so far: allocated memory on a device, resident memory on Linux."""
    if device.type != "cpu":
        return peak_bytes(device)
    if not _STATUS.exists():
        return None
    [line] = [line for line in _STATUS.read_text().splitlines() if line.startswith("VmHWM")]
    return 1024 * int(line.split()[1])
