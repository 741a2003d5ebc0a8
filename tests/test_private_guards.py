"""Guards: each shows that a private part of PyTorch still does what sonde needs. tests/private_names.md lists them.

A guard that fails on a new torch names the file of sonde that has to change. Guards of what hooks see in a backward are
in tests/batch_size/taps/test_leaf_hooks.py, those of TRL in tests/integrations/test_trl.py.
"""

from __future__ import annotations

import sys
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Partial, Shard, distribute_tensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import _StridedShard
from torch.nn.parallel import DistributedDataParallel

from tests.ranks import Ranks, mesh_of

# Autograd.


def n_engine_calls() -> int:
    """How many calls of autograd's engine are on this thread's stack."""
    names, frame = [], sys._getframe()
    while frame is not None:
        names.append(frame.f_code.co_name)
        frame = frame.f_back  # type: ignore[assignment]
    return names.count("_engine_run_backward")


def test_guard_each_backward_adds_one_call_of_the_engine_to_the_stack() -> None:
    """inside_another_backward counts these calls to recognise a backward that another backward has started."""
    inner, outer = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    depths: dict[str, int] = {}

    def start_another(_: Tensor) -> None:
        depths["outer"] = n_engine_calls()
        with torch.enable_grad():
            (inner * 2).sum().backward()

    inner.register_hook(lambda _: depths.update(inner=n_engine_calls()))
    outer.register_hook(start_another)
    (outer * 2).sum().backward()
    assert depths == {"outer": 1, "inner": 2}
    assert n_engine_calls() == 0


def test_guard_hooks_after_accumulation_can_be_seen() -> None:
    """summed_gradient refuses parameters with such hooks: they would see its gradients as training's."""
    parameter = nn.Parameter(torch.ones(2))
    assert not parameter._post_accumulate_grad_hooks
    handle = parameter.register_post_accumulate_grad_hook(lambda _: None)
    assert parameter._post_accumulate_grad_hooks
    handle.remove()
    assert not parameter._post_accumulate_grad_hooks


def test_guard_hooks_of_a_tensor_are_taken_off_with_their_dictionary() -> None:
    parameter, calls = torch.nn.Parameter(torch.ones(2)), []
    assert parameter._backward_hooks is None
    handle = parameter.register_hook(calls.append)
    hooks = parameter._backward_hooks
    assert hooks == {handle.id: calls.append}
    parameter._backward_hooks = None
    parameter.sum().backward()
    assert not calls
    parameter._backward_hooks = hooks
    parameter.sum().backward()
    assert len(calls) == 1
    handle.remove()
    assert not parameter._backward_hooks


def test_guard_a_tensor_counts_writes_in_place() -> None:
    """A measurement at fixed weights refuses weights that were written to."""
    gradient = torch.ones(3)
    before = gradient._version
    gradient.mul(2.0)
    assert gradient._version == before
    gradient.mul_(2.0)
    gradient.zero_()
    assert gradient._version == before + 2


# Kernels.


def test_guard_foreach_norm_computes_in_the_dtype_it_is_asked_for() -> None:
    """metric.py and, on GPUs, power_sums measure 16-bit gradients without a converted copy."""
    tensors = [torch.full((300,), 1.0078125, dtype=torch.bfloat16), torch.full((5, 5), -3.0, dtype=torch.bfloat16)]
    norms = torch._foreach_norm(tensors, 2, dtype=torch.float64)
    assert [n.dtype for n in norms] == [torch.float64] * 2
    exact = [float(t.double().square().sum().sqrt()) for t in tensors]
    assert [float(n) for n in norms] == pytest.approx(exact, rel=1e-12)  # a bf16 norm would be off by 1e-3


def test_guard_foreach_mul_scales_in_place_by_a_tensor() -> None:
    """A clip multiplies all gradients by a coefficient that stays on the device."""
    tensors = [torch.ones(3), torch.full((2, 2), 4.0)]
    addresses = [t.data_ptr() for t in tensors]
    torch._foreach_mul_(tensors, torch.tensor(0.5))
    assert [t.data_ptr() for t in tensors] == addresses
    assert [float(t.flatten()[0]) for t in tensors] == [0.5, 2.0]


def test_guard_flatten_dense_tensors_joins_in_order() -> None:
    """power_sums joins small gradients by it."""
    matrix = torch.arange(6.0).reshape(2, 3)
    joined = torch._utils._flatten_dense_tensors([torch.tensor([9.0]), matrix.t(), torch.empty(0)])
    assert joined.tolist() == [9.0, *matrix.t().reshape(-1).tolist()]


def test_guard_values_of_a_sparse_gradient_are_its_own() -> None:
    """A clip of sparse gradients changes these values in place."""
    with torch.sparse.check_sparse_tensor_invariants():  # torch 2.11 warns of tensors made without a choice
        sparse = torch.sparse_coo_tensor([[0, 0, 2]], [[1.0, 1.0], [2.0, 2.0], [3.0, 3.0]], (4, 2))
    assert not sparse.is_coalesced()
    sparse._values().mul_(2.0)
    assert sparse.to_dense().tolist() == [[6.0, 6.0], [0.0, 0.0], [6.0, 6.0], [0.0, 0.0]]


