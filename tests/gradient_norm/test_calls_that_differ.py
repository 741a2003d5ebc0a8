"""Ranks that make different calls: each rank takes the collectives of its peers and raises, and none waits for ever."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import Partial, Replicate, Shard

import sonde
from tests.gradient_norm.placed_gradients import placed
from tests.ranks import Ranks, mesh_of

OTHER_CALL = "another rank was called with something that cannot be used, and its message says what"


def plain(grad: Tensor) -> nn.Parameter:
    parameter = nn.Parameter(torch.zeros_like(grad))
    parameter.grad = grad.clone()
    return parameter


def _called(function: Any, *args: Any, **options: Any) -> str:
    try:
        result = function(*args, **options)
    except ValueError as error:
        return str(error)
    return f"no error: {float(result[0] if isinstance(result, tuple) else result)}"


def _one_bad_option(name: str, bad: Any, norm_type: Any, *, with_mesh: bool) -> list[str]:
    """Gradients over rows and over columns of a 2 × 2 mesh. The call of rank 0 is bad; rank 3 shares no sum with it."""
    mesh = mesh_of((2, 2), ("dp", "tp"))
    parameters = [placed(torch.ones(2), mesh[axis], [Shard(0)], (4,)) for axis in ("dp", "tp")]
    options: dict[str, Any] = {"max_norm": 1.0, "norm_type": norm_type, "mesh": mesh if with_mesh else None}
    if with_mesh:
        parameters = [plain(torch.ones(3))]
    good, is_bad = dict(options), dist.get_rank() == 0
    if is_bad:
        options[name] = bad
    messages = [_called(sonde.clip_grad_norm_, parameters, **options)]
    options.pop("max_norm")
    options.pop("nonfinite", None)
    if name == "norm_type":
        messages.append(_called(sonde.get_total_norm, [p.grad for p in parameters], **options))
    return [*messages, _called(sonde.clip_grad_norm_, parameters, **good)]  # and the ranks are still in step


@pytest.mark.parametrize("norm_type", [2.0, math.inf])
@pytest.mark.parametrize("with_mesh", [True, False])
@pytest.mark.parametrize(
    ("name", "bad", "match"),
    [
        ("max_norm", -1.0, "max_norm must be ≥ 0, got -1.0"),
        ("nonfinite", "drop", "nonfinite must be one of"),
        ("norm_type", -1.0, "norm_type must be > 0, got -1.0"),
        ("norm_type", "two", "norm_type must be > 0, got 'two'"),
        ("norm_type", 7.0, "norm_type must be at most 6, or math.inf, got 7.0"),
    ],
)
def test_a_bad_option_on_one_rank_leaves_no_rank_waiting(
    ranks4: Ranks, name: str, bad: Any, match: str, norm_type: float, with_mesh: bool
) -> None:
    call = ranks4(_one_bad_option_with_mesh if with_mesh else _one_bad_option_without, name, bad, norm_type)
    for rank, (*messages, after) in enumerate(call):
        assert "no error" in after
        for message in messages:
            if rank == 3 and not with_mesh:
                assert "no error" in message
            else:
                assert re.search(match if rank == 0 else OTHER_CALL, message) or "another rank" in message


def _one_bad_option_with_mesh(*args: Any) -> list[str]:
    return _one_bad_option(*args, with_mesh=True)


def _one_bad_option_without(*args: Any) -> list[str]:
    return _one_bad_option(*args, with_mesh=False)


def _partial_of_two_dtypes_in_another_order() -> str:
    mesh = mesh_of((2,))
    made = [
        (name, placed(torch.ones(n, dtype=dtype), mesh, [Partial()], (n,), [Replicate()]))
        for name, n, dtype in (("a", 3, torch.float32), ("b", 500, torch.float64))
    ]
    return _called(sonde.clip_grad_norm_, made[:: -1 if dist.get_rank() else 1], 1.0, mesh=mesh)


def test_partial_gradients_of_two_dtypes_in_another_order_are_refused(ranks2: Ranks) -> None:
    for message in ranks2(_partial_of_two_dtypes_in_another_order):
        assert "list the parameters in the same order on every rank" in message


def _same_threshold(first: Any, second: Any) -> str:
    max_norm = second if dist.get_rank() else first
    return _called(sonde.clip_grad_norm_, [plain(torch.ones(4))], max_norm, mesh=mesh_of((2,)))


@pytest.mark.parametrize(
    ("first", "second"), [(None, math.inf), (0.1, torch.tensor(0.1)), (1e300, None)], ids=["None", "fp32", "huge"]
)
def test_one_threshold_written_in_two_ways_is_the_same(ranks2: Ranks, first: Any, second: Any) -> None:
    assert ranks2(_same_threshold, first, second) == ["no error: 2.0"] * 2


def _copies_up_to_rounding(dtype: torch.dtype, n: int, n_ulps: float) -> list[str]:
    """Independent differences of up to so many units in the last place, over gradients of a heavy tail."""
    generator = torch.Generator().manual_seed(7)
    messages = []
    for trial in range(10):
        whole = torch.randn(n, generator=generator, dtype=torch.float64).pow(3)
        own = torch.Generator().manual_seed(100 * trial + dist.get_rank())
        noise = 2 * torch.rand(n, generator=own, dtype=torch.float64) - 1
        gradient = (whole * (1 + n_ulps * torch.finfo(dtype).eps * noise)).to(dtype)
        orders = (1.0, 2.0, 3.0, math.inf)
        messages += [_called(sonde.clip_grad_norm_, [plain(gradient)], 1.0, p, mesh=mesh_of((2,))) for p in orders]
    return messages


@pytest.mark.parametrize("n", [1, 30, 10_000])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64], ids=str)
def test_copies_that_differ_by_rounding_are_copies(ranks2: Ranks, dtype: torch.dtype, n: int) -> None:
    for messages in ranks2(_copies_up_to_rounding, dtype, n, 1.5):
        assert all("no error" in message for message in messages), messages


def _nearly_equal_scalars() -> str:
    return _called(
        sonde.clip_grad_norm_, [plain(torch.tensor([1 + 1.2e-4 * dist.get_rank()]))], 1.0, mesh=mesh_of((2,))
    )


def test_a_scalar_that_lost_digits_is_a_copy(ranks2: Ranks) -> None:
    assert all("no error" in message for message in ranks2(_nearly_equal_scalars))


def _independent(dtype: torch.dtype, n: int) -> str:
    own = torch.Generator().manual_seed(dist.get_rank())
    return _called(sonde.clip_grad_norm_, [plain(torch.randn(n, generator=own).to(dtype))], 1.0, mesh=mesh_of((2,)))


@pytest.mark.parametrize("n", [100, 10_000, 1_000_000])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_independent_gradients_are_no_copies(ranks2: Ranks, dtype: torch.dtype, n: int) -> None:
    assert all("plain gradients" in message for message in ranks2(_independent, dtype, n))


def _other_parameters_on_one_rank(kind: str) -> list[str]:
    """A parameter that is cut over both axes of a mesh, and a plain one; rank 1 passes something else."""
    mesh = mesh_of((2, 2), ("dp", "tp"))
    sharded, bias = placed(torch.ones(2, 2), mesh, [Shard(0), Shard(1)], (4, 4)), plain(torch.ones(3))
    parameters: Any = [sharded, bias]
    others: dict[str, Any] = {"none": None, "empty": [], "fewer": [bias], "None among them": [None, bias]}
    if dist.get_rank() == 1:
        parameters = others[kind]
    calls: list[Any] = [
        lambda given: sonde.group_parameters_for_norm(given, mesh=mesh),
        lambda given: sonde.clip_grad_norm_(given, 1.0, mesh=mesh),
    ]
    messages = [_called_any(call, parameters) for call in calls]
    return [*messages, _called_any(calls[0], [sharded, bias])]


def _called_any(call: Any, given: Any) -> str:
    try:
        call(given)
    except ValueError as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize("kind", ["none", "empty", "fewer", "None among them"])
def test_other_parameters_on_one_rank_leave_no_rank_waiting(ranks4: Ranks, kind: str) -> None:
    for rank, (planned, clipped, after) in enumerate(ranks4(_other_parameters_on_one_rank, kind)):
        for message in (planned, clipped):
            if kind in ("none", "None among them"):
                assert ("must be tensors" if rank == 1 else "another rank") in message, message
            else:
                assert "have different parameters" in message
        assert after == "no error"


def _replicas_on_one_rank(replicas: Any) -> list[str]:
    mesh, p = mesh_of((2,)), plain(torch.ones(3))
    options: dict[str, Any] = {"mesh": mesh, "replicas": replicas if dist.get_rank() else None}
    return [
        _called_any(lambda given: sonde.clip_grad_norm_(given, 1.0, **options), [p]),
        _called_any(lambda given: sonde.group_parameters_for_norm(given, **options), [p]),
        _called_any(lambda given: sonde.get_total_norm(given, **options), [p.grad]),
        _called_any(lambda given: sonde.clip_grad_norm_(given, 1.0, mesh=mesh), [p]),
    ]


@pytest.mark.parametrize("replicas", [[1], 2, "w", torch.ones(2)], ids=str)
def test_replicas_that_are_no_mapping_are_refused_on_every_rank(ranks2: Ranks, replicas: Any) -> None:
    (*first, first_after), (*second, second_after) = ranks2(_replicas_on_one_rank, replicas)
    assert all("another rank" in message for message in first), first
    assert all("replicas must be a mapping from parameters or their names" in message for message in second), second
    assert first_after == second_after == "no error"


def _verified_on_one_rank() -> str:
    options: dict[str, Any] = {"mesh": mesh_of((2,)), "verify": dist.get_rank() == 1}
    return _called_any(lambda given: sonde.group_parameters_for_norm(given, **options), [plain(torch.ones(3))])


def test_a_plan_that_is_verified_on_one_rank_only_is_refused(ranks2: Ranks) -> None:
    for message in ranks2(_verified_on_one_rank):
        assert "verify differs between ranks, got " in message


def _declared_like(counts: tuple[int, ...], order: float) -> str:
    """Experts of one name with values of their own on some ranks."""
    rank, mesh = dist.get_rank(), mesh_of((len(counts),))
    same = [r for r in range(len(counts)) if counts[r] == counts[rank]]
    expert = plain(torch.full((4,), 1.0 + same[0]))
    return _called(sonde.clip_grad_norm_, [("e", expert)], None, order, mesh=mesh, replicas={"e": counts[rank]})


@pytest.mark.parametrize(("counts", "squares"), [((1, 2, 2), 4 * (1 + 4)), ((3, 3, 3), 4)])
def test_declared_numbers_may_differ_where_the_values_do(
    ranks3: Ranks, counts: tuple[int, ...], squares: float
) -> None:
    for message in ranks3(_declared_like, counts, 2.0):
        assert float(message.removeprefix("no error: ")) == pytest.approx(math.sqrt(squares))
