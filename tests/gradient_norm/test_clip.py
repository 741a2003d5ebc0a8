from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import sonde


def gradients(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    parameters = [nn.Parameter(torch.randn(s, dtype=dtype)) for s in shapes]
    for p in parameters:
        p.grad = torch.randn_like(p)
    return parameters


def copies(parameters: list[nn.Parameter]) -> list[nn.Parameter]:
    others = [nn.Parameter(p.detach().clone()) for p in parameters]
    for p, q in zip(parameters, others, strict=True):
        q.grad = None if p.grad is None else p.grad.clone()
    return others


@pytest.mark.parametrize("max_norm", [0.0, 0.5, 1e6, math.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.shows("norm and clip", "one process")
def test_as_torch(max_norm: float, dtype: torch.dtype) -> None:
    ours = gradients((7, 3), (1000,), (), (90, 110), dtype=dtype)
    theirs = copies(ours)
    got = sonde.clip_grad_norm_(ours, max_norm)
    expected = torch.nn.utils.clip_grad_norm_(theirs, max_norm)
    assert got.dtype == expected.dtype
    torch.testing.assert_close(got, expected, rtol=1e-6, atol=0)
    for p, q in zip(ours, theirs, strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-6, atol=0)


def test_gradients_are_multiplied_by_torchs_coefficient_to_the_last_bit() -> None:
    """On a CPU it is computed in Python numbers, rounded to fp32 after each operation as torch's kernels round."""
    generator = torch.Generator().manual_seed(0)
    for k in range(300):
        (p,) = gradients((11,))
        before, max_norm = p.grad.clone(), 10.0 ** float(torch.rand((), generator=generator) * 4 - 3)  # type: ignore[union-attr]
        norm = sonde.clip_grad_norm_(p, max_norm)
        assert torch.equal(p.grad, before * torch.clamp(max_norm / (norm + 1e-6), max=1.0)), k  # type: ignore[arg-type]


def test_single_tensor_generator_missing_and_repeated() -> None:
    a, b = gradients((3,), (4,))
    alone = float(a.grad.norm())  # type: ignore[union-attr]
    assert float(sonde.clip_grad_norm_(a, 1e6)) == pytest.approx(alone)
    both = math.hypot(alone, float(b.grad.norm()))  # type: ignore[union-attr]
    untouched = nn.Parameter(torch.ones(2))
    assert float(sonde.clip_grad_norm_((p for p in (a, b, untouched)), 1e6)) == pytest.approx(both)
    assert untouched.grad is None
    assert float(sonde.clip_grad_norm_([a, a, b], 1e6)) == pytest.approx(both)  # tied weights count once
    assert float(sonde.clip_grad_norm_([untouched], 1.0)) == 0.0


@pytest.mark.parametrize("max_norm", [-1.0, math.nan])
def test_refuses_a_bad_threshold(max_norm: float) -> None:
    (p,) = gradients((3,))
    before = p.grad.clone()  # type: ignore[union-attr]
    with pytest.raises(ValueError, match=r"max_norm must be ≥ 0, got .*: use math.inf to measure"):
        sonde.clip_grad_norm_(p, max_norm)
    assert torch.equal(p.grad, before)  # type: ignore[arg-type]


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_not_finite(bad: float) -> None:
    a, b = gradients((3,), (4,))
    a.grad[0] = bad  # type: ignore[index]
    before = b.grad.clone()  # type: ignore[union-attr]
    with pytest.raises(RuntimeError, match=rf"the gradient norm is {bad}"):
        sonde.clip_grad_norm_([a, b], 1.0, error_if_nonfinite=True)
    assert torch.equal(b.grad, before)  # type: ignore[arg-type]
    assert not math.isfinite(float(sonde.clip_grad_norm_([a, b], math.inf)))


def test_named_parameters_are_named() -> None:
    model = nn.Linear(3, 2)
    model.weight.grad, model.bias.grad = torch.ones(2, 3), torch.tensor([math.nan, 1.0])
    with pytest.raises(RuntimeError, match=r"not finite in bias\. Find the loss"):
        sonde.clip_grad_norm_(model.named_parameters(), 1.0, nonfinite="raise")
    with pytest.raises(RuntimeError, match=r"not finite in parameter 1 of shape \(2,\)"):
        sonde.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)


def test_torchs_positional_arguments() -> None:
    for arguments in ((1.0,), (1.0, 3.0), (1.0, "inf"), (1.0, 2.0, True), (1.0, 2.0, False, False)):
        ours = gradients((7, 3), (40,))
        theirs = copies(ours)
        got = sonde.clip_grad_norm_(ours, *arguments)
        expected = torch.nn.utils.clip_grad_norm_(theirs, *arguments)
        torch.testing.assert_close(got, expected, rtol=1e-6, atol=0)
        for p, q in zip(ours, theirs, strict=True):
            torch.testing.assert_close(p.grad, q.grad, rtol=1e-6, atol=0)


def test_none_only_measures() -> None:
    parameters = gradients((7, 3), (40,))
    before = copies(parameters)
    assert float(sonde.clip_grad_norm_(parameters, None)) > 1
    assert all(torch.equal(p.grad, q.grad) for p, q in zip(parameters, before, strict=True))  # type: ignore[arg-type]


def test_not_finite_skipped_or_asserted() -> None:
    a, b = gradients((3,), (4,))
    a.grad[0] = math.nan  # type: ignore[index]
    with pytest.raises(RuntimeError, match="the gradient norm is not finite"):
        sonde.clip_grad_norm_([a, b], 1.0, nonfinite="assert_async")
    assert math.isnan(float(sonde.clip_grad_norm_([a, b], 1.0, nonfinite="skip")))
    assert not a.grad.any()  # type: ignore[union-attr]
    assert not b.grad.any()  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"norm_type": 0.0}, "norm_type must be > 0"),
        ({"norm_type": -1}, "norm_type must be > 0"),
        ({"norm_type": math.nan}, "norm_type must be > 0"),
        ({"norm_type": "two"}, "norm_type must be > 0"),
        ({"nonfinite": "drop"}, "nonfinite must be one of ignore, skip, raise, assert_async"),
        ({"max_norm": "1"}, "max_norm must be a number"),
        ({"max_norm": True}, "max_norm must be a number"),
        ({"replicas": {"w": 2}}, "replicas= counts ranks of a mesh"),
    ],
    ids=str,
)
def test_bad_options_are_refused_and_touch_nothing(options: dict[str, Any], match: str) -> None:
    (p,) = gradients((3,))
    before = p.grad.clone()  # type: ignore[union-attr]
    with pytest.raises(ValueError, match=match):
        sonde.clip_grad_norm_(p, **({"max_norm": 1.0} | options))
    assert torch.equal(p.grad, before)  # type: ignore[arg-type]


