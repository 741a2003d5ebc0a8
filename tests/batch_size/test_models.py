"""What a model may contain: adapters, tied and sparse weights, unused parameters, 16 bits, compiled code."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.batch_size.loops import (
    assert_same,
    attached,
    batch,
    flat_grad,
    mean_loss,
    one_window,
    piece_losses,
    small_model,
)
from tests.batch_size.tied_model import Tied, token_losses
from tests.oracles import window_by_hand


def test_frozen_parameters_and_adapters() -> None:
    model = small_model()
    model[0].requires_grad_(False)
    model[3].weight.requires_grad_(False)
    assert_same(*one_window(model, piece_losses(model, [4, 4]), units=[4, 4]))


def test_lora() -> None:
    class Lora(nn.Module):
        def __init__(self, base: nn.Linear) -> None:
            super().__init__()
            self.base = base.requires_grad_(False)
            self.a = nn.Parameter(torch.randn(4, base.in_features) * 0.1)
            self.b = nn.Parameter(torch.randn(base.out_features, 4) * 0.1)

        def forward(self, x: Tensor) -> Tensor:
            return self.base(x) + x @ self.a.T @ self.b.T

    model = small_model().requires_grad_(False)
    model[3] = Lora(model[3])  # type: ignore[arg-type]
    reading, expected = one_window(model, piece_losses(model, [4, 4, 4]), units=[4, 4, 4])
    assert_same(reading, expected)
    assert list(reading.groups) == ["3"]


def test_tied_weights_count_once() -> None:
    model = Tied()
    reading, expected = one_window(model, token_losses(model, [4, 4]), units=[4, 4])
    assert_same(reading, expected)


def test_sparse_embedding_gradients() -> None:
    model = Tied(sparse=True, tie=False)
    reading, expected = one_window(model, token_losses(model, [4, 4]), units=[4, 4])
    assert_same(reading, expected)


def test_parameters_unused_in_a_piece() -> None:
    model = small_model()
    first, second = piece_losses(model, [4, 4])
    x = torch.randn(4, 12)
    losses = [first, second, lambda: model[0](x).square().mean()]  # the third reaches the first layer only
    assert_same(*one_window(model, losses, units=[4, 4, 4]))


def test_a_function_that_returns_no_gradient_for_a_parameter() -> None:
    class OnlyForInput(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
            return x * 2

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
            return grad * 2, None

    model = small_model()
    losses = piece_losses(model, [4, 4])
    with attached(model) as probe:
        for loss in losses:
            with probe.piece(units=4):
                OnlyForInput.apply(loss(), model[0].weight).backward()
        probe.step()
        assert probe.reading().windows == 1


@pytest.mark.filterwarnings("ignore:Guards may run slower on Python 3.13.0")  # torch.compile says so there
@pytest.mark.shows("noise scale", "torch.compile")
def test_compiled_model() -> None:
    torch._dynamo.reset()
    model = small_model()
    compiled = torch.compile(model, backend="aot_eager")
    losses = piece_losses(model, [4, 4, 4])
    generator = torch.Generator().manual_seed(0)
    with attached(compiled) as probe:  # type: ignore[arg-type]
        for _ in range(3):
            with probe.piece(units=4):
                mean_loss(compiled, *batch(4, generator)).backward()  # type: ignore[arg-type]
        probe.step()
        reading = probe.reading()
    model.zero_grad()
    gradients = [flat_grad(model, loss()) for loss in losses]
    assert_same(reading, window_by_hand(gradients, [1] * 3, [4] * 3, torch.stack(gradients).sum(0)))
    assert list(reading.groups) == ["0", "2", "3", "4"]


def test_sixteen_bit_gradients_are_squared_in_higher_precision() -> None:
    model = small_model().bfloat16()
    losses = piece_losses(model, [4, 4], torch.bfloat16)
    reading, expected = one_window(model, losses, units=[4, 4])
    # .grad itself is added up in 8 bits, so F is H to about 2⁻⁸; squares in bf16 would be off by several %.
    assert_same(reading, expected, rel=2e-2)


@pytest.mark.parametrize(("n_pieces", "windows"), [(64, 2), (192, 2), (3000, 0)])
def test_many_sixteen_bit_gradients_count_until_their_sum_stops_growing(n_pieces: int, windows: int) -> None:
    """Rounding grows as the root of the pieces. Beyond some thousand pieces, bf16 sums stop growing: that is named."""
    model = nn.Linear(12, 3).bfloat16()
    generator = torch.Generator().manual_seed(0)
    with attached(model, units_per_piece=4) as probe:
        for _ in range(2):
            for _ in range(n_pieces):
                mean_loss(model, *batch(4, generator, torch.bfloat16)).backward()
            probe.step()
            model.zero_grad()
        reading = probe.reading()
    assert reading.windows == windows, reading.dropped
    assert windows or "16-bit gradients lost small parts" in reading.reason
