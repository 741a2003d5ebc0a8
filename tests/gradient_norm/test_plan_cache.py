"""A drop-in plans once for the same parameters, and plans anew if anything differs."""

from __future__ import annotations

import gc
import sys
import threading
import weakref

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

import sonde
from sonde.gradient_norm.plan import NormPlan
from tests.gradient_norm.placed_gradients import plain
from tests.ranks import Ranks, mesh_of


@pytest.fixture
def plans(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of parameters of each plan that is made."""
    made: list[int] = []
    real = NormPlan.__init__

    def counted(self: NormPlan, parameters: list[Tensor], *args: object, **options: object) -> None:
        made.append(len(parameters))
        real(self, parameters, *args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(NormPlan, "__init__", counted)
    return made


def parameters(n: int = 3) -> list[nn.Parameter]:
    return [plain(torch.ones(2)) for _ in range(n)]


def test_the_same_parameters_are_planned_for_once(plans: list[int]) -> None:
    ps = parameters()
    for k in range(1, 4):
        for p in ps:
            p.grad = torch.full((2,), float(k))
        assert float(sonde.clip_grad_norm_(iter([*ps, ps[0]]), None)) == pytest.approx(k * 6**0.5)
    assert plans == [4]


def test_a_different_request_is_planned_anew(plans: list[int]) -> None:
    ps = parameters()
    calls = [
        ps,
        ps[::-1],
        ps[:2],
        [("a", ps[0]), ("b", ps[1]), ("c", ps[2])],
        [("a", ps[0]), ("b", ps[1]), ("d", ps[2])],
    ]
    for call in calls:
        sonde.clip_grad_norm_(call, None)
    assert plans == [3, 3, 2, 3, 3]
    ps[0].requires_grad_(False)
    ps[0].grad = None
    sonde.clip_grad_norm_(ps, None)
    assert len(plans) == 6
    for call in calls[1:]:
        sonde.clip_grad_norm_(call, None)
    assert len(plans) == 10  # since one parameter is frozen now
    for call in calls[1:]:
        sonde.clip_grad_norm_(call, None)
    assert len(plans) == 10


def test_the_plan_of_a_call_that_raised_is_not_cached(plans: list[int]) -> None:
    ps = parameters()
    for _ in range(2):
        with pytest.raises(ValueError, match="max_norm"):
            sonde.clip_grad_norm_(ps, -1.0)
    assert float(sonde.clip_grad_norm_(ps, None)) == pytest.approx(6**0.5)
    assert len(plans) == 3


def test_gradients_that_change_after_planning_are_seen() -> None:
    ps = parameters()
    sonde.clip_grad_norm_(ps, None)
    ps[0].grad = None
    assert float(sonde.clip_grad_norm_(ps, None)) == 2.0
    ps[0].data, ps[0].grad = torch.zeros(3, dtype=torch.float64), torch.full((3,), 2.0, dtype=torch.float64)
    norm = sonde.clip_grad_norm_(ps, None)
    assert norm.dtype == torch.float64
    assert float(norm) == 4.0


def reshaped(parameter: nn.Parameter, *shape: int) -> nn.Parameter:
    """The same object with another shape, as a new parameter at an old address would be."""
    parameter.grad = None
    parameter.data = torch.zeros(shape)
    parameter.grad = torch.ones(shape)
    return parameter


@pytest.mark.parametrize("shape", [(), (7,), (3, 5), (256, 300)])
@pytest.mark.parametrize("is_planned", [False, True])
def test_another_shape_at_an_old_address_is_planned_anew(shape: tuple[int, ...], is_planned: bool) -> None:
    p = reshaped(nn.Parameter(torch.zeros(1)), 512, 512)
    plan = sonde.group_parameters_for_norm([p])
    for of_shape in ((512, 512), shape):
        reshaped(p, *of_shape)
        norm = sonde.clip_grad_norm_distributed_(plan, None) if is_planned else sonde.clip_grad_norm_([p], None)
        assert float(norm) == pytest.approx(p.numel() ** 0.5)


@pytest.mark.parametrize(("attribute", "value"), [("ds_id", 3), ("tensor_model_parallel", True)])
def test_an_attribute_that_is_set_after_the_first_clip_is_seen(attribute: str, value: object) -> None:
    ps = parameters()
    sonde.clip_grad_norm_(ps, None)
    setattr(ps[1], attribute, value)
    with pytest.raises(ValueError, match="gradient of parameter 1"):
        sonde.clip_grad_norm_(ps, None)
    delattr(ps[1], attribute)
    assert float(sonde.clip_grad_norm_(ps, None)) == pytest.approx(6**0.5)


def test_no_tensor_is_kept_alive() -> None:
    ps = parameters()
    sonde.clip_grad_norm_([(f"layer.{i}", p) for i, p in enumerate(ps)], 1.0)
    gradient = ps[0].grad
    assert gradient is not None
    gone = [weakref.ref(ps[0]), weakref.ref(gradient)]
    gc.collect()
    gc.disable()  # no reference cycle may keep the tensors alive
    try:
        del ps, gradient
        assert [reference() for reference in gone] == [None, None]
    finally:
        gc.enable()


def test_threads_do_not_share_a_plan() -> None:
    ps = parameters(200)
    norms: list[float] = []

    def measure() -> None:
        norms.extend(float(sonde.clip_grad_norm_(ps, None)) for _ in range(20))

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=measure) for _ in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(before)
    assert norms == [20.0] * 120


def _calls_again() -> list[float]:
    """The same gradients twice, then placed otherwise, then missing."""
    mesh, rank = mesh_of((2,)), dist.get_rank()

    def gradient(local: Tensor, placement: Shard | Partial) -> DTensor:
        return DTensor.from_local(local, mesh, [placement], run_check=False, shape=torch.Size([4]), stride=(1,))

    p = nn.Parameter(distribute_tensor(torch.zeros(4), mesh, [Replicate()]))
    q = nn.Parameter(distribute_tensor(torch.zeros(4), mesh, [Shard(0)]))
    norms = []
    for placement, local in [(Shard(0), torch.ones(2)), (Shard(0), torch.ones(2)), (Partial(), torch.ones(4))] * 2:
        p.grad, q.grad = gradient(local, placement), gradient(torch.ones(2), Shard(0))
        norms.append(float(sonde.clip_grad_norm_([p, q], None, mesh=mesh)))
    if rank == 0:  # this rank alone fills its cache with other plans
        for _ in range(9):
            sonde.clip_grad_norm_(parameters(), None)
    p.grad = None
    norms.append(float(sonde.clip_grad_norm_([p, q], None, mesh=mesh)))
    return norms


def test_ranks_may_have_different_plans_cached(ranks2: Ranks) -> None:
    once = [8**0.5, 8**0.5, 20**0.5]
    assert ranks2(_calls_again) == [pytest.approx([*once, *once, 2.0])] * 2


def _moved_after_a_clip() -> str:
    """torch swaps sharded parameters when a model is moved, and refuses to swap those that have weak references."""
    model = fully_shard(nn.Linear(4, 4), mesh=mesh_of((2,)))
    model(torch.ones(2, 4)).sum().backward()
    sonde.clip_grad_norm_(model.parameters(), 1.0)
    model.zero_grad()
    return str(model.to(torch.bfloat16).weight.dtype)


def test_a_model_can_be_moved_after_a_clip(ranks2: Ranks) -> None:
    assert ranks2(_moved_after_a_clip) == ["torch.bfloat16"] * 2


def _planned_with_a_slice() -> tuple[int, list[float]]:
    """mesh["pp"] is another object at every call."""
    mesh = mesh_of((2, 1), ("pp", "dp"))
    ps, made = parameters(), []
    real = NormPlan.__init__
    NormPlan.__init__ = lambda *args, **options: (made.append(1), real(*args, **options))[1]  # type: ignore[method-assign,assignment,func-returns-value]
    try:
        norms = [float(sonde.clip_grad_norm_(ps, None, mesh=mesh, pp_mesh=mesh["pp"])) for _ in range(3)]
    finally:
        NormPlan.__init__ = real  # type: ignore[method-assign]
    return len(made), norms


def test_slices_of_a_mesh_are_the_same_mesh(ranks2: Ranks) -> None:
    assert ranks2(_planned_with_a_slice) == [(1, [pytest.approx(12**0.5)] * 3)] * 2


def _another_shape_on_one_rank() -> float:
    p = reshaped(nn.Parameter(torch.zeros(1)), 512, 512)
    sonde.clip_grad_norm_([p], None, mesh=mesh_of((2,)))
    p = reshaped(p if dist.get_rank() else nn.Parameter(torch.zeros(1)))
    return float(sonde.clip_grad_norm_([p], None, mesh=mesh_of((2,))))


def test_another_shape_at_an_old_address_leaves_no_rank_waiting(ranks2: Ranks) -> None:
    assert ranks2(_another_shape_on_one_rank) == [1.0, 1.0]