def test_the_groups_of_an_optimizer_are_refused_with_the_way_out() -> None:
    (p,) = gradients((3,))
    with pytest.raises(ValueError, match=r"pass \[p for group in optimizer.param_groups for p in group\['params'\]\]"):
        sonde.clip_grad_norm_(torch.optim.SGD([p]).param_groups, 1.0)  # type: ignore[arg-type]


@pytest.mark.parametrize("ep_enabled", [True, False])
def test_the_arguments_of_torchtitans_call(ep_enabled: bool) -> None:
    ours = gradients((7, 3), (40,))
    expected = float(torch.nn.utils.clip_grad_norm_(copies(ours), 1.0))
    norm = sonde.clip_grad_norm_(list(ours), 1.0, foreach=True, pp_mesh=None, ep_enabled=ep_enabled)
    assert float(norm) == pytest.approx(expected)


@pytest.mark.parametrize("parameters", [[1.0], [None], ["weight"], [("w", 1.0)]], ids=str)
def test_parameters_that_are_no_tensors_are_refused(parameters: Any) -> None:
    with pytest.raises(ValueError, match="parameters must be tensors"):
        sonde.clip_grad_norm_(parameters, 1.0)


def test_sparse_gradients_are_refused_by_name() -> None:
    embedding = nn.Embedding(5, 3, sparse=True)
    embedding(torch.tensor([1, 2])).sum().backward()
    with pytest.raises(ValueError, match=r"gradient of weight: it is sparse.*use Embedding\(sparse=False\)"):
        sonde.clip_grad_norm_(embedding.named_parameters(), 1.0)


