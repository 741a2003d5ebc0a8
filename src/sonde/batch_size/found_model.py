"""What attach finds of a model, checks, and compares over ranks, before any hook is installed."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch.distributed as dist
from torch import Tensor, nn

from sonde.batch_size.metric_choice import ChosenMetrics, choose_metrics
from sonde.batch_size.model_checks import (
    n_batch_norms,
    n_post_accumulate_hooks,
    n_sync_batch_norms,
    optimizer_in_words,
    refuse_steps_in_backward,
)
from sonde.batch_size.parameter_groups import group_names
from sonde.batch_size.setup import NoiseScaleOptions, compare_over_ranks, join_comparison, same_on_ranks
from sonde.batch_size.units import unit_names
from sonde.parallel.data_ranks import axis_of_sequences
from sonde.parallel.optimizers import Optimizers
from sonde.parallel.parameter_roles import parameter_roles
from sonde.parallel.refused_models import refuse_stage_alone
from sonde.parallel.stages import ModelParameters, model_parameters, refuse_on_all_stages
from sonde.parallel.wrappers import Wrapper, check_model, find_wrapper

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


@dataclass(frozen=True)
class RanksOfModel:
    """The ranks of a model, as far as the user has to say; see `NoiseScaleProbe`."""

    process_group: dist.ProcessGroup | None = None
    mesh: DeviceMesh | None = None
    pp_mesh: DeviceMesh | None = None
    expert_mesh: DeviceMesh | None = None
    cp_mesh: DeviceMesh | None = None


@dataclass(frozen=True)
class FoundModel:
    """A model that can be measured.

    Attributes:
        wrapper: what it is wrapped in, with this rank's parameters.
        whole: the parameters of the whole model.
        group_names: the group of each parameter of the whole model.
        units: names of the units.
        metrics: how its gradients are measured.
        sequences_axis: the name of a mesh axis that looks like context parallelism while `cp_mesh` is not given.
        facts: what else the log's header says of it.
    """

    wrapper: Wrapper
    whole: ModelParameters
    group_names: list[str]
    units: tuple[str, ...]
    metrics: ChosenMetrics
    sequences_axis: str | None
    facts: dict[str, object] = field(default_factory=dict)

    @property
    def parameters(self) -> list[nn.Parameter]:
        """This rank's trainable parameters."""
        return list(self.wrapper.parameters.values())

    @property
    def experts(self) -> frozenset[int]:
        """Which of this rank's parameters are experts' that several ranks feed."""
        return frozenset() if self.wrapper.experts is None else self.wrapper.experts.indices

    @property
    def in_pipeline(self) -> bool:
        """Whether this rank holds pipeline stages."""
        return self.wrapper.pp_mesh is not None


def find_parameters(
    model: nn.Module, ranks: RanksOfModel, optimizer: Optimizers = None
) -> tuple[Wrapper, ModelParameters]:
    """Find a model's wrapper, and the parameters of all its pipeline stages.

    Args:
        model: as the user calls it.
        ranks: as they were given.
        optimizer: as it was given.

    Raises:
        ValueError: for a model that cannot be measured; on all ranks of a pipeline, if the stage of one is refused.
    """
    if ranks.pp_mesh is not None:
        refuse_on_all_stages(_why_refused(model), ranks.pp_mesh)
    of_ranks = ranks.process_group, ranks.mesh, ranks.pp_mesh, ranks.expert_mesh, ranks.cp_mesh
    wrapper = find_wrapper(model, *of_ranks, optimizer=optimizer)
    if ranks.pp_mesh is None:
        refuse_stage_alone(model, "pass pp_mesh=, the axis of the mesh along which stages lie")
    refuse_steps_in_backward(model)
    return wrapper, model_parameters(wrapper.parameters, parameter_roles(model, wrapper.parameters), wrapper.pp_mesh)


def _why_refused(model: nn.Module) -> str:
    try:
        check_model(model)
        refuse_steps_in_backward(model)
    except ValueError as error:
        return str(error)
    return ""


def find_model(
    model: nn.Module,
    optimizer: Optimizers,
    options: NoiseScaleOptions,
    ranks: RanksOfModel,
    *,
    has_comm_hook: bool = False,
) -> FoundModel:
    """Find a model's wrapper, parameters, groups and metrics, and see that all ranks have found the same.

    Args:
        model: as the user calls it.
        optimizer: as it was given.
        options: of the probe.
        ranks: as they were given.
        has_comm_hook: whether a DDP communication hook was given.

    Raises:
        ValueError: for a model that cannot be measured; on all ranks, when they hold other models or options.
    """
    wrapper, whole = find_parameters(model, ranks, optimizer)
    if wrapper.experts is not None and wrapper.pp_mesh is not None:
        raise ValueError(
            "experts in pipeline stages are not measured: measure the norm by sonde.clip_grad_norm_, or the noise "
            "scale without a pipeline"
        )
    staging_bytes = options.staging_bytes(wrapper.leaves[0].device)
    try:
        if has_comm_hook and options.tap != "comm_hook":
            raise ValueError(
                f"comm_hook= needs tap='comm_hook', got tap={options.tap!r}: set it, or register the hook with DDP"
            )
        names = group_names(options.groups, whole)
        metrics = choose_metrics(options.metrics, model, wrapper, optimizer, staging_bytes=staging_bytes)
    except Exception as error:  # of the user's own function, or for this rank alone: its peers must not wait for it
        join_comparison(wrapper, error)
        raise
    compare_over_ranks(wrapper, same_on_ranks(options, wrapper, whole, names))
    parameters: list[Tensor] = list(wrapper.parameters.values())
    return FoundModel(
        wrapper,
        whole,
        names,
        unit_names(options.unit),
        metrics,
        sequences_axis=axis_of_sequences(parameters) if ranks.cp_mesh is None else None,
        facts={
            "optimizer": optimizer_in_words(optimizer, wrapper),
            "batch_norms": n_batch_norms(model),
            "sync_batch_norms": n_sync_batch_norms(model, wrapper.n_ranks),
            "post_accumulate_hooks": n_post_accumulate_hooks(parameters),
        },
    )
