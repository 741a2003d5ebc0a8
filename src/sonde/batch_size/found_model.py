"""What attach finds of a model, checks, and compares over ranks, before any hook is installed."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch import Tensor, nn

from sonde.batch_size.forward_units import FIRST_DIM, is_of_forward
from sonde.batch_size.hooks import why_no_hook
from sonde.batch_size.setup import Groups, NoiseScaleOptions, is_number, n_batch_norms, n_sync_batch_norms
from sonde.batch_size.taps.metric import (
    AdamMetric,
    Euclidean,
    GradientMetric,
    SignMetric,
    SpectralMetric,
    nuclear_norm_bytes,
)
from sonde.batch_size.taps.shared_pieces import PieceClass, experts_apart
from sonde.parallel.data_ranks import axis_of_sequences
from sonde.parallel.devices import accumulation_dtype
from sonde.parallel.parameter_roles import kinds_of, parameter_roles
from sonde.parallel.process_groups import ModelParameters, check_same_on_ranks, model_parameters, refuse_on_all_stages
from sonde.parallel.refused_models import refuse_stage_alone
from sonde.parallel.shares import is_gathered
from sonde.parallel.unwrap import Optimizers, given_optimizers, kind_of, parameters_of, settings_of
from sonde.parallel.wrappers import Wrapper, block_of, check_model, comm_hook_name, find_wrapper
from sonde.wording import some_of

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

NOT_ON_ALL_RANKS = "Other ranks had no such error. They raise one too, since this rank did."
"""A note of an error in `attach`."""
_MOST_LOGGED = 256
"""Groups that go to the log unless the user says so. A thousand of them are 100 kB with each reading."""


@dataclass(frozen=True)
class RanksOfModel:
    """The ranks of a model, as far as the user has to say; see `sonde.attach`."""

    process_group: dist.ProcessGroup | None = None
    mesh: DeviceMesh | None = None
    pp_mesh: DeviceMesh | None = None
    expert_mesh: DeviceMesh | None = None
    cp_mesh: DeviceMesh | None = None


ONE_PROCESS = RanksOfModel()


@dataclass(frozen=True)
class FoundModel:
    """A model that can be measured.

    Attributes:
        wrapper: what it is wrapped in, with this rank's parameters.
        whole: the parameters of the whole model.
        group_names: the group of each parameter of the whole model.
        classes: of parameters that are solved apart from the rest, the same on all ranks.
        metrics: in which its gradients are measured: those that were asked for, and the plain one first, whose squares
            the checks of every window use; or Adam's first where nothing else was asked for.
        options: of the probe; no units of forwards where this model shows none.
        sequences_axis: the name of a mesh axis that looks like context parallelism while `cp_mesh` is not given.
        record: what the log's header says of the model and of the options.
    """

    wrapper: Wrapper
    whole: ModelParameters
    group_names: list[str]
    classes: Sequence[PieceClass]
    metrics: Sequence[GradientMetric]
    options: NoiseScaleOptions
    sequences_axis: str | None
    record: dict[str, object]

    @property
    def groups(self) -> tuple[str, ...]:
        """The names of the parameter groups."""
        return tuple(dict.fromkeys(self.group_names))


_IN_WORDS = (
    "counted by your function from what the model is called with",
    "the rows of what the model is called with, unless piece(units=...) says it",
)
"""How units are counted in forward: by a function, by rows."""


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
    return wrapper, model_parameters(wrapper.parameters, parameter_roles(model, wrapper.parameters), wrapper.pp_mesh)


def _why_refused(model: nn.Module) -> str:
    try:
        check_model(model)
    except ValueError as error:
        return str(error)
    return ""


def find_model(model: nn.Module, optimizer: Optimizers, options: NoiseScaleOptions, ranks: RanksOfModel) -> FoundModel:
    """Find a model's wrapper, parameters, groups and metrics, and see that all ranks have found the same.

    Args:
        model: as the user calls it.
        optimizer: as it was given.
        options: of the probe.
        ranks: as they were given.

    Raises:
        ValueError: for a model that cannot be measured; on all ranks, when they hold other models or options.
    """
    wrapper, whole = find_parameters(model, ranks, optimizer)
    if wrapper.experts is not None and wrapper.pp_mesh is not None:
        raise ValueError(
            "experts in pipeline stages are not measured: measure the norm by sonde.clip_grad_norm_, or the noise "
            "scale without a pipeline"
        )
    classes = [experts_apart(wrapper.experts)] if wrapper.experts is not None else []
    with raised_on_all_ranks(model, ranks, wrapper):  # also of the user's own function, or for this rank alone
        names = _group_names(options.groups, whole)
        metrics = _choose_metrics(options, model, wrapper, classes, optimizer)
    _compare_over_ranks(wrapper, _same_on_ranks(options, wrapper, whole, names))
    options = _with_units_that_show(model, options, in_pipeline=wrapper.pp_mesh is not None)
    axis = axis_of_sequences(list(wrapper.parameters.values())) if ranks.cp_mesh is None else None
    record = _record(options, wrapper, whole, tuple(dict.fromkeys(names))) | {
        "optimizer": _optimizer_in_words(optimizer, wrapper),
        "optimizer_kind": kind_of(wrapper.optimizers),
        "optimizer_settings": settings_of(wrapper.optimizers),
        "batch_norms": n_batch_norms(model),
        "sync_batch_norms": n_sync_batch_norms(model, wrapper.n_ranks),
    }
    return FoundModel(wrapper, whole, names, classes, metrics, options, axis, record)


def _record(
    options: NoiseScaleOptions, wrapper: Wrapper, whole: ModelParameters, groups: Sequence[str]
) -> dict[str, object]:
    """What the log's header says of the model and of the options."""
    units, logs_groups = options.units_per_piece, options.log_groups
    if logs_groups is None:
        logs_groups = options.groups != "parameters" and len(groups) <= _MOST_LOGGED
    return {
        "wrapper": wrapper.name,
        "ranks": wrapper.n_ranks,
        "device": str(wrapper.leaves[0].device),
        "parameters": whole.numel,
        "groups": list(groups) if logs_groups else [],
        "budget": options.budget if options.every is None else None,
        "allowance": options.allowance if options.every is None and options.budget is not None else None,
        "every": options.every,
        "metric": ", ".join(options.metrics),
        "comm_hook": comm_hook_name(wrapper.ddp),
        "units_per_piece": units if is_number(units) else None,
        "units_by_forward": _IN_WORDS[units == FIRST_DIM] if is_of_forward(units) else None,
        "further_units": list(options.units[1:]),
    }