def test_complex_gradients_are_refused_by_name() -> None:
    phase = nn.Parameter(torch.zeros(3, dtype=torch.complex64))
    phase.grad = torch.ones_like(phase)
    with pytest.raises(ValueError, match="gradient of phase: it is complex"):
        sonde.clip_grad_norm_([("phase", phase)], 1.0)


def test_a_plan_groups_gradients_that_are_spread_alike() -> None:
    parameters = gradients((3,), (4, 2), dtype=torch.float32) + gradients((5,), dtype=torch.float64)
    plan = sonde.group_parameters_for_norm(parameters)
    assert [(key.ranks, key.dtype, len(p)) for key, p in plan.items()] == [
        ((), torch.float32, 2),
        ((), torch.float64, 1),
    ]
    expected = sonde.clip_grad_norm_(copies(parameters), None)
    assert torch.equal(sonde.clip_grad_norm_distributed_(plan, None), expected)


def test_parameters_in_place_of_a_plan_are_refused() -> None:
    with pytest.raises(ValueError, match="must be the plan that group_parameters_for_norm returned"):
        sonde.clip_grad_norm_distributed_(gradients((3,)), 1.0)  # type: ignore[arg-type]


def test_the_host_reads_nothing_but_what_a_cpu_has_at_hand() -> None:
    """On a GPU each read would wait: it reads none of these."""

    class Items(TorchDispatchMode):
        count = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            Items.count += func in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.is_nonzero.default)
            return func(*args, **(kwargs or {}))

    parameters = gradients((3,), (400, 300))
    plan = sonde.group_parameters_for_norm(parameters)
    with Items():
        for n_calls, nonfinite in enumerate(("ignore", "skip"), 1):
            sonde.clip_grad_norm_distributed_(plan, 1.0, nonfinite=nonfinite)  # type: ignore[arg-type]
            assert Items.count == 2 * n_calls  # whether blocks are in fp32's range, and the norm
        sonde.clip_grad_norm_distributed_(plan, None)
        assert Items.count == 5
        sonde.clip_grad_norm_distributed_(plan, None, nonfinite="raise")
        assert Items.count == 7


def test_a_cpu_multiplies_by_nothing_that_is_one() -> None:
    class Multiplications(TorchDispatchMode):
        count = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            Multiplications.count += func is torch.ops.aten._foreach_mul_.Tensor
            return func(*args, **(kwargs or {}))

    parameters = gradients((3,), (400, 300))
    with Multiplications():
        for max_norm in (1e6, math.inf, None):
            sonde.clip_grad_norm_(parameters, max_norm)
        assert Multiplications.count == 0
        sonde.clip_grad_norm_(parameters, 1.0)
        assert Multiplications.count == 2  # one for small gradients, one for those that are read in blocks


def test_high_orders_are_refused_since_their_powers_leave_the_range_of_fp64() -> None:
    (p,) = gradients((100,))
    before = p.grad.clone()  # type: ignore[union-attr]
    for order in (6.5, 7, torch.tensor(100.0)):
        with pytest.raises(ValueError, match=r"norm_type must be at most 6, or math\.inf, .*overflow or vanish"):
            sonde.clip_grad_norm_(p, 1.0, order)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="norm_type must be at most 6"):
            sonde.get_total_norm(p.grad, order)  # type: ignore[arg-type]
    assert torch.equal(p.grad, before)  # type: ignore[arg-type]


