"""A drop-in plans once: and forgets nothing that would make another plan."""

from __future__ import annotations

import gc
import threading
import weakref

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

import sonde
from sonde.measure.norm_plan import NormPlan
from tests.ranks import Ranks, mesh_of


@pytest.fixture
def plans(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many parameters each plan was made for, as they are made."""
    made: list[int] = []
    real = NormPlan.__init__

    def counted(self: NormPlan, parameters: list[Tensor], *args: object, **options: object) -> None:
        made.append(len(parameters))
        real(self, parameters, *args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(NormPlan, "__init__", counted)
    return made


def parameters(n: int = 3) -> list[nn.Parameter]:
    made = [nn.Parameter(torch.zeros(2)) for _ in range(n)]
    for p in made:
        p.grad = torch.ones(2)
    return made


def test_the_same_parameters_are_planned_for_once(plans: list[int]) -> None:
    ps = parameters()
    for k in range(1, 4):
        for p in ps:
            p.grad = torch.full((2,), float(k))
        assert float(sonde.clip_grad_norm_(iter([*ps, ps[0]]), None)) == pytest.approx(k * 6**0.5)
    assert plans == [4]


def test_what_differs_is_planned_for_anew(plans: list[int]) -> None:
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
    sonde.clip_grad_norm_(ps, None)
    assert len(plans) == 6
    for call in calls[1:]:
        sonde.clip_grad_norm_(call, None)
    assert len(plans) == 10  # one of them is frozen now
    for call in calls[1:]:
        sonde.clip_grad_norm_(call, None)
    assert len(plans) == 10


def test_a_call_that_raised_is_not_remembered(plans: list[int]) -> None:
    ps = parameters()
    ps[1].grad = torch.eye(2)[0].to_sparse()
    for _ in range(2):
        with pytest.raises(ValueError, match="sparse"):
            sonde.clip_grad_norm_(ps, 1.0)
    ps[1].grad = torch.ones(2)
    assert float(sonde.clip_grad_norm_(ps, None)) == pytest.approx(6**0.5)
    assert len(plans) == 3


def test_what_changes_after_planning_is_seen() -> None:
    ps = parameters()
    sonde.clip_grad_norm_(ps, None)
    ps[0].grad = None
    assert float(sonde.clip_grad_norm_(ps, None)) == 2.0
    ps[0].data, ps[0].grad = torch.zeros(3, dtype=torch.float64), torch.full((3,), 2.0, dtype=torch.float64)
    norm = sonde.clip_grad_norm_(ps, None)
    assert norm.dtype == torch.float64
    assert float(norm) == 4.0


def test_no_tensor_is_kept_alive() -> None:
    ps = parameters()
    sonde.clip_grad_norm_([(f"layer.{i}", p) for i, p in enumerate(ps)], 1.0)
    gradient = ps[0].grad
    assert gradient is not None
    gone = [weakref.ref(ps[0]), weakref.ref(gradient)]
    gc.collect()
    gc.disable()  # nothing may wait for it
    try:
        del ps, gradient
        assert [is_there() for is_there in gone] == [None, None]
    finally:
        gc.enable()


def test_threads_do_not_share_a_plan() -> None:
    ps = parameters(200)
    found: list[float] = []

    def measure() -> None:
        found.extend(float(sonde.clip_grad_norm_(ps, None)) for _ in range(20))

    threads = [threading.Thread(target=measure) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [20.0] * 80


def _calls_again() -> list[float]:
    """The same gradients on ranks; then placed otherwise, then missing on one rank."""
    mesh, rank = mesh_of((2,)), dist.get_rank()

    def gradient(local: Tensor, placement: Shard | Partial) -> DTensor:
        return DTensor.from_local(local, mesh, [placement], run_check=False, shape=torch.Size([4]), stride=(1,))

    p = nn.Parameter(distribute_tensor(torch.zeros(4), mesh, [Replicate()]))
    q = nn.Parameter(distribute_tensor(torch.zeros(4), mesh, [Shard(0)]))
    norms = []
    for placement, local in [(Shard(0), torch.ones(2)), (Shard(0), torch.ones(2)), (Partial(), torch.ones(4))] * 2:
        p.grad, q.grad = gradient(local, placement), gradient(torch.ones(2), Shard(0))
        norms.append(float(sonde.clip_grad_norm_([p, q], None, mesh=mesh)))
    p.grad = gradient(torch.ones(4), Partial()) if rank else None  # seen partial before: the other adds zeros
    norms.append(float(sonde.clip_grad_norm_([p, q], None, mesh=mesh)))
    return norms


def test_ranks_remember_alike(ranks2: Ranks) -> None:
    once = [8**0.5, 8**0.5, 20**0.5]
    assert ranks2(_calls_again) == [pytest.approx([*once, *once, 8**0.5])] * 2
