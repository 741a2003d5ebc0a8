from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import sonde
from tests.gradient_norm.placed_gradients import with_grad


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


@pytest.mark.parametrize(
    "arguments",
    [(0.0,), (0.5,), (1e6,), (math.inf,), (1.0, 3.0), (1.0, "inf"), (1.0, 2.0, True), (1.0, 2.0, False, False)],
    ids=str,
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.shows("norm and clip", "one process")
def test_as_torch(arguments: tuple[Any, ...], dtype: torch.dtype) -> None:
    ours = gradients((7, 3), (1000,), (), (90, 110), dtype=dtype)
    theirs, before = copies(ours), copies(ours)
    assert sonde.clip_grad_norm_(ours, None) > 1  # which only measures
    assert all(torch.equal(p.grad, q.grad) for p, q in zip(ours, before, strict=True))  # type: ignore[arg-type]
    got = sonde.clip_grad_norm_(ours, *arguments, pp_mesh=None, ep_enabled=True)  # torchtitan passes these
    expected = torch.nn.utils.clip_grad_norm_(theirs, *arguments)
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


def test_a_sparse_gradient_counts_and_is_clipped() -> None:
    layer = nn.Embedding(5, 3, sparse=True)
    layer(torch.tensor([1, 1, 4])).sum().backward()  # row 1 comes twice: its parts add up before they are squared
    assert layer.weight.grad is not None
    dense = layer.weight.grad.to_dense()
    for norm in (sonde.get_total_norm([layer.weight.grad]), sonde.clip_grad_norm_(layer.weight, 1.0)):
        assert float(norm) == pytest.approx(float(dense.norm()))
    assert layer.weight.grad.is_sparse
    torch.testing.assert_close(layer.weight.grad.to_dense(), dense / dense.norm())
    sonde.clip_grads_with_norm_(layer.weight, 0.5, 1.0)
    torch.testing.assert_close(layer.weight.grad.to_dense(), 0.5 * dense / dense.norm())


def test_not_finite_is_skipped() -> None:
    a, b = gradients((3,), (4,))
    a.grad[0] = math.nan  # type: ignore[index]
    assert math.isnan(float(sonde.clip_grad_norm_([a, b], 1.0, nonfinite="skip")))
    assert not a.grad.any()  # type: ignore[union-attr]
    assert not b.grad.any()  # type: ignore[union-attr]


@pytest.mark.parametrize("size", [1e-40, 1e27])
def test_the_highest_order_holds_gradients_of_any_size(size: float) -> None:
    (p,) = gradients((1000,))
    p.grad.mul_(size)  # type: ignore[union-attr]
    largest = p.grad.double().abs().max()  # type: ignore[union-attr]
    exact = float(largest * (p.grad.double() / largest).norm(6.0))  # type: ignore[union-attr]
    norm = sonde.clip_grad_norm_([p, nn.Parameter(torch.zeros(1))], None, 6.0)
    assert float(norm) == pytest.approx(exact, rel=1e-6, abs=1e-45)  # a step of fp32 near 0


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


def test_an_exhausted_iterator_is_warned_of() -> None:
    with pytest.warns(UserWarning, match="an iterator at its end") as caught:
        sonde.clip_grad_norm_(iter([]), 1.0)
    assert caught[0].filename == __file__


def test_finite_gradients_whose_norm_fp32_cannot_hold_are_clipped() -> None:
    (p,) = gradients((100,))
    p.grad.fill_(1e38)  # type: ignore[union-attr]
    with pytest.raises(RuntimeError, match="every gradient is finite, but their norm overflows in float32"):
        sonde.clip_grad_norm_(p, 1.0, nonfinite="raise")
    sonde.clip_grad_norm_(p, 1.0)
    assert float(p.grad.norm()) == pytest.approx(1.0, rel=1e-5)  # type: ignore[union-attr]


class Counted(TorchDispatchMode):
    """How often each operation was called."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[Any] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls[func] += 1
        return func(*args, **(kwargs or {}))

    @property
    def reads(self) -> int:
        """What the host reads. On a GPU each would wait: there, none of these is made."""
        return self.calls[torch.ops.aten._local_scalar_dense.default] + self.calls[torch.ops.aten.is_nonzero.default]


@pytest.mark.parametrize(
    ("max_norm", "nonfinite", "n_reads", "n_scaled"),
    [
        (1e-3, "ignore", 2, 2),
        (1e-3, "skip", 2, 2),
        (1e9, "ignore", 2, 0),
        (None, "ignore", 1, 0),
        (None, "raise", 2, 0),
    ],
)
def test_what_the_host_reads_and_what_is_multiplied(
    max_norm: float | None, nonfinite: Any, n_reads: int, n_scaled: int
) -> None:
    """Of gradients in blocks, their sum; the norm, if it is needed; and nothing is multiplied by 1."""
    plan = sonde.group_parameters_for_norm(gradients((3,), (400, 300)))
    with Counted() as counted:
        sonde.clip_grad_norm_distributed_(plan, max_norm, nonfinite=nonfinite)
    assert (counted.reads, counted.calls[torch.ops.aten._foreach_mul_.Tensor]) == (n_reads, n_scaled)


clip, total = sonde.clip_grad_norm_, sonde.get_total_norm
REFUSED: list[tuple[Callable[[Any], Any], str]] = [
    (lambda p: clip(p, -1.0), "max_norm must be ≥ 0, got -1.0: use math.inf to measure"),
    (lambda p: clip(p, math.nan), "max_norm must be ≥ 0, got nan"),
    (lambda p: clip(p, "1"), "max_norm must be a number"),
    (lambda p: clip(p, True), "max_norm must be a number"),
    (lambda p: sonde.clip_grads_with_norm_(p, -1.0, 3.0), "max_norm must be ≥ 0"),
    (lambda p: clip(p, 1.0, 0.0), "norm_type must be > 0"),
    (lambda p: clip(p, 1.0, math.nan), "norm_type must be > 0"),
    (lambda p: clip(p, 1.0, "two"), "norm_type must be > 0"),
    (lambda p: clip(p, 1.0, 6.5), r"norm_type must be at most 6, or math\.inf, .*overflow or vanish"),
    (lambda p: clip(p, 1.0, torch.tensor(100.0)), "norm_type must be at most 6"),
    (lambda p: total(p.grad, 7), "norm_type must be at most 6"),
    (lambda p: total([p.grad], 0.0), "norm_type must be > 0"),
    (lambda p: clip(p, 1.0, nonfinite="drop"), "nonfinite must be one of ignore, skip, raise, got"),
    (lambda p: clip(p, 1.0, replicas={"w": 2}), "replicas= counts ranks of a mesh"),
    (lambda p: clip([1.0], 1.0), "parameters must be tensors"),
    (lambda p: clip([None], 1.0), "must be tensors, got None among them"),
    (lambda p: clip(["weight"], 1.0), "parameters must be tensors"),
    (lambda p: clip([("w", 1.0)], 1.0), "parameters must be tensors"),
    (lambda p: clip(3, 1.0), r"got 3: pass model.parameters\(\)"),
    (lambda p: clip({"w": p}, 1.0), r"got an object of type dict: pass model.parameters\(\)"),
    (lambda p: clip(torch.optim.SGD([p]), 1.0), "got an object of type SGD"),
    (lambda p: clip(torch.optim.SGD([p]).param_groups, 1.0), "got an object of type dict"),
    (lambda p: sonde.clip_grads_with_norm_(torch.optim.SGD([p]).param_groups, 1.0, 3.0), r"pass model.parameters\(\)"),
    (lambda p: clip([p.grad], 1.0), r"pass model.parameters\(\), not their gradients"),
    (
        lambda p: total([p.grad] * 1025, by_group=[*map(str, range(1025))]),
        "at most 1,024 groups, got 1,025: take fewer",
    ),
    (lambda p: clip([("phase", with_grad(torch.ones(3) * 1j))], 1.0), "gradient of phase: it is complex"),
    (lambda p: sonde.clip_grad_norm_distributed_([p], 1.0), "must be the plan that group_parameters_for_norm returned"),
    (lambda p: total([p.grad, None]), "got None among them: leave out gradients that are None"),
    (lambda p: total(nn.Linear(2, 1)), r"got the module Linear, .*pass \[p.grad for p in model.parameters\(\)"),
    (lambda p: total([p]), "tensors must be gradients, got parameters, which are weights"),
    (lambda p: total(sonde.group_parameters_for_norm(p), by_group=["a"]), "a plan knows its mesh and .* no groups"),
    (lambda p: total([p.grad], by_group=["a", "b"]), "name the group of each tensor, got 2 names for 1 tensors"),
    (lambda p: total([p.grad] * 2, by_group="ab"), "of each tensor's group, got 'ab': pass a list of names"),
    (lambda p: total([p.grad] * 2, by_group=7), "a list with the name of each tensor's group, got 7"),
    (lambda p: total([p.grad] * 2, by_group=["a", 1]), "a list with the name of each tensor's group, got"),
]


@pytest.mark.parametrize(("call", "match"), REFUSED, ids=[match for _, match in REFUSED])
def test_what_cannot_be_is_refused_and_touches_nothing(call: Callable[[Any], Any], match: str) -> None:
    (p,) = gradients((3,))
    before = p.grad.clone()  # type: ignore[union-attr]
    with pytest.raises(ValueError, match=match):
        call(p)
    assert torch.equal(p.grad, before)  # type: ignore[arg-type]
