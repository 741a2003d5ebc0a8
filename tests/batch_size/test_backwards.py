"""How a loop may call backward: several in a piece, nested, failing, without declared pieces."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.batch_size.loops import (
    assert_same,
    attached,
    batch,
    flat_grad,
    mean_loss,
    piece_losses,
    small_model,
)
from tests.batch_size.tied_model import Tied, token_losses
from tests.oracles import window_by_hand


def test_without_piece_each_backward_is_a_piece() -> None:
    model = small_model()
    losses = piece_losses(model, [4, 4, 4])
    with attached(model, units_per_piece=4) as probe:
        for loss in losses:
            loss().backward()
        probe.step()
        reading = probe.reading()
    model.zero_grad()
    gradients = [flat_grad(model, loss()) for loss in losses]
    assert_same(reading, window_by_hand(gradients, [1] * 3, [4] * 3, torch.stack(gradients).sum(0)))


def test_several_backwards_in_one_piece() -> None:
    """Cross terms count: the piece's gradient is the sum. The first window is dropped, and later ones are right."""
    model = small_model()
    losses = piece_losses(model, [4, 4, 4, 4])
    with attached(model) as probe:
        for _ in range(2):
            for first, second in (losses[:2], losses[2:]):
                with probe.piece(units=4):
                    first().backward()
                    second().backward()
            probe.step()
            model.zero_grad()
        reading = probe.reading()
        assert sum(reading.dropped.values()) == 1
        assert "several backwards" in next(iter(reading.dropped))
    gradients = [flat_grad(model, a() + b()) for a, b in (losses[:2], losses[2:])]
    assert_same(reading, window_by_hand(gradients, [1, 1], [4, 4], gradients[0] + gradients[1]))


def test_only_gradients_of_several_backwards_wait() -> None:
    """As those of an output head whose loss is computed in chunks: the staging area holds the head, not the model."""
    torch.manual_seed(0)
    body, head = nn.Linear(200, 200), nn.Linear(200, 180)
    model = nn.Sequential(body, nn.Tanh(), head)
    inputs = [1 + 0.5 * torch.randn(4, 200) for _ in range(2)]
    with attached(model, staging_mib=1.1 * 201 * 180 * 4 / 2**20) as probe:
        for _ in range(2):
            for x in inputs:
                with probe.piece(units=4):
                    hidden = model[:2](x)
                    leaf = hidden.detach().requires_grad_()
                    for chunk in leaf.split(1):
                        head(chunk).square().sum().backward()
                    hidden.backward(leaf.grad)
            probe.step()
            model.zero_grad()
        reading = probe.reading()
    assert list(reading.dropped.values()) == [1]
    gradients = [flat_grad(model, model(x).square().sum()) for x in inputs]
    assert_same(reading, window_by_hand(gradients, [1, 1], [4, 4], gradients[0] + gradients[1]))


def test_several_backwards_beyond_the_staging_area_are_refused() -> None:
    model = small_model()
    losses = piece_losses(model, [4, 4])
    with attached(model, staging_mib=0.01) as probe:
        for _ in range(3):
            for _ in range(2):
                with probe.piece(units=4):
                    for loss in losses:
                        loss().backward()
            probe.step()
            model.zero_grad()
        reading = probe.reading()
    assert reading.windows == 0
    assert sum(reading.dropped.values()) == 3
    assert "add the losses and call backward once, or raise staging_mib" in reading.reason


def test_summed_backwards_of_large_gradients_are_exact() -> None:
    """tr Σ is a small difference here: fp32 norms of a whole 1.4M-element gradient would be off by 1.6e-3 of it."""
    model = nn.Linear(1200, 1200)
    generator = torch.Generator().manual_seed(0)
    inputs = [1 + 0.1 * torch.randn(2, 1200, generator=generator) for _ in range(4)]
    losses = [(lambda x=x: model(x).mean()) for x in inputs]  # type: ignore[misc]
    with attached(model) as probe:
        for _ in range(2):  # the first window finds several backwards in its second piece
            for pair in (losses[:2], losses[2:]):
                with probe.piece(units=4):
                    for loss in pair:
                        loss().backward()
            probe.step()
            model.zero_grad()
        reading = probe.reading()
    gradients = [flat_grad(model, a() + b()) for a, b in (losses[:2], losses[2:])]
    assert_same(reading, window_by_hand(gradients, [1, 1], [4, 4], gradients[0] + gradients[1]), rel=4e-4)


