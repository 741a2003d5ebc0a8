"""The plans of calls that come again with the same parameters: a drop-in has nowhere else to keep its own."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor

from sonde.gradient_norm.plan import NormPlan

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

_REMEMBERED_AT_MOST = 8


@dataclass(frozen=True)
class PlanRequest:
    """What a plan was asked for; whatever differs makes it another one.

    Attributes:
        parameters: in order, those that come twice included.
        names: of them, if they have any.
        mesh: of all ranks.
        pp_mesh: of the pipeline stages.
        problem: what is wrong with it on this rank, which the others are to hear of.
    """

    parameters: Sequence[Tensor]
    names: Sequence[str] | None
    mesh: DeviceMesh | None
    pp_mesh: DeviceMesh | None
    problem: ValueError | None = None

    def plan(self, replicas: Mapping[Any, int] | None = None) -> NormPlan:
        """A new plan; see `NormPlan` for `replicas`."""
        plan = NormPlan(self.parameters, self.names, mesh=self.mesh, pp_mesh=self.pp_mesh, replicas=replicas)
        plan.bad_request = self.problem
        return plan


class PlanCache:
    """The last few plans, by what they were asked for.

    A plan that is taken out does what a new one would: whatever a new one would look at is compared. So it does not
    matter to other ranks whether one remembers. Tensors are known by their addresses, neither kept alive nor referred
    to: torch does not swap tensors with weak references, as `model.to()` does with sharded ones. Another tensor at an
    old address is told by how it lies, which is all that a plan knows of it.
    """

    def __init__(self) -> None:
        self._kept: list[_Remembered] = []

    def take(self, asked: PlanRequest) -> NormPlan | None:
        """The plan of an earlier call for the same, or None. It is taken out, so that no other thread has it."""
        for one in list(self._kept):
            if one.is_of(asked):
                try:
                    self._kept.remove(one)
                except ValueError:  # another thread was faster
                    return None
                one.plan.hold(asked.parameters, asked.mesh, asked.pp_mesh)
                return one.plan
        return None

    def keep(self, asked: PlanRequest, plan: NormPlan) -> None:
        """Remember a plan that has served."""
        remembered = _Remembered(asked, plan)
        plan.let_go()
        self._kept.insert(0, remembered)
        del self._kept[_REMEMBERED_AT_MOST:]


class _Remembered:
    """A plan without its tensors, and all that it depends on."""

    def __init__(self, asked: PlanRequest, plan: NormPlan) -> None:
        self.plan = plan
        self._addresses = _addresses(asked)
        self._specs, self._flags = _specs(asked), _flags(asked)
        self._names, self._meshes = asked.names, (asked.mesh, asked.pp_mesh)

    def is_of(self, asked: PlanRequest) -> bool:
        return (
            self._addresses == _addresses(asked)
            and self._meshes == (asked.mesh, asked.pp_mesh)  # by value: mesh["pp"] is another object at every call
            and all(map(operator.is_, self._specs, _specs(asked)))  # those of a new process group may be equal
            and self._flags == _flags(asked)
            and self._names == asked.names
        )


def _addresses(asked: PlanRequest) -> list[int]:
    return list(map(id, asked.parameters))


def _specs(asked: PlanRequest) -> list[Any]:
    """How each lies by itself."""
    return [getattr(p, "_spec", None) for p in asked.parameters]


def _flags(asked: PlanRequest) -> list[tuple[bool, bool]]:
    """Whether each is trained, and has a gradient: for one without, a plan goes by what it knew of it before."""
    return [(p.requires_grad, p.grad is not None) for p in asked.parameters]
