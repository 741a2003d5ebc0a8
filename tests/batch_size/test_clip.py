"""The probe's clip: torch's numbers, and the window is measured before it."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from tests.batch_size.loops import (
    attached,
    piece_losses,
    small_model,
)


@pytest.mark.parametrize(
    ("norm_type", "max_norm"),
    [*((2.0, most) for most in (0.0, 0.1, 1e9, math.inf, None)), (1.0, 0.1), (3.0, 0.1), (math.inf, None)],
)
def test_clip_is_torchs_and_the_window_is_measured_before_it(norm_type: float, max_norm: float | None) -> None:
    ours, theirs = small_model(), small_model()
    with attached(ours) as probe:
        for _ in range(2):
            for a, b in zip(piece_losses(ours, [4, 4]), piece_losses(theirs, [4, 4]), strict=True):
                with probe.piece(units=4):
                    a().backward()
                b().backward()
            got = probe.clip_grad_norm_(max_norm, norm_type=norm_type)
            limit = math.inf if max_norm is None else max_norm
            expected = torch.nn.utils.clip_grad_norm_(theirs.parameters(), limit, norm_type)
            assert float(got) == pytest.approx(float(expected), rel=1e-6)
            for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
                torch.testing.assert_close(p.grad, q.grad, rtol=1e-6, atol=0)
            ours.zero_grad()
            theirs.zero_grad()
        assert probe.reading().windows == 2  # measured by the 2-norm all the same


def test_clip_refuses_a_bad_order() -> None:
    model = small_model()
    with attached(model) as probe:
        for order, message in ((0, "norm_type must be > 0, got 0"), (7.0, "norm_type must be at most 6, or math.inf")):
            with pytest.raises(ValueError, match=message):
                probe.clip_grad_norm_(1.0, norm_type=order)


@pytest.mark.parametrize("max_norm", [-1.0, math.nan])
def test_clip_refuses_a_bad_threshold_and_touches_nothing(max_norm: float) -> None:
    model = small_model()
    piece_losses(model, [4])[0]().backward()
    before = [p.grad.clone() for p in model.parameters()]  # type: ignore[union-attr]
    with attached(model) as probe, pytest.raises(ValueError, match="max_norm must be ≥ 0"):
        probe.clip_grad_norm_(max_norm)
    assert all(torch.equal(p.grad, b) for p, b in zip(model.parameters(), before, strict=True))  # type: ignore[arg-type]


def test_clip_takes_parameters_unfrozen_after_attach() -> None:
    model = small_model()
    model[0].requires_grad_(False)
    with attached(model) as probe:
        model[0].requires_grad_(True)
        with probe.piece(units=4):
            piece_losses(model, [4])[0]().backward()
        probe.clip_grad_norm_(0.1)
    assert torch.nn.utils.get_total_norm([p.grad for p in model.parameters()]) == pytest.approx(0.1, rel=1e-4)  # type: ignore[misc]


def test_a_child_named_module_is_not_lost() -> None:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3))
            self.module = nn.Linear(3, 1, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            return self.module(x * self.weight)

    model = Outer()
    with attached(model) as probe:
        with probe.piece(units=1):
            model(torch.ones(2, 3)).sum().backward()
        norm = probe.clip_grad_norm_(math.inf)
    assert float(norm) == pytest.approx(float(torch.nn.utils.get_total_norm([p.grad for p in model.parameters()])))  # type: ignore[misc]
