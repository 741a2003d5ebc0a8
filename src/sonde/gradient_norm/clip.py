"""Clipping by the norm of the whole model's gradient, however the model is cut over ranks: the public calls."""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from sonde.console import stack_level
from sonde.gradient_norm.global_norm import GlobalNorm, compare_plans, global_norm
from sonde.gradient_norm.plan import NormPlan
from sonde.gradient_norm.refused_gradients import HeldError, marks_of
from sonde.gradient_norm.scaling import Nonfinite, check_options, check_order, clip_measured_
from sonde.parallel.placements import spec_of
from sonde.parallel.unwrap import outside_graphs

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

Parameters = Tensor | nn.Module | Iterable[Tensor] | Iterable[tuple[str, Tensor]]
"""What may be clipped. A module, or pairs of a name and a tensor, give messages their names."""

_cached_plans: dict[tuple[object, ...], tuple[NormPlan, list[Any]]] = {}
"""The plans of the last few calls, and the specs of their parameters, whose `id` is in the key. Module-level because a
function has nowhere else to cache. A cached plan behaves exactly like a new one, since everything that a new plan would
look at is in its key: so ranks need not have the same plans cached."""
_PLAIN = frozenset((Tensor, nn.Parameter))
_MAX_CACHED, _MAX_TENSORS = 8, 20_000
"""Plans that are kept in any case; more are, if all together have at most so many tensors, as for clips by layer."""


@outside_graphs
def clip_grad_norm_(
    parameters: Parameters,
    max_norm: float | None,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
    *,
    mesh: DeviceMesh | None = None,
    pp_mesh: DeviceMesh | None = None,
    replicas: Mapping[Any, int] | None = None,
    nonfinite: Nonfinite = "ignore",
    ep_enabled: bool | None = None,
) -> Tensor:
    """Scale gradients in place so that the norm of the whole model's gradient is at most `max_norm`.

    A drop-in for `torch.nn.utils.clip_grad_norm_` that is right however the model is cut over ranks: DDP, FSDP2, HSDP,
    tensor, sequence, context, expert and pipeline parallelism, and mixes of them. Call it on every rank that holds a
    part of the model. The norm is accumulated in fp64 (in fp32 within blocks of a few hundred elements, for large
    gradients on a CPU) and rounded once. All ranks of `mesh` get the same bits. How the model is cut may change the
    last bit: about once in 1e8 times, or more often if a cut runs through a block.

    Args:
        parameters: a tensor, tensors, (name, tensor) pairs such as `model.named_parameters()`, or a module; messages
            use the names of the last two. Parameters without a gradient are skipped. A tensor that comes twice counts
            once.
        max_norm: the largest norm allowed, ≥ 0; 0 zeroes the gradients; None or `math.inf` only measures.
        norm_type: p of the p-norm, from above 0 to 6, or `math.inf` for the largest element.
        error_if_nonfinite: the same as nonfinite="raise".
        foreach: accepted so that calls written for torch run unchanged; it has no effect.
        mesh: all ranks that hold any of the model, pipeline stages included. One collective then does everything, and
            all ranks get the same bits. None takes a mesh of all ranks that some gradients are cut over, if others are
            not; else it sums each gradient over the ranks of its own mesh, by one collective for each such set of
            ranks, and counts plain tensors as whole.
        pp_mesh: the pipeline stages, each with parameters of its own.
        replicas: how many ranks of `mesh` hold the same values, by tensor or name. Declare plain tensors that are not
            the same on all ranks of their stage (experts under expert parallelism), and DTensors that are on a part of
            `mesh` and have other values elsewhere. With `replicas` each call plans anew: use
            `group_parameters_for_norm` instead to plan once.
        nonfinite: what to do when the norm is infinite or NaN, also if it only is after rounding to fp32 on a rank that
            has no fp64 gradients. "ignore" scales all the same, as torch does. "skip" sets
            gradients to 0. "raise" raises on every rank and names the parameters; it waits for the device.
        ep_enabled: accepted so that calls written for torchtitan run unchanged; it has no effect, since the placements
            of gradients show expert parallelism.

    Returns:
        The norm before clipping: 0-dim, fp32, or fp64 if a gradient of this rank is; on the mesh's device, or the
        gradients'.

    Raises:
        ValueError: for `max_norm` < 0 or NaN, another `norm_type`, or a gradient that cannot be counted (complex, with
            an unknown placement, outside `mesh`), naming the gradient and the way out; and when ranks disagree: about
            `max_norm`, `norm_type`, `nonfinite`, `pp_mesh` or their parameters, or when plain gradients or shards that
            should be copies differ. Gradients are unchanged. On the CPU every rank that shares a sum with this rank
            raises: with `mesh`, all ranks. Without it, sums that were under way when this rank failed to read a
            gradient do not carry the error.
        RuntimeError: for a norm that is not finite, with nonfinite="raise"; gradients are unchanged.

    Example:
        >>> weight = torch.nn.Parameter(torch.zeros(2))
        >>> weight.grad = torch.tensor([3.0, 4.0])
        >>> clip_grad_norm_(weight, 1.0), weight.grad
        (tensor(5.), tensor([0.6000, 0.8000]))
    """
    tensors, names, problem = tensors_of(parameters)
    problem = problem or _are_gradients(tensors)
    may_cache = replicas is None and problem is None
    # Plain tensors, asked all at once, have no spec.
    specs = [] if _PLAIN.issuperset(map(type, tensors)) else [spec_of(p) for p in tensors]
    key = _cache_key(tensors, specs, names, mesh, pp_mesh) if may_cache else ()
    # A plan leaves the cache while it is in use: no other thread can take it.
    plan, _ = _cached_plans.pop(key, (None, None))
    if plan is None:
        plan = NormPlan(tensors, names, mesh=mesh, pp_mesh=pp_mesh, replicas=replicas, problem=problem)
        if may_cache and len(_cached_plans) >= _MAX_CACHED and sum(map(len, [*_cached_plans])) > _MAX_TENSORS:
            _cached_plans.pop(next(iter(_cached_plans)), None)
    else:
        plan.rebind(tensors, mesh, pp_mesh)
    nonfinite = "raise" if error_if_nonfinite else nonfinite
    norm = measure_and_clip(plan, max_norm, norm_type, None, nonfinite)[1]
    if may_cache:
        plan.rebind([], mesh, pp_mesh)
        _cached_plans[key] = plan, specs
    return norm


