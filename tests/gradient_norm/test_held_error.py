"""An error on one rank: the other ranks raise too, no rank waits for ever, and gradients stay unchanged."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

import sonde
from tests.gradient_norm.placed_gradients import placed
from tests.ranks import Ranks, mesh_of
from tests.sharded import fsdp


def _bad(mistake: str) -> tuple[str, list[float], list[float]]:
    """One thing is wrong, on rank 1 or on both ranks. Returns the message, and a gradient before and after."""
    cut, rank = fsdp(), dist.get_rank()
    parameters: dict[str, Any] = dict(cut.parameters)
    options: dict[str, Any] = {"mesh": cut.mesh, "max_norm": 1.0}
    if mistake == "sparse" and rank == 1:
        parameters["stray"] = nn.Parameter(torch.zeros(3))
        parameters["stray"].grad = torch.zeros(3).to_sparse()
    elif mistake in ("plain on meta", "fp8") and rank == 1:
        like = {"device": "meta"} if mistake == "plain on meta" else {"dtype": torch.float8_e4m3fn}
        parameters["stray"] = nn.Parameter(torch.zeros(3, **like))  # type: ignore[arg-type]
        parameters["stray"].grad = torch.zeros(3, **like)  # type: ignore[arg-type]
    elif mistake == "options" and rank == 1:
        options["max_norm"] = math.nan
    elif mistake == "replicas" and rank == 1:
        options["replicas"] = {"typo": 1}
    elif mistake == "many replicas" and rank == 1:
        options["replicas"] = {"back.up.weight": 2}
    elif mistake == "placement" and rank == 1:
        parameters["stray"] = placed(torch.ones(2), cut.mesh, [Partial("max")], (2,), [Replicate()])
    elif mistake == "mesh":
        alone = (
            DeviceMesh("cpu", [0], _init_backend=False) if rank == 0 else DeviceMesh("cpu", [1], _init_backend=False)
        )
        options["mesh"] = alone
    elif mistake == "device" and rank == 1:
        local = DTensor.from_local(torch.ones(3, device="meta"), cut.mesh, [Replicate()], run_check=False)
        parameters["stray"] = nn.Parameter(local.detach())
        parameters["stray"].grad = local
    before = parameters["back.up.weight"].grad.to_local().flatten()[:3].tolist()
    max_norm = options.pop("max_norm")
    try:
        sonde.clip_grad_norm_(parameters.items(), max_norm, **options)
        message = "no error"
    except ValueError as error:
        message = str(error)
    return message, before, parameters["back.up.weight"].grad.to_local().flatten()[:3].tolist()


@pytest.mark.parametrize(
    ("mistake", "match"),
    [
        ("sparse", "gradient of stray: it is sparse"),
        ("placement", "gradient of stray: placement Partial(max) on mesh axis 0 is not supported"),
        ("device", "gradient of stray: it is on meta and its mesh on cpu"),
        ("plain on meta", "gradient of stray: it is on meta and its mesh on cpu"),
        ("fp8", "gradient of stray: its dtype is torch.float8_e4m3fn, and only fp16, bf16, fp32 and fp64"),
        ("options", "max_norm must be ≥ 0, got nan"),
        ("replicas", "replicas= has 'typo', which is not among the parameters"),
        ("many replicas", "gradient of back.up.weight: it is cut into 2 shards over 2 of 2 ranks"),
    ],
)
def test_what_is_wrong_on_one_rank_is_raised_on_all(ranks2: Ranks, mistake: str, match: str) -> None:
    (first, *first_gradients), (second, *second_gradients) = ranks2(_bad, mistake)
    if mistake in ("options", "replicas"):
        assert "another rank was called with something that cannot be used, and its message says what" in first
    else:
        assert "another rank found a gradient that cannot be counted" in first
    assert match in second
    for before, after in (first_gradients, second_gradients):
        assert before == after


def test_a_mesh_that_does_not_contain_the_gradients_is_refused(ranks2: Ranks) -> None:
    for message, before, after in ranks2(_bad, "mesh"):
        assert "it is on ranks 0, 1, which mesh= (" in message
        assert "pass the mesh of all ranks that hold the model" in message
        assert before == after


def _bad_among_partial() -> str:
    mesh, rank = mesh_of((2,)), dist.get_rank()
    p = placed(torch.ones(3), mesh, [Partial()], (3,), [Replicate()])
    q = placed(torch.ones(5, device="meta" if rank else "cpu"), mesh, [Partial()], (5,), [Replicate()])
    try:
        return str(float(sonde.clip_grad_norm_([("p", p), ("q", q)], 1.0, mesh=mesh)))
    except ValueError as error:
        return str(error)


def test_a_bad_partial_gradient_leaves_no_rank_waiting(ranks2: Ranks) -> None:
    first, second = ranks2(_bad_among_partial)
    assert "another rank found a gradient that cannot be counted" in first
    assert "gradient of q: it is on meta" in second


def _wrong_calls_of_one_rank() -> list[str]:
    """On rank 1: a parameter that is no tensor; a pp_mesh that is no mesh; no parameters at all."""
    mesh, rank = mesh_of((2,)), dist.get_rank()
    p = nn.Parameter(torch.zeros(3))
    p.grad = torch.ones(3)
    messages = []
    calls: list[Any] = [
        lambda: sonde.clip_grad_norm_([p, 1.0] if rank else [p], 1.0, mesh=mesh),
        lambda: sonde.clip_grad_norm_([p], 1.0, mesh=mesh, pp_mesh="stages" if rank else None),  # type: ignore[arg-type]
        lambda: sonde.group_parameters_for_norm([] if rank else [p], mesh=mesh),
    ]
    for call in calls:
        try:
            call()
            messages.append("")
        except ValueError as error:
            messages.append(str(error))
    return [*messages, str(p.grad.tolist())]


def test_a_wrong_call_of_one_rank_is_raised_on_the_others(ranks2: Ranks) -> None:
    first, second = ranks2(_wrong_calls_of_one_rank)
    assert ["another rank" in message for message in first[:3]] == [True, True, False]
    assert "parameters must be tensors" in second[0]
    assert "pp_mesh must be a DeviceMesh" in second[1]
    assert "ranks of mesh= have different parameters (1 on this rank)" in first[2]
    assert "ranks of mesh= have different parameters (0 on this rank)" in second[2]
    assert first[3] == second[3] == "[1.0, 1.0, 1.0]"


def _elsewhere() -> list[str]:
    """A parameter on ranks 0 and 1 only, and meshes of those ranks given on all four."""
    few, everyone = DeviceMesh("cpu", [0, 1]), mesh_of((4,))
    p = nn.Parameter(distribute_tensor(torch.ones(4), few, [Shard(0)]))
    p.grad = distribute_tensor(torch.ones(4), few, [Shard(0)])
    plan = sonde.group_parameters_for_norm([("p", p)], mesh=everyone, replicas={"p": 1})
    assert float(sonde.clip_grad_norm_distributed_(plan, None)) == 2.0
    messages = []
    wrong: list[dict[str, Any]] = [{"mesh": everyone}, {"mesh": everyone, "replicas": {"p": 1}}]
    if dist.get_rank() > 1:
        wrong.append({"mesh": few})
    for options in wrong:
        try:
            messages.append(str(float(sonde.clip_grad_norm_([("p", p)], None, **options))))
        except ValueError as error:
            messages.append(str(error))
    return messages


def test_a_parameter_on_other_ranks_has_to_be_declared(ranks4: Ranks) -> None:
    results = ranks4(_elsewhere)
    # Some of them have made more process groups than others. The next group of all four would wait for ever.
    ranks4.stop(kill=True)
    for messages in results[:2]:
        assert "another rank found" in messages[0]
    for messages in results[2:]:
        assert "it is on ranks 0, 1, and this rank, which is not among them" in messages[0]
        assert "mesh has ranks 0, 1, and this rank is not among them" in messages[2]
    assert [messages[1] for messages in results] == ["2.0"] * 4


def _first_fsdp() -> str:
    model = FullyShardedDataParallel(nn.Linear(4, 4), device_id=torch.device("cpu"), use_orig_params=True)
    model(torch.ones(2, 4)).sum().backward()
    try:
        return str(float(sonde.clip_grad_norm_(model.named_parameters(), 1.0)))
    except ValueError as error:
        return str(error)


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
def test_fsdps_first_version_is_refused(ranks2: Ranks) -> None:
    for message in ranks2(_first_fsdp):
        assert "FSDP's first version does not tell how it cuts parameters" in message


@pytest.mark.parametrize(
    ("attribute", "value", "match"),
    [
        ("ds_id", 0, "gradient of w: DeepSpeed's ZeRO-3 holds it in parts.*read engine.get_global_grad_norm"),
        ("tensor_model_parallel", True, "gradient of w: its attribute tensor_model_parallel says that it is a shard"),
        ("tensor_model_parallel", False, None),
    ],
)
def test_what_the_attributes_of_other_frameworks_tell_is_refused(
    attribute: str, value: object, match: str | None
) -> None:
    p = nn.Parameter(torch.zeros(3))
    p.grad = torch.ones(3)
    setattr(p, attribute, value)
    if match is None:
        assert float(sonde.clip_grad_norm_([("w", p)], 1.0)) == pytest.approx(math.sqrt(3))
        return
    with pytest.raises(ValueError, match=match):
        sonde.clip_grad_norm_([("w", p)], 1.0)
    assert p.grad.tolist() == [1.0, 1.0, 1.0]


def _unmaterialised_stage() -> str:
    """Plain parameters; those of one stage were never materialised."""
    mesh, device = mesh_of((2,), ("pp",)), "meta" if dist.get_rank() else "cpu"
    p = nn.Parameter(torch.zeros(3, device=device))
    p.grad = torch.ones(3, device=device)
    try:
        return str(float(sonde.clip_grad_norm_([p], 1.0, pp_mesh=mesh)))
    except ValueError as error:
        return str(error)


def test_a_stage_on_the_meta_device_leaves_no_rank_waiting(ranks2: Ranks) -> None:
    first, second = ranks2(_unmaterialised_stage)
    assert "another rank found" in first
    assert "it is on the meta device" in second


class _Unreadable(torch.Tensor):
    """A gradient whose elements cannot be read: any kernel raises an error that is no RuntimeError."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") in ("reshape", "copy_", "to", "view", "aminmax", "abs"):
            raise LookupError("these elements are elsewhere")
        return super().__torch_function__(func, types, args, kwargs or {})