# Modules and optimizers.


def test_guard_a_module_finds_its_parameters_and_children_in_dictionaries() -> None:
    """precision puts wider tensors into the first; Inventory compares both with what it saw before."""
    model = nn.Sequential(nn.Linear(2, 1, bias=False))
    layer = model[0]
    assert model._modules == {"0": layer}
    weight = layer._parameters["weight"]
    layer._parameters["weight"] = torch.full((1, 2), 5.0)  # type: ignore[assignment]
    assert float(model(torch.ones(1, 2))) == 10.0
    layer._parameters["weight"] = weight
    assert layer.weight is weight


def test_guard_a_compiled_module_holds_the_original() -> None:
    """unwrap_model looks inside torch.compile by this name."""
    model = nn.Linear(2, 1)
    assert torch.compile(model, backend="eager")._orig_mod is model


# Ranks.


def _registered_hooks() -> tuple[int, bool]:
    ddp = DistributedDataParallel(nn.Linear(2, 1))
    n_before = len(ddp._comm_hooks)
    state = object()

    def hook(_: object, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        return dist.all_reduce(bucket.buffer(), async_op=True).get_future().then(lambda f: f.value()[0])

    # Type annotations are strings in this file, and DDP compares them with the types themselves.
    hook.__annotations__.clear()
    ddp.register_comm_hook(state, hook)
    return n_before, ddp._comm_hooks == [(hook, state)]


def test_guard_ddp_lists_its_communication_hooks(ranks2: Ranks) -> None:
    """The user's hook is found there: it may round."""
    assert ranks2(_registered_hooks) == [(0, True)] * 2


def _static_graph_is_learnt() -> list[bool]:
    ddp = DistributedDataParallel(nn.Linear(2, 1), static_graph=True)
    before = ddp._static_graph_delay_allreduce_enqueued
    ddp(torch.ones(1, 2)).sum().backward()
    return [before, ddp._static_graph_delay_allreduce_enqueued]


def test_guard_ddp_tells_whether_it_has_learnt_its_static_graph(ranks2: Ranks) -> None:
    """A measurement before DDP's first backward would break training, and is refused by this attribute."""
    assert ranks2(_static_graph_is_learnt) == [[False, True]] * 2


def _dtensor_parts() -> list[bool]:
    mesh = mesh_of((2,))
    rank = mesh.get_local_rank()
    parameter: Any = nn.Parameter(distribute_tensor(torch.arange(15.0).reshape(5, 3), mesh, [Shard(0)]))
    parameter.square().sum().backward()
    spec, gradient = parameter.grad._spec, parameter.grad._local_tensor
    shape, offset = compute_local_shape_and_global_offset(spec.shape, spec.mesh, spec.placements)
    total: Any = DTensor.from_local(torch.ones(2), mesh, [Partial()])
    return [
        spec.mesh == mesh and tuple(spec.placements) == (Shard(0),),
        tuple(spec.shape) == (5, 3) and tuple(spec.stride) == (3, 1),
        spec.tensor_meta.dtype == torch.float32,
        parameter.grad._spec is spec,  # plans compare specs by identity first
        tuple(shape) == ((3, 3) if rank == 0 else (2, 3)) and offset[0] == (0 if rank == 0 else 3),
        type(gradient) is Tensor and gradient.data_ptr() == parameter.grad.to_local().data_ptr(),
        total._spec.placements[0].reduce_op == "sum",
    ]


def test_guard_a_dtensor_tells_its_mesh_placements_and_local_part(ranks2: Ranks) -> None:
    """Plans of the norm read `_spec` and `_local_tensor` at every step: the public ways make new objects."""
    assert ranks2(_dtensor_parts) == [[True] * 7] * 2


def _reduction_dtype() -> list[torch.dtype | None]:
    policies = [MixedPrecisionPolicy(), MixedPrecisionPolicy(torch.bfloat16, torch.float32)]
    models: list[Any] = [fully_shard(nn.Linear(4, 8), mesh=mesh_of((2,)), mp_policy=policy) for policy in policies]
    return [model._get_fsdp_state()._mp_policy.reduce_dtype for model in models]


def test_guard_fsdp2_tells_the_dtype_in_which_it_reduces(ranks2: Ranks) -> None:
    """Attach asks for it, since gradients that are reduced in 16 bits are rounded to 16 bits."""
    assert ranks2(_reduction_dtype) == [[None, torch.float32]] * 2


def _gathered() -> list[bool]:
    model: Any = fully_shard(nn.Linear(4, 8), mesh=mesh_of((2,)))
    shown = []
    for _ in range(2):
        model.unshard()
        shown.append(model.weight)
        model.reshard()
    seen: list[tuple[int, ...]] = []
    shown[0].register_hook(lambda gradient: seen.append(tuple(gradient.shape)))
    model(torch.ones(2, 4)).sum().backward()
    return [shown[0] is shown[1], isinstance(model.weight, DTensor), seen == [(8, 4)]]


def test_guard_fsdp2_keeps_the_parameters_that_it_gathers(ranks2: Ranks) -> None:
    """Taps hook these once, at attach."""
    assert ranks2(_gathered) == [[True] * 3] * 2


def _strided() -> list[type]:
    mesh = mesh_of((2, 2), ("dp", "tp"))
    model: Any = nn.Linear(4, 8, bias=False)
    model.weight = nn.Parameter(distribute_tensor(model.weight.detach(), mesh["tp"], [Shard(0)]))
    fully_shard(model, mesh=mesh["dp"])
    return [type(placement) for placement in model.weight.placements]


def test_guard_fsdp_over_tensor_parallelism_places_by_strided_shard(ranks4: Ranks) -> None:
    """share_of knows this placement by its type."""
    assert ranks4(_strided) == [[_StridedShard, Shard]] * 4


def _divisors() -> list[Any]:
    model: Any = nn.Sequential(nn.Linear(3, 4, bias=False), nn.Linear(4, 2, bias=False))
    fully_shard(model[0], mesh=mesh_of((2,)))
    fully_shard(model, mesh=mesh_of((2,)))
    model[0].set_gradient_divide_factor(3.0)
    seen = []
    for module, parameter in ((model[0], model[0].weight), (model, model[1].weight)):
        state = module._get_fsdp_state()
        groups = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]
        held = [p.sharded_param is parameter for group in groups for p in group.fsdp_params]
        seen.append((held, [group.gradient_divide_factor for group in groups]))
    return seen


