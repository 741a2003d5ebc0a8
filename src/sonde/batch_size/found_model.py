"""What attach finds of a model, checks, and compares over ranks, before any hook is installed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch import Tensor, nn

from sonde.batch_size.module_hook import n_post_accumulate_hooks
from sonde.batch_size.setup import (
    Groups,
    NoiseScaleOptions,
    compare_over_ranks,
    join_comparison,
    n_batch_norms,
    n_sync_batch_norms,
    optimizer_in_words,
    refuse_steps_in_backward,
    same_on_ranks,
)
from sonde.batch_size.taps.dual_norms import SignMetric, SpectralMetric, nuclear_norm_bytes
from sonde.batch_size.taps.metric import AdamMetric, Euclidean, GradientMetric, MetricName, Metrics
from sonde.batch_size.taps.second_moments import SecondMoments
from sonde.batch_size.units import unit_names
from sonde.parallel.data_ranks import axis_of_sequences
from sonde.parallel.devices import accumulation_dtype
from sonde.parallel.optimizers import Optimizers, given_optimizers, parameters_of
from sonde.parallel.parameter_roles import kinds_of, parameter_roles
from sonde.parallel.refused_models import refuse_stage_alone
from sonde.parallel.shares import is_gathered
from sonde.parallel.stages import ModelParameters, model_parameters, refuse_on_all_stages
from sonde.parallel.wrappers import Wrapper, block_of, check_model, find_wrapper

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
class ChosenMetrics:
    """The metrics of one probe.

    Attributes:
        names: those that were asked for, the headline first.
        measured: the first is the plain metric, whose squares the checks of every window use, or Adam's where nothing
            else was asked for.
    """

    names: tuple[MetricName, ...]
    measured: Metrics


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


def group_names(groups: Groups, parameters: ModelParameters) -> list[str]:
    """The name of each parameter's group.

    Args:
        groups: how to group.
        parameters: of the whole model.

    Raises:
        ValueError: when a function returns anything but names.
    """
    if groups is None:
        return ["all" for _ in parameters.names]
    if groups == "blocks":
        return [block_of(name) for name in parameters.names]
    if groups == "kinds":
        return kinds_of(parameters.names, parameters.roles)
    if groups == "parameters":
        return list(parameters.names)
    assert callable(groups)
    names = [groups(name) for name in parameters.names]
    for parameter, name in zip(parameters.names, names, strict=True):
        if not isinstance(name, str):
            raise ValueError(
                f"groups must return a group's name, a str, for each parameter, got {name!r} for {parameter!r}: return "
                "one name for all parameters that belong nowhere else"
            )
    return names


def choose_metrics(
    names: tuple[MetricName, ...],
    model: nn.Module,
    wrapper: Wrapper,
    optimizer: Optimizers,
    *,
    staging_bytes: int,
) -> ChosenMetrics:
    """The metrics of these names, for this model.

    Args:
        names: the headline first.
        model: as it was given.
        wrapper: what was found of it.
        optimizer: as it was given; Adam's metric needs it.
        staging_bytes: bound of the memory that a metric may take.

    Raises:
        ValueError: when the model, its optimizer or the bound do not allow a metric, with the way out.
    """
    given = given_optimizers(optimizer)
    adam = _adam(wrapper, given) if "adam" in names and given else None
    if adam is not None and names == ("adam",) and wrapper.mesh is None and wrapper.sequence_group is None:
        return ChosenMetrics(names, Metrics([adam]))
    metrics: list[GradientMetric] = [Euclidean()]
    for name in names:
        if name == "adam" and adam is not None:
            metrics.append(adam)
        elif name == "sign":
            if reason := _norms_do_not_add_up(wrapper):
                raise ValueError(f"metric='sign' {reason}: use metric='euclidean', or without FSDP2 metric='adam'")
            metrics.append(SignMetric())
        elif name == "spectral":
            metrics.append(_spectral(model, wrapper, given, staging_bytes))
    return ChosenMetrics(names, Metrics(metrics))


def _adam(wrapper: Wrapper, optimizers: Sequence[Any]) -> AdamMetric:
    parameters = list(wrapper.parameters.values())
    if any(map(is_gathered, parameters, wrapper.leaves)):
        others = "'euclidean'" if _norms_do_not_add_up(wrapper) else "'sign' or 'euclidean'"
        raise ValueError(
            "metric='adam' weighs whole gradients by Adam's second moment, of which FSDP2 leaves each rank a part, got "
            f"{wrapper.name}: use metric={others}"
        )
    # The first that holds a measured parameter; it is refused if it does not hold them all.
    optimizer = next((each for each in optimizers if each in wrapper.optimizers), optimizers[0])
    return AdamMetric(SecondMoments(optimizer, parameters))


def _norms_do_not_add_up(wrapper: Wrapper) -> str:
    """Why no rank sees the whole gradient of a piece: norms add up before they are squared. Empty where one does."""
    if wrapper.experts is not None:
        return f"adds up the norms of all parameters, but experts have other pieces than the rest, got {wrapper.name}"
    # Ranks that share sequences share each piece too, and the first of them sees the sum of its gradients.
    if wrapper.pp_mesh is not None or (wrapper.data.n_sharing > 1 and wrapper.sequence_group is None):
        return f"needs the whole gradient of each piece on one rank, got a model cut by {wrapper.name}"
    return ""


def _spectral(model: nn.Module, wrapper: Wrapper, optimizers: Sequence[Any], staging_bytes: int) -> SpectralMetric:
    if wrapper.mesh is not None or wrapper.sequence_group is not None:
        raise ValueError(
            f"metric='spectral' needs each matrix whole on one rank, got a model cut by {wrapper.name}: use DDP, or "
            "metric='adam' or 'euclidean'"
        )
    matrices = _matrices(model, list(wrapper.parameters.values()), optimizers)
    if not matrices:
        raise ValueError(
            "metric='spectral' measures matrices other than embeddings, got a model without: use metric='euclidean'"
        )
    named = list(wrapper.parameters.items())
    dtype = accumulation_dtype(wrapper.leaves[0].device)
    largest = max(matrices, key=lambda i: min(named[i][1].shape))
    needed = nuclear_norm_bytes(named[largest][1].shape, dtype)
    if needed > staging_bytes:
        raise ValueError(
            f"metric='spectral' needs {needed / 2**20:.1f} MiB for {named[largest][0]!r} of shape "
            f"{tuple(named[largest][1].shape)}, got staging_mib={staging_bytes / 2**20:g}: pass "
            f"staging_mib={math.ceil(needed / 2**20)} or more, or metric='euclidean'"
        )
    return SpectralMetric(matrices)


def _matrices(model: nn.Module, parameters: Sequence[Tensor], optimizers: Sequence[Any]) -> list[int]:
    """The parameters that Muon steps or, where there is none, all matrices but embeddings; by index."""
    if muons := [each for each in optimizers if type(each).__name__ == "Muon"]:
        held = {id(p) for p in parameters_of(*muons)}
    else:
        tables = (module for module in model.modules() if isinstance(module, (nn.Embedding, nn.EmbeddingBag)))
        held = {id(p) for p in parameters} - {id(p) for table in tables for p in table.parameters()}
    return [i for i, p in enumerate(parameters) if p.dim() == 2 and p.numel() and id(p) in held]