@pytest.mark.parametrize("size", [1e-40, 1e27])
def test_the_highest_order_holds_gradients_of_any_size(size: float) -> None:
    (p,) = gradients((1000,))
    p.grad.mul_(size)  # type: ignore[union-attr]
    largest = p.grad.double().abs().max()  # type: ignore[union-attr]
    exact = float(largest * (p.grad.double() / largest).norm(6.0))  # type: ignore[union-attr]
    norm = sonde.clip_grad_norm_([p, nn.Parameter(torch.zeros(1))], None, 6.0)
    assert float(norm) == pytest.approx(exact, rel=1e-6, abs=1e-45)  # a step of fp32 near 0


def test_finite_gradients_whose_norm_fp32_cannot_hold_are_clipped() -> None:
    (p,) = gradients((100,))
    p.grad.fill_(1e38)  # type: ignore[union-attr]
    sonde.clip_grad_norm_(p, 1.0)
    assert float(p.grad.norm()) == pytest.approx(1.0, rel=1e-5)  # type: ignore[union-attr]


def test_a_norm_that_overflows_is_not_blamed_on_other_ranks() -> None:
    (p,) = gradients((100,))
    p.grad.fill_(1e38)  # type: ignore[union-attr]
    with pytest.raises(RuntimeError, match="every gradient is finite, but their norm overflows in float32"):
        sonde.clip_grad_norm_(p, 1.0, nonfinite="raise")


def test_frozen_parameters_without_a_gradient_do_not_count() -> None:
    (p,) = gradients((3,))
    frozen = [
        nn.Parameter(torch.zeros(2, dtype=torch.complex64), requires_grad=False),
        nn.Parameter(torch.zeros(2, dtype=torch.float64), requires_grad=False),
    ]
    norm = sonde.clip_grad_norm_([p, *frozen], None)
    assert norm.dtype == torch.float32
    plan = sonde.group_parameters_for_norm([p, *frozen])
    frozen[1].requires_grad_().grad = torch.full((2,), 3.0, dtype=torch.float64)
    again = sonde.clip_grad_norm_distributed_(plan, None)
    assert float(again) == pytest.approx(math.hypot(float(norm), math.sqrt(18)))
    assert again.dtype == torch.float64


def test_a_plan_outlives_a_change_of_dtype() -> None:
    model = nn.Linear(3, 2)
    plan = sonde.group_parameters_for_norm(model.parameters())
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        model.to(dtype)
        model.zero_grad()
        model(torch.ones(1, 3, dtype=dtype)).sum().backward()
        norm = sonde.clip_grad_norm_distributed_(plan, None)
        assert norm.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
        assert float(norm) == pytest.approx(math.sqrt(8))


def test_a_threshold_may_be_a_tensor_on_the_cpu() -> None:
    (p,) = gradients((30,))
    sonde.clip_grad_norm_(p, torch.tensor(0.5))  # type: ignore[arg-type]
    assert float(p.grad.norm()) == pytest.approx(0.5, rel=1e-5)  # type: ignore[union-attr]
    before = p.grad.clone()  # type: ignore[union-attr]
    sonde.clip_grad_norm_(p, 10**400)
    assert torch.equal(p.grad, before)  # type: ignore[arg-type]


def test_an_exhausted_iterator_is_warned_of() -> None:
    with pytest.warns(UserWarning, match="an iterator at its end") as caught:
        sonde.clip_grad_norm_(iter([]), 1.0)
    assert caught[0].filename == __file__


@pytest.mark.parametrize(
    ("made_of", "match"),
    [
        (
            lambda p: torch.optim.SGD([p]),
            r"got an optimizer or its groups: pass \[p for group in optimizer.param_groups",
        ),
        (lambda p: torch.optim.SGD([p]).param_groups[0], r"got an optimizer or its groups: pass \[p for group in opt"),
        (lambda p: {"w": p}, r"got a dict: pass its items\(\), names and tensors"),
        (lambda p: 3, r"got 3: pass model.parameters\(\)"),
    ],
)
def test_what_is_no_list_of_parameters_is_named(made_of: Any, match: str) -> None:
    with pytest.raises(ValueError, match=f"parameters must be tensors, .*{match}"):
        sonde.clip_grad_norm_(made_of(nn.Parameter(torch.ones(2))), 1.0)
