"""What a measurement has cost: seconds by phase, and memory."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path

import torch

_STATUS = Path("/proc/self/status")


class Cost:
    """Counts from when it is made.

    Args:
        device: the model's.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._peak = _peak_bytes(device)
        self.seconds: dict[str, float] = {}
        """By phase."""

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count what happens inside to a phase, which may come several times."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start

    def peak_bytes(self) -> int | None:
        """By how much the process's peak has grown; None where the system does not say."""
        if self._peak is None:
            return None
        now = _peak_bytes(self._device)
        return None if now is None else now - self._peak


def _peak_bytes(device: torch.device) -> int | None:
    """Allocated on a GPU, or resident on Linux, at most so far."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    if not _STATUS.exists():
        return None
    [line] = [line for line in _STATUS.read_text().splitlines() if line.startswith("VmHWM")]
    return 1024 * int(line.split()[1])
