"""How a gradient is spread over ranks."""

from __future__ import annotations

import sys

from torch import nn


def is_dtensor(value: object) -> bool:
    """Whether a tensor is a DTensor, without importing DTensor: that takes half a second, and who has one has it."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(value, module.DTensor)


def is_fully_sharded(module: nn.Module) -> bool:
    """Whether FSDP, of either version, holds this module's parameters; imports neither."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return fsdp is not None and isinstance(module, (fsdp.FSDPModule, fsdp.FullyShardedDataParallel))