def _with_units_that_show(model: nn.Module, options: NoiseScaleOptions, *, in_pipeline: bool) -> NoiseScaleOptions:
    """The options without rows of forwards, where no forward shows how the model is called, or there are other units.

    Raises:
        ValueError: where a function is to count what is not shown; on all ranks, since options are the same.
    """
    takes_no_hooks = in_pipeline or bool(why_no_hook(model))
    if takes_no_hooks and callable(options.units_per_piece):
        raise ValueError(
            "units_per_piece= is called as the model is, and no pipeline's stage, no model of torch.jit, and no "
            "nn.TransformerEncoderLayer that is the whole model shows how it is called: pass a number, or units= "
            "to piece() or pieces()"
        )
    if options.units_per_piece == FIRST_DIM and (takes_no_hooks or len(options.units) > 1):
        return replace(options, units_per_piece=None)
    return options


def _same_on_ranks(
    options: NoiseScaleOptions, wrapper: Wrapper, whole: ModelParameters, names: Sequence[str]
) -> dict[str, object]:
    """What must be the same on all ranks: it decides how long their vectors are, and what is done with the sums."""
    unit, *further_units = options.units
    return {
        "unit": unit,
        "the list of further units": further_units,
        "metric": options.metrics,
        "staging_mib": options.staging_mib if options.metrics != ("euclidean",) else None,
        **{name: getattr(options, name) for name in ("every", "budget", "allowance", "per_example")},
        "whether units are counted in forwards": is_of_forward(options.units_per_piece),
        "the list of measured parameters": list(zip(whole.names, whole.shapes, strict=True)),
        "the groups of parameters": list(names),
        "the number of ranks that feed the same experts": wrapper.experts.n_ranks if wrapper.experts is not None else 1,
    }


def _compare_over_ranks(wrapper: Wrapper, values: Mapping[str, object] | None) -> None:
    """See that values are the same on all ranks of the model; None where this rank's arguments were refused.

    Raises:
        ValueError: on all ranks, when they are not.
    """
    refused_elsewhere = (
        "another rank refused to attach, and its own error says why: attach with the same arguments, to the same "
        "model, on every rank"
    )
    check_same_on_ranks(wrapper.group, wrapper.leaves[0].device, values, refused_elsewhere)