def test_guard_fsdp_tells_its_divisors(ranks2: Ranks) -> None:
    """A sum of gradients is multiplied by what FSDP2 divides sums by; None means the number of ranks."""
    assert ranks2(_divisors) == [[([True], [3.0]), ([True], [None])]] * 2


def _shown_after_forward() -> list[bool]:
    model: Any = fully_shard(nn.Linear(4, 8), mesh=mesh_of((4,)), reshard_after_forward=2)
    own, parameter = model.weight, model._get_fsdp_state()._fsdp_param_group.fsdp_params[0]
    with torch.no_grad():
        model(torch.ones(1, 4))
    shown = model.weight is not own and model.weight is parameter._sharded_post_forward_param
    model.unshard()
    return [shown, parameter.sharded_param is own, parameter._sharded_post_forward_param is None]


def test_guard_fsdp_tells_what_it_shows_after_a_forward(ranks4: Ranks) -> None:
    """Otherwise a window after whose last backward a forward comes is taken for that of another model."""
    assert ranks4(_shown_after_forward) == [[True] * 3] * 4


def _waiting_in_fsdp(mixed: bool) -> list[list[bool]]:
    """What waits after a backward that was not reduced and one that was; under HSDP, over some ranks and over all."""
    from torch.distributed.fsdp import MixedPrecisionPolicy

    reduces_in = MixedPrecisionPolicy(reduce_dtype=torch.float64) if mixed else MixedPrecisionPolicy()
    found = []
    for mesh, names in ((mesh_of((2,)), ()), (mesh_of((2, 1), ("replicate", "shard")), ("all",))):
        module: Any = fully_shard(nn.Linear(4, 4), mesh=mesh, mp_policy=reduces_in)
        group = module._get_fsdp_state()._fsdp_param_group
        for reduces in (False, True):
            (module.set_requires_all_reduce if names else module.set_requires_gradient_sync)(reduces)
            module(torch.ones(1, 4)).sum().backward()
            waits = [p.unsharded_accumulated_grad is not None for p in group.fsdp_params]
            waits += [p._unsharded_param.grad is not None for p in group.fsdp_params]
            found.append([any(waits), group._partial_reduce_output is not None])
    return found


def test_guard_fsdp_shows_gradients_that_wait(ranks2: Ranks) -> None:
    """A measurement of a policy would reduce them; fsdp_reduction refuses it while they wait."""
    for mixed in (False, True):
        expected = [[True, False], [False, False], [False, True], [False, False]]
        assert ranks2(_waiting_in_fsdp, mixed) == [expected] * 2


def _first_fsdp() -> list[bool]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says that this version is on its way out
        model = FullyShardedDataParallel(nn.Linear(4, 4), device_id=torch.device("cpu"), use_orig_params=True)
    return [bool(getattr(parameter, "_fsdp_flattened", False)) for parameter in model.parameters()]


def test_guard_fsdps_first_version_marks_its_parameters(ranks2: Ranks) -> None:
    """Only by this mark can a clip refuse them; without it, the norm would count one rank's part for all."""
    assert ranks2(_first_fsdp) == [[True, True]] * 2
