"""The metrics that a probe measures in: which of them a model allows, and what each takes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, get_args

from torch import Tensor, nn

from sonde.batch_size.taps.metric import (
    AdamMetric,
    Euclidean,
    GradientMetric,
    MetricName,
    Metrics,
    SignMetric,
    SpectralMetric,
    nuclear_norm_bytes,
)
from sonde.parallel.devices import accumulation_dtype
from sonde.parallel.optimizers import Optimizers, given_optimizers, parameters_of
from sonde.parallel.shares import is_gathered
from sonde.parallel.wrappers import Wrapper


@dataclass(frozen=True)
class ChosenMetrics:
    """The metrics of one probe.

    Attributes:
        names: those that were asked for, the headline first.
        measured: the first is the plain metric, whose squares the checks of every window use.
    """

    names: tuple[MetricName, ...]
    measured: Metrics


def metric_names(metric: object) -> tuple[MetricName, ...]:
    """The metrics that `metric=` names.

    Raises:
        ValueError: for an unknown or repeated name, or none.
    """
    names: Sequence[Any] = (metric,) if isinstance(metric, str) else metric if isinstance(metric, Sequence) else ()
    known = get_args(MetricName)
    if not names or any(name not in known for name in names):
        raise ValueError(
            f"metric must be one or several of {', '.join(map(repr, known))}, got {metric!r}: use 'euclidean'"
        )
    if len(set(names)) < len(names):
        raise ValueError(f"metric names each metric once, got {metric!r}: leave out the second")
    return tuple(names)


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
    metrics: list[GradientMetric] = [Euclidean()]
    for name in names:
        if name == "adam" and given:
            metrics.append(_adam(wrapper, given))
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
    return AdamMetric(optimizer, parameters)


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
