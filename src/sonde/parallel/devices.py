"""What depends on a device: the dtype of sums, and copies that do not wait if possible."""

from __future__ import annotations

import torch
from torch import Tensor


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """A tensor on another device; the tensor itself if it is there already.

    A copy to the CPU waits, since the values could otherwise be read before they arrive. Every other copy does not.
    """
    if tensor.device == device:
        return tensor
    if tensor.device.type == "cpu" and device.type == "cuda":
        # Only a copy from pinned memory does not wait. The allocator keeps that memory until the copy is done.
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=device.type != "cpu")


def accumulation_dtype(device: torch.device) -> torch.dtype:
    """The dtype that sums are kept in: fp64, or fp32 on devices without it."""
    return torch.float32 if device.type == "mps" else torch.float64
