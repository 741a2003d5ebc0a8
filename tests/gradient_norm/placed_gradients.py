"""Gradients with given placements and local values, for cases that no small model has."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor


def placed(
    local: Tensor, mesh: DeviceMesh, placements: list[Any], shape: tuple[int, ...], like: list[Any] | None = None
) -> nn.Parameter:
    """A parameter whose gradient has this local part; the parameter is placed like its gradient, or as `like`."""

    def dtensor(t: Tensor, where: list[Any]) -> DTensor:
        stride = torch.empty(shape).stride()
        return DTensor.from_local(t, mesh, where, run_check=False, shape=torch.Size(shape), stride=stride)

    parameter = nn.Parameter(dtensor(torch.zeros_like(local), like or placements))
    parameter.grad = dtensor(local, placements)
    return parameter