def _cache_key(
    tensors: Sequence[Tensor],
    specs: Sequence[object],
    names: Sequence[str] | None,
    mesh: DeviceMesh | None,
    pp_mesh: DeviceMesh | None,
) -> tuple[object, ...]:
    """What a new plan would look at, but for what a plan compares at each call: how gradients are placed.

    Tensors are known by their addresses, without any reference to them. A strong reference would keep them alive; a
    weak one would break `model.to()`, as torch does not swap sharded tensors that have weak references. Another tensor
    may come to an old address: so what a plan knows of a tensor without a gradient is in the key too. Meshes are
    compared by value, since mesh["pp"] is another object at every call, but specs by `is`: a new process group's may be
    equal.
    """
    bare = [p for p in tensors if p.grad is None]
    return (
        len(tensors),
        *map(id, tensors),
        *map(id, specs),
        tuple([(id(p), p.requires_grad, p.dtype, None if is_lazy(p) else p.shape) for p in bare]) if bare else (),
        tuple([(id(p), marks_of(p)) for p in tensors if vars(p)]) if not specs and any(map(vars, tensors)) else (),
        None if names is None else tuple(names),
        mesh,
        pp_mesh,
    )


@outside_graphs
def group_parameters_for_norm(
    parameters: Parameters,
    *,
    mesh: DeviceMesh | None = None,
    pp_mesh: DeviceMesh | None = None,
    replicas: Mapping[Any, int] | None = None,
) -> NormPlan:
    """Work out once how the gradients of these parameters are spread over ranks, for `clip_grad_norm_distributed_`.

    Call it on every rank, after the model has been cut. It also opens the communicators that the norm will need.

    Args:
        parameters: as for `clip_grad_norm_`. Pass the module, and a parameter that is replaced or added later is
            noticed: the norm is refused as soon as that parameter has a gradient.
        mesh: as for `clip_grad_norm_`. The names and shapes of the parameters on its ranks are compared.
        pp_mesh: as for `clip_grad_norm_`; its communicator is opened too.
        replicas: as for `clip_grad_norm_`.

    Returns:
        A plan, valid as long as the parameters are the same. Each of its `groups` has gradients that are spread alike.

    Raises:
        ValueError: on all ranks, when `mesh` or `replicas` do not fit the parameters; or when ranks of `mesh` have
            different parameters, and neither `pp_mesh` nor `replicas` explains it.
    """
    module = parameters if isinstance(parameters, nn.Module) else None
    tensors, names, problem = tensors_of(parameters)
    plan = NormPlan(tensors, names, mesh=mesh, pp_mesh=pp_mesh, replicas=replicas, module=module, problem=problem)
    compare_plans(plan)
    return plan


