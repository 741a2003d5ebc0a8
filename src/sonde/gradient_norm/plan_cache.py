"""The plans of the last few requests, for a drop-in that is called with the same parameters at every step."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from sonde.gradient_norm.gradient_groups import marks_of
from sonde.gradient_norm.plan import NormPlan

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

_MAX_ENTRIES = 8


@dataclass(frozen=True)
class PlanRequest:
    """What a plan is made for. A request that differs in anything gets another plan.

    Attributes:
        parameters: in order; a tensor may come twice.
        names: of the parameters, if they have any.
        mesh: all ranks that hold any of the model.
        pp_mesh: the pipeline stages.
        problem: what is wrong with the request on this rank; the plan holds it for the other ranks.
    """

    parameters: Sequence[Tensor]
    names: Sequence[str] | None
    mesh: DeviceMesh | None
    pp_mesh: DeviceMesh | None
    problem: ValueError | None = None

    def plan(self, replicas: Mapping[Any, int] | None = None, *, module: nn.Module | None = None) -> NormPlan:
        """A new plan; see `NormPlan` for `replicas` and `module`."""
        return NormPlan(
            self.parameters,
            self.names,
            mesh=self.mesh,
            pp_mesh=self.pp_mesh,
            replicas=replicas,
            module=module,
            problem=self.problem,
        )

    # Each is read once a call, by `PlanCache.take`; `PlanCache.keep` takes what was read.

    @cached_property
    def addresses(self) -> list[int]:
        """Which tensors these are."""
        return list(map(id, self.parameters))

    @cached_property
    def specs(self) -> list[Any]:
        """How each parameter itself is placed."""
        return [getattr(p, "_spec", None) for p in self.parameters]

    @cached_property
    def traits(self) -> list[tuple[object, ...]]:
        """What else a plan takes from each parameter. (The plan compares shapes itself.)

        They are: whether it is trained, and has a gradient (without a gradient, a plan uses what it saw of the gradient
        before); its dtype; the marks of other frameworks.
        """
        return [
            (p.requires_grad, p.grad is not None, p.dtype, marks_of(p) if vars(p) else None) for p in self.parameters
        ]


class PlanCache:
    """The plans of the last few requests.

    A cached plan behaves exactly like a new one, since everything that a new plan would look at is compared. So
    ranks need not have the same plans cached.
    """

    def __init__(self) -> None:
        self._entries: list[_CacheEntry] = []

    def take(self, request: PlanRequest) -> NormPlan | None:
        """The plan of an earlier request like this one, or None. It leaves the cache: no other thread can take it."""
        for entry in list(self._entries):
            if entry.matches(request):
                try:
                    self._entries.remove(entry)
                except ValueError:  # another thread was faster
                    return None
                return entry.rebind(request)
        return None

    def keep(self, request: PlanRequest, plan: NormPlan) -> None:
        """Cache a plan that has served its call. It releases its tensors, and is usable again once it is taken."""
        plan.release()
        self._entries.insert(0, _CacheEntry(request, plan))
        del self._entries[_MAX_ENTRIES:]


class _CacheEntry:
    """A plan that has released its tensors, and all that it depends on.

    Tensors are known by their addresses, without any reference to them. A strong reference would keep them alive; a
    weak one would break `model.to()`, as torch does not swap sharded tensors that have weak references. Another tensor
    may come to an old address: its spec and traits are compared, and a plan knows no more of a tensor than these.
    """

    def __init__(self, request: PlanRequest, plan: NormPlan) -> None:
        self._plan = plan
        self._addresses, self._specs, self._traits = request.addresses, request.specs, request.traits
        self._names, self._meshes = request.names, (request.mesh, request.pp_mesh)

    def matches(self, request: PlanRequest) -> bool:
        """Whether a new plan for this request would be the same."""
        return (
            self._addresses == request.addresses
            and self._meshes == (request.mesh, request.pp_mesh)  # by value: mesh["pp"] is another object at every call
            and all(map(operator.is_, self._specs, request.specs))  # by `is`: a new process group's may be equal
            and self._traits == request.traits
            and self._names == request.names
        )

    def rebind(self, request: PlanRequest) -> NormPlan:
        """The plan with the parameters and meshes of a request that matches."""
        self._plan.rebind(request.parameters, request.mesh, request.pp_mesh)
        return self._plan
