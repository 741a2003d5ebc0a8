"""Pipeline stages: each rank holds some of the model's parameters, and all ranks know the list of all of them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from sonde.parallel.meshes import check_mesh
from sonde.parallel.process_groups import gather_objects, group_of_mesh

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


@dataclass(frozen=True)
class ModelParameters:
    """The parameters of the whole model.

    Attributes:
        names: of all of them; those of the first pipeline rank first, then those of the second, and so on.
        shapes: of each, whole.
        roles: of each, from `parameter_roles`.
        first: where this rank's parameters begin in that list.
    """

    names: list[str]
    shapes: list[tuple[int, ...]]
    roles: list[str]
    first: int = 0

    @property
    def numel(self) -> int:
        """Elements of the whole model."""
        return sum(map(math.prod, self.shapes))


def refuse_on_all_stages(why: str, pp_mesh: DeviceMesh) -> None:
    """Raise on all ranks of a pipeline if the stage of one is refused. All of them have to call this.

    Args:
        why: this rank's stage is refused; empty if it is not.
        pp_mesh: the pipeline's ranks.

    Raises:
        ValueError: naming the stages; also when `pp_mesh` is no mesh of one axis that contains this rank.
    """
    check_mesh("pp_mesh", pp_mesh, n_axes=1)
    reasons = gather_objects(group_of_mesh(pp_mesh), lambda: why)
    if why:
        raise ValueError(why)
    if refused := [f"stage {rank}: {reason}" for rank, reason in enumerate(reasons) if reason]:
        raise ValueError(f"another rank's pipeline stage cannot be measured. {'. '.join(refused)}")


def model_parameters(own: Mapping[str, Tensor], roles: Sequence[str], pp_mesh: DeviceMesh | None) -> ModelParameters:
    """The parameters of all pipeline stages, by one exchange. All ranks of the pipeline have to call this.

    Names that two pipeline ranks both use, as those of modules that were numbered anew on each rank, begin with the
    number of the rank.

    Args:
        own: this rank's parameters, by name.
        roles: of each, from `parameter_roles`.
        pp_mesh: the pipeline's ranks; None without a pipeline.

    Raises:
        ValueError: when `pp_mesh` is no mesh of one axis that contains this rank.
    """
    mine = [(name, tuple(p.shape), role) for (name, p), role in zip(own.items(), roles, strict=True)]
    if pp_mesh is None:
        return ModelParameters(list(own), [shape for _, shape, _ in mine], list(roles))
    check_mesh("pp_mesh", pp_mesh, n_axes=1)
    stages = gather_objects(group_of_mesh(pp_mesh), lambda: mine)
    every_name = [name for stage in stages for name, *_ in stage]
    are_numbered = len(set(every_name)) < len(every_name)
    prefixes = [f"stages.{rank}." if are_numbered else "" for rank in range(len(stages))]
    names = [prefix + name for prefix, stage in zip(prefixes, stages, strict=True) for name, *_ in stage]
    shapes = [tuple(shape) for stage in stages for _, shape, _ in stage]
    every_role = [role for stage in stages for *_, role in stage]
    return ModelParameters(names, shapes, every_role, first=sum(map(len, stages[: pp_mesh.get_local_rank()])))