def test_summed_backwards_of_sparse_gradients() -> None:
    model = Tied(sparse=True, tie=False)
    losses = token_losses(model, [4, 4, 4, 4])
    with attached(model) as probe:
        for _ in range(2):
            for pair in (losses[:2], losses[2:]):
                with probe.piece(units=4):
                    for loss in pair:
                        loss().backward()
            probe.step()
            model.zero_grad()
        reading = probe.reading()
    gradients = [flat_grad(model, a() + b()) for a, b in (losses[:2], losses[2:])]
    assert_same(reading, window_by_hand(gradients, [1, 1], [4, 4], gradients[0] + gradients[1]))


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing(reentrant: bool) -> None:
    model = small_model()
    generator = torch.Generator().manual_seed(0)
    batches = [batch(4, generator) for _ in range(3)]

    def loss(x: Tensor, y: Tensor) -> Tensor:
        hidden = model[2](model[1](model[0](x)))
        return (model[4](checkpoint(model[3], hidden, use_reentrant=reentrant)) - y).square().sum(-1).mean()

    with attached(model, units_per_piece=4) as probe:
        for x, y in batches:
            loss(x, y).backward()  # without piece(): backward inside backward must not end the piece
        probe.step()
        reading = probe.reading()
    model.zero_grad()
    gradients = [flat_grad(model, mean_loss(model, x, y)) for x, y in batches]
    assert_same(reading, window_by_hand(gradients, [1] * 3, [4] * 3, torch.stack(gradients).sum(0)))


def test_backward_inside_backward_is_refused_and_the_message_says_what_to_do() -> None:
    model = small_model().requires_grad_(False)
    model[3].requires_grad_(True)
    x, y = batch(4, torch.Generator().manual_seed(0))
    x.requires_grad_(True)

    def backward() -> None:
        hidden = checkpoint(model[3], model[2](model[1](model[0](x))), use_reentrant=True)
        (model[4](hidden) - y).square().sum(-1).mean().backward()

    with attached(model, units_per_piece=4) as probe:
        for _ in range(2):
            backward()
        probe.step()
        reading = probe.reading()
        assert reading.windows == 0
        assert "wrap each micro-batch in 'with probe.piece():'" in reading.reason
        model.zero_grad()
        for _ in range(2):
            with probe.piece():
                backward()
        probe.step()
        assert probe.reading().windows == 1


@pytest.mark.parametrize("declared", [True, False])
def test_a_gradient_penalty_by_autograd_grad_does_not_count_as_a_backward(declared: bool) -> None:
    """autograd.grad calls the same hooks but adds nothing to `.grad`: only the penalised loss's gradient counts."""
    model = small_model()
    parameters = list(model.parameters())
    generator = torch.Generator().manual_seed(0)
    batches = [batch(4, generator) for _ in range(3)]

    def loss(x: Tensor, y: Tensor) -> Tensor:
        plain = mean_loss(model, x, y)
        slopes = torch.autograd.grad(plain, parameters, create_graph=True)
        return plain + 0.1 * sum((s.square().sum() for s in slopes), torch.zeros(()))

    with attached(model, units_per_piece=4) as probe:
        for x, y in batches:
            with probe.piece() if declared else contextlib.nullcontext():
                loss(x, y).backward()
        probe.step()
        reading = probe.reading()
    model.zero_grad()
    gradients = [flat_grad(model, loss(x, y)) for x, y in batches]
    assert_same(reading, window_by_hand(gradients, [1] * 3, [4] * 3, torch.stack(gradients).sum(0)))


def test_gradients_set_by_hand_do_not_count_as_pieces() -> None:
    model = small_model()
    parameters = list(model.parameters())
    with attached(model) as probe:
        for loss in piece_losses(model, [4, 4]):
            with probe.piece(units=4):
                grads = torch.autograd.grad(loss(), parameters)
            for p, g in zip(parameters, grads, strict=True):
                p.grad = g if p.grad is None else p.grad + g
        probe.step()
        reading = probe.reading()
    assert reading.windows == 0
    assert "no backward reached the parameters in a piece" in reading.reason
    assert "gradients set by hand" in reading.reason


@pytest.mark.parametrize("declared", [False, True])
def test_a_backward_that_fails_leaves_no_trace(declared: bool) -> None:
    model = small_model()
    losses = piece_losses(model, [4, 4])

    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            raise MemoryError("pretend")

    def failing() -> Tensor:
        return model[4](Fails.apply(model[3](torch.randn(4, 160)))).square().mean()

    with attached(model, units_per_piece=4) as probe:
        piece = probe.piece if declared else contextlib.nullcontext
        with pytest.raises(MemoryError), piece():
            failing().backward()
        model.zero_grad()  # out of memory was caught, and the window is tried again
        for loss in losses:
            with piece():
                loss().backward()
        probe.step()
        reading = probe.reading()
    model.zero_grad()
    gradients = [flat_grad(model, loss()) for loss in losses]
    assert_same(reading, window_by_hand(gradients, [1, 1], [4, 4], gradients[0] + gradients[1]))


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True")  # torch says so once a process
def test_create_graph() -> None:
    model = small_model()
    losses = piece_losses(model, [4, 4])
    with attached(model) as probe:
        for loss in losses:
            with probe.piece(units=4):
                loss().backward(create_graph=True)
        probe.step()
        reading = probe.reading()
    model.zero_grad()
    gradients = [flat_grad(model, loss()) for loss in losses]
    assert_same(reading, window_by_hand(gradients, [1, 1], [4, 4], gradients[0] + gradients[1]))