def _unreadable_on_one_rank(order: float) -> str:
    p = nn.Parameter(torch.zeros(3))
    p.grad = torch.ones(3).as_subclass(_Unreadable) if dist.get_rank() else torch.ones(3)
    try:
        return str(float(sonde.clip_grad_norm_([p], None, order, mesh=mesh_of((2,)))))
    except ValueError as error:
        return str(error)


@pytest.mark.parametrize("order", [2.0, math.inf])
def test_an_unexpected_error_on_one_rank_leaves_no_rank_waiting(ranks2: Ranks, order: float) -> None:
    first, second = ranks2(_unreadable_on_one_rank, order)
    assert "another rank found a gradient that cannot be counted" in first
    assert "gradients cannot be summed on cpu: LookupError: these elements are elsewhere" in second


class _Nowhere(torch.Tensor):
    """A gradient of a kind that nobody knows: it does not say on which device it is."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func == torch.Tensor.device.__get__:  # type: ignore[attr-defined]
            raise LookupError("it is nowhere")
        return super().__torch_function__(func, types, args, kwargs or {})


def _nowhere_on_one_rank(is_planned: bool) -> list[str]:
    """Beside a partial gradient, whose sum comes before the gradients are read."""
    mesh = mesh_of((2,))
    p, partial = nn.Parameter(torch.zeros(3)), placed(torch.ones(3), mesh, [Partial()], (3,), [Replicate()])
    p.grad = torch.ones(3)
    plan = sonde.group_parameters_for_norm([p, partial], mesh=mesh) if is_planned else None
    messages = []
    for gradient in (torch.ones(3).as_subclass(_Nowhere) if dist.get_rank() else torch.ones(3), torch.ones(3)):
        p.grad = gradient
        try:
            if plan is not None:
                messages.append(f"{float(sonde.clip_grad_norm_distributed_(plan, None)):.4f}")
            else:
                messages.append(f"{float(sonde.clip_grad_norm_([p], None, mesh=mesh)):.4f}")
        except ValueError as error:
            messages.append(str(error))
    return messages


@pytest.mark.parametrize("is_planned", [True, False])
def test_a_gradient_of_an_unknown_kind_leaves_no_rank_waiting(ranks2: Ranks, is_planned: bool) -> None:
    (first, first_after), (second, second_after) = ranks2(_nowhere_on_one_rank, is_planned)
    assert "another rank found a gradient that cannot be counted" in first
    assert f"gradients cannot be {'collected' if is_planned else 'grouped'}: LookupError: it is nowhere" in second
    assert first_after == second_after == (f"{15**0.5:.4f}" if is_planned else f"{3**0.5:.4f}")