@outside_graphs
def clip_grad_norm_distributed_(
    parameter_groups: NormPlan,
    max_norm: float | None,
    norm_type: float = 2.0,
    pp_mesh: DeviceMesh | None = None,
    *,
    nonfinite: Nonfinite = "ignore",
    error_if_nonfinite: bool = False,
) -> Tensor:
    """`clip_grad_norm_` of parameters that were grouped before, for engines that clip at every step.

    Args:
        parameter_groups: the plan that `group_parameters_for_norm` returned.
        max_norm: as for `clip_grad_norm_`, like the other arguments.
        norm_type: as for `clip_grad_norm_`.
        pp_mesh: the pipeline stages, unless the plan knows them.
        nonfinite: what to do when the norm is not finite.
        error_if_nonfinite: the same as nonfinite="raise".

    Returns:
        The norm before clipping, as `clip_grad_norm_`.

    Raises:
        ValueError: as `clip_grad_norm_`.
        RuntimeError: as `clip_grad_norm_`.
    """
    if not isinstance(parameter_groups, NormPlan):
        raise ValueError(
            f"parameter_groups must be the plan that group_parameters_for_norm returned, got {parameter_groups!r:.60}: "
            "pass parameters to clip_grad_norm_ instead"
        )
    nonfinite = "raise" if error_if_nonfinite else nonfinite
    return measure_and_clip(parameter_groups, max_norm, norm_type, pp_mesh, nonfinite)[1]


def measure_and_clip(
    plan: NormPlan,
    max_norm: float | None,
    norm_type: float,
    pp_mesh: DeviceMesh | None,
    nonfinite: Nonfinite,
    problem: HeldError | None = None,
) -> tuple[GlobalNorm, Tensor]:
    """`clip_grad_norm_distributed_`, with all that was measured; `problem` is what is wrong with the call already."""
    # The order decides which collectives follow. So it is read whatever else is wrong; if it is wrong itself, this rank
    # follows its peers.
    problem = problem or HeldError()
    order = problem.attempt(check_order, norm_type, otherwise=math.nan)
    problem.attempt(plan.use_stages, pp_mesh, otherwise=None)
    threshold = problem.attempt(check_options, max_norm, nonfinite, otherwise=None)
    with torch.no_grad():
        measured = global_norm(plan, order, max_norm=threshold, nonfinite=nonfinite, problem=problem)
        norm = clip_measured_(plan, measured, threshold, nonfinite=nonfinite)
    if any(share.mesh is not None for share in plan.shares):
        # torch returns a DTensor for sharded gradients, and loops call this on it. The norm is whole already.
        norm.full_tensor = functools.partial(_itself, norm.detach())  # type: ignore[attr-defined]
    return measured, norm


def _itself(norm: Tensor) -> Tensor:
    return norm


def tensors_of(parameters: Parameters) -> tuple[list[Tensor], list[str] | None, ValueError | None]:
    """The tensors that are meant, their names if they have any, and what is wrong with the first that is none."""
    if isinstance(parameters, nn.Module):
        parameters = parameters.named_parameters()
    if isinstance(parameters, (Mapping, torch.optim.Optimizer)) or not isinstance(parameters, (Tensor, Iterable)):
        return [], None, _no_tensors(parameters)
    listed: list[Any] = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    if not listed and isinstance(parameters, Iterator):
        warnings.warn(
            "parameters is an iterator at its end, so it has no tensors: pass a new iterator or a list",
            stacklevel=stack_level(),
        )
    names = None
    if listed and all(isinstance(item, tuple) and len(item) == 2 for item in listed):
        names, listed = [str(name) for name, _ in listed], [tensor for _, tensor in listed]
    if all(issubclass(kind, Tensor) for kind in set(map(type, listed))):
        return listed, names, None
    wrong = next(item for item in listed if not isinstance(item, Tensor))
    return [item for item in listed if isinstance(item, Tensor)], None, _no_tensors(wrong)


def _are_gradients(tensors: Sequence[Tensor]) -> ValueError | None:
    """The error for tensors that nothing marks as parameters: a clip would look for their gradients and find none."""
    if not tensors or any(t.requires_grad or t.grad is not None or isinstance(t, nn.Parameter) for t in tensors):
        return None
    return ValueError(
        "parameters must be tensors with a gradient, got tensors that require none: pass model.parameters(), not their "
        "gradients; sonde.get_total_norm takes gradients"
    )


def _no_tensors(got: object) -> ValueError:
    """What to say of parameters that are none, or of something among them that is none."""
    if got is None or (isinstance(got, tuple) and len(got) == 2 and got[1] is None):
        return ValueError(
            "gradients or parameters must be tensors, got None among them: leave out gradients that are None, "
            "[p.grad for p in model.parameters() if p.grad is not None]"
        )
    what = (
        f"an object of type {type(got).__name__}"
        if isinstance(got, Mapping | torch.optim.Optimizer)
        else f"{got!r:.60}"
    )
    return ValueError(
        f"parameters must be tensors, or pairs of a name and a tensor, got {what}: pass model.parameters() or "
        "model.named_parameters()"
    )
