"""The plans of calls that come again with the same parameters: a drop-in has nowhere else to keep its own."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor

from sonde.measure.norm_plan import NormPlan

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

_REMEMBERED_AT_MOST = 8


@dataclass(frozen=True)
class Asked:
    """What a plan was asked for; whatever differs makes it another one.

    Attributes:
        parameters: in order, those that come twice included.
        names: of them, if they have any.
        mesh: of all ranks.
        pp_mesh: of the pipeline stages.
    """

    parameters: Sequence[Tensor]
    names: Sequence[str] | None
    mesh: DeviceMesh | None
    pp_mesh: DeviceMesh | None

    def plan(self, replicas: Mapping[Any, int] | None = None) -> NormPlan:
        """A new plan; see `NormPlan` for `replicas`."""
        return NormPlan(self.parameters, self.names, mesh=self.mesh, pp_mesh=self.pp_mesh, replicas=replicas)


class PlanMemory:
    """The last few plans, by what they were asked for. Keeps no tensor alive.

    A plan is taken out while it is used, so that no two threads have the same. Ranks that make the same calls remember
    the same plans.
    """

    def __init__(self) -> None:
        self._kept: list[tuple[_Trace, NormPlan]] = []

    def take(self, asked: Asked) -> NormPlan | None:
        """The plan of an earlier call for the same, or None."""
        for at, (trace, plan) in enumerate(self._kept):
            if trace.is_of(asked):
                del self._kept[at]
                plan.hold(asked.parameters)
                return plan
        return None

    def keep(self, asked: Asked, plan: NormPlan) -> None:
        """Remember a plan that has served."""
        plan.let_go()
        self._kept = [(_Trace(asked), plan), *self._kept[: _REMEMBERED_AT_MOST - 1]]


class _Trace:
    """What is left of what was asked for, its tensors by weak references."""

    def __init__(self, asked: Asked) -> None:
        self._references = [weakref.ref(p) for p in asked.parameters]
        self._trainable = [p.requires_grad for p in asked.parameters]
        self._names, self._mesh, self._pp_mesh = asked.names, asked.mesh, asked.pp_mesh

    def is_of(self, asked: Asked) -> bool:
        return (
            len(self._references) == len(asked.parameters)
            and self._mesh is asked.mesh
            and self._pp_mesh is asked.pp_mesh
            and all(is_there() is p for is_there, p in zip(self._references, asked.parameters, strict=True))
            and self._trainable == [p.requires_grad for p in asked.parameters]
            and self._names == asked.names
        )