@contextlib.contextmanager
def raised_on_all_ranks(model: nn.Module, ranks: RanksOfModel, wrapper: Wrapper | None = None) -> Iterator[None]:
    """Let peers raise too where an error is raised in here: their own arguments may be accepted, and they would wait.

    Args:
        model: that is found, or is about to be.
        ranks: as they were given.
        wrapper: of the model, once it is found.
    """
    try:
        yield
    except Exception as error:
        with contextlib.suppress(ValueError):  # of the model: all ranks refuse it
            wrapper = wrapper or find_parameters(model, ranks)[0]
            try:
                _compare_over_ranks(wrapper, None)
            except ValueError:
                error.add_note(NOT_ON_ALL_RANKS)
        raise


def _optimizer_in_words(optimizer: Optimizers, wrapper: Wrapper) -> str:
    """The optimizers whose steps are watched, and what they say of the parameters that are measured; for people."""
    if not (given := given_optimizers(optimizer)):
        return "none given: whichever is seen to step these parameters is watched"
    names = " and ".join(sorted(type(each).__name__ for each in wrapper.optimizers or given))
    if not wrapper.optimizers:
        are = "holds none" if len(given) == 1 else "hold none"
        return f"{names}, which {are} of these parameters: is it another model's?"
    n_left_out = sum(p.requires_grad for p in wrapper.frozen.values())
    if not n_left_out:
        return names
    n, others = len(wrapper.parameters), some_of([name for name, p in wrapper.frozen.items() if p.requires_grad])
    return (
        f"{names}, with {n} of {n + n_left_out} trainable parameters: only these are measured. If another optimizer "
        f"steps the others ({others}), pass it too: optimizer=(first, second)"
    )


def _group_names(groups: Groups, parameters: ModelParameters) -> list[str]:
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


def _choose_metrics(
    options: NoiseScaleOptions, model: nn.Module, wrapper: Wrapper, classes: Sequence[PieceClass], optimizer: Optimizers
) -> Sequence[GradientMetric]:
    """The metrics that were asked for, for this model.

    Raises:
        ValueError: when the model, its optimizer or the bound of memory do not allow a metric, with the way out.
    """
    names, given = options.metrics, given_optimizers(optimizer)
    metrics: list[GradientMetric] = [Euclidean()]
    for name in names:
        if name == "adam" and given:
            metrics.append(_adam(wrapper, classes, given))
        elif name == "sign":
            if reason := _norms_do_not_add_up(wrapper, classes):
                raise ValueError(f"metric='sign' {reason}: use metric='euclidean', or without FSDP2 metric='adam'")
            metrics.append(SignMetric())
        elif name == "spectral":
            metrics.append(_spectral(model, wrapper, classes, given, options.staging_bytes(wrapper.leaves[0].device)))
    return metrics


def _adam(wrapper: Wrapper, classes: Sequence[PieceClass], optimizers: Sequence[Any]) -> AdamMetric:
    parameters = list(wrapper.parameters.values())
    if any(map(is_gathered, parameters, wrapper.leaves)):
        others = "'euclidean'" if _norms_do_not_add_up(wrapper, classes) else "'sign' or 'euclidean'"
        raise ValueError(
            "metric='adam' weighs whole gradients by Adam's second moment, of which FSDP2 leaves each rank a part, got "
            f"{wrapper.name}: use metric={others}"
        )
    # The first that holds a measured parameter; it is refused if it does not hold them all.
    optimizer = next((each for each in optimizers if each in wrapper.optimizers), optimizers[0])
    return AdamMetric(optimizer, parameters)


def _norms_do_not_add_up(wrapper: Wrapper, classes: Sequence[PieceClass]) -> str:
    """Why no rank sees the whole gradient of a piece: norms add up before they are squared. Empty where one does."""
    if classes:
        names = " and ".join(apart.name for apart in classes)
        return f"adds up the norms of all parameters, but {names} have other pieces than the rest, got {wrapper.name}"
    # Ranks that share sequences share each piece too, and the first of them sees the sum of its gradients.
    if wrapper.pp_mesh is not None or (wrapper.data.n_sharing > 1 and wrapper.sequence_group is None):
        return f"needs the whole gradient of each piece on one rank, got a model cut by {wrapper.name}"
    return ""


def _spectral(
    model: nn.Module, wrapper: Wrapper, classes: Sequence[PieceClass], optimizers: Sequence[Any], staging_bytes: int
) -> SpectralMetric:
    if wrapper.mesh is not None or wrapper.sequence_group is not None or classes:
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
