"""What depends on a device: the dtype of sums, and copies that do not wait where that can be."""

from __future__ import annotations

import torch
from torch import Tensor


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """A tensor on another device; itself if it is there.

    To the CPU this waits, as the values could be read before they have come; everywhere else it does not.
    """
    if tensor.device == device:
        return tensor
    if tensor.device.type == "cpu" and device.type == "cuda":
        tensor = tensor.pin_memory()  # only from there the copy does not wait; the allocator keeps it until it is done
    return tensor.to(device, non_blocking=device.type != "cpu")


def accumulation_dtype(device: torch.device) -> torch.dtype:
    """The dtype that sums are kept in: fp64, or fp32 on devices without it."""
    return torch.float32 if device.type == "mps" else torch.float64
