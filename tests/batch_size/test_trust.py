"""When a number is not to be trusted, and when it is: no false alarms, no changed gradient that goes unsaid."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from tests.batch_size.loops import attached, batch, mean_loss, piece_losses, small_model, train


def windows_of(
    model: nn.Module, n: int, *, read_every: int, change: Callable[[], object] = lambda: None, **options: object
) -> dict[int, str]:
    """Train `n` windows of two pieces of a regression; the status after each one that is read, by its number."""
    generator = torch.Generator().manual_seed(0)
    statuses = {}
    with attached(model, groups=None, **options) as probe:
        for window in range(1, n + 1):
            for _ in range(2):
                x = torch.randn(4, 6, generator=generator)
                y = x + torch.randn(4, 6, generator=generator)
                with probe.piece(units=4):
                    (model(x) - y).square().sum(1).mean().backward()
            change()
            probe.step()
            model.zero_grad()
            if window % read_every == 0:
                statuses[window] = probe.reading().status
    return statuses


class Many(nn.Module):
    """Many matrices: the witness takes many windows to read each of them."""

    def __init__(self, n: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6, bias=False) for _ in range(n))

    def forward(self, x: Tensor) -> Tensor:
        joined: Tensor = sum(layer(x) for layer in self.layers)  # type: ignore[assignment]
        return joined / len(self.layers)


def test_one_matrix_of_many_changed_in_every_window_stays_in_doubt() -> None:
    """The matrix is compared only in every 40th window, which is about as long as the averages remember."""
    model = Many(80)
    middle = model.layers[41].weight
    assert isinstance(middle, nn.Parameter)

    def flip() -> None:
        assert middle.grad is not None
        middle.grad.copy_(middle.grad.flip(0))

    status = windows_of(model, 160, read_every=5, change=flip)
    first = next(window for window in status if status[window] == "unresolved" and window > 6)
    assert first <= 45
    assert {status[window] for window in status if window >= first} == {"unresolved"}


@pytest.mark.parametrize("how", ["zeroed", "none"])
def test_a_block_whose_gradient_went_missing_is_seen(how: str) -> None:
    model = nn.ModuleDict({"large": nn.Linear(12, 3), "small": nn.Linear(12, 3)})
    generator = torch.Generator().manual_seed(0)
    with attached(model) as probe:
        for _ in range(5):
            for _ in range(2):
                with probe.piece(units=4):
                    x, y = batch(4, generator)
                    loss = (model["large"](x) - y).square().mean() + 1e-5 * (model["small"](x) - y).square().mean()
                    loss.backward()
            for p in model["small"].parameters():
                p.grad = torch.zeros_like(p) if how == "zeroed" else None
            probe.step()
            model.zero_grad()
        assert probe.reading().windows == 0


@pytest.mark.parametrize("n_pieces", [8, 16])
def test_sixteen_bit_sums_raise_no_false_alarm(n_pieces: int) -> None:
    """Where pieces nearly cancel, rounding is large beside their sum and small beside the pieces."""
    model = small_model(torch.bfloat16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with attached(model, optimizer) as probe:
        train(
            model,
            probe,
            optimizer,
            windows=120,
            sizes=[4] * n_pieces,
            scale_loss=lambda loss: loss / n_pieces,
            dtype=torch.bfloat16,
        )
        assert probe.reading().dropped == {}
        assert probe.reading().doubts == {}


@pytest.mark.parametrize("units", [4, 1024])
@pytest.mark.parametrize("n_pieces", [3, 7, 12])
def test_the_same_micro_batch_is_noticed_for_any_unit(n_pieces: int, units: int) -> None:
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    x, y = batch(4, torch.Generator().manual_seed(0))
    with attached(model, optimizer) as probe:
        for _ in range(10):
            for _ in range(n_pieces):
                with probe.piece(units=units):
                    (mean_loss(model, x, y) / n_pieces).backward()
            probe.step()
            optimizer.zero_grad()
        reading = probe.reading()
    assert "same_data" in reading.doubts
    assert reading.b_simple is None


def test_rare_changes_end_their_doubt() -> None:
    """Two changed windows of many do not hide the number for ever."""
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)

    def noise() -> None:
        for p in model.parameters():
            p.grad.add_(torch.randn_like(p))  # type: ignore[union-attr]

    with attached(model, optimizer) as probe:
        train(model, probe, optimizer, windows=2, before_step=noise)
        assert probe.reading().status == "unresolved"
        train(model, probe, optimizer, windows=150)
        assert probe.reading().status == "resolved"
        assert sum(probe.reading().dropped.values()) == 2


def test_a_piece_without_a_backward_drops_the_window() -> None:
    model = small_model()
    with attached(model) as probe:
        for loss in piece_losses(model, [4, 4]):
            with probe.piece(units=4):
                loss().backward()
        with probe.piece(units=4):
            pass  # a micro-batch that was skipped
        probe.step()
        reading = probe.reading()
    assert reading.windows == 0
    assert "no backward reached the parameters in a piece: leave out skipped micro-batches" in reading.reason


def test_parameters_added_after_attach_are_clipped_too(caplog: pytest.LogCaptureFixture) -> None:
    """New parameters are not measured, and an alert says so. A clip still covers the whole model, as torch's does."""
    model = small_model()
    with caplog.at_level(logging.CRITICAL), attached(model) as probe:
        model.append(nn.Linear(3, 3))
        for loss in piece_losses(model, [4, 4]):
            with probe.piece(units=4):
                loss().backward()
        grads = [p.grad.clone() for p in model.parameters() if p.grad is not None]
        norm = probe.clip_grad_norm_(0.1)
        assert float(norm) == pytest.approx(float(torch.cat([g.flatten() for g in grads]).norm()), rel=1e-6)
        after = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
        assert float(after.norm()) == pytest.approx(0.1, rel=1e-4)
        assert "cannot be measured" in probe.alerts["not_watched"]


def test_a_dominant_matrix_changed_in_every_window_is_found_by_the_median_scale() -> None:
    """The matrix dominates the gradient and therefore κ. The κ of most parameters is right, and the matrix is wrong."""
    torch.manual_seed(0)
    model = Many(41)
    middle = model.layers[20].weight
    assert isinstance(middle, nn.Parameter)
    middle.register_hook(lambda g: 30 * g)

    def shrink() -> None:
        assert middle.grad is not None
        middle.grad.mul_(0.9)

    status = windows_of(model, 150, read_every=5, change=shrink)
    assert {status[window] for window in status if window > 60} == {"unresolved"}


def test_gradients_present_at_attach_do_not_silence_a_large_model() -> None:
    model = Many(80)
    model(torch.ones(1, 6)).sum().backward()  # stale: never zeroed before the first window
    assert windows_of(model, 40, read_every=40) == {40: "resolved"}


def test_a_parameter_that_is_no_longer_used_raises_no_doubt() -> None:
    model = nn.ModuleDict({"body": nn.Linear(12, 3), "unused": nn.Linear(12, 3)})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    generator = torch.Generator().manual_seed(0)
    with attached(model, optimizer) as probe:
        for window in range(120):
            for _ in range(2):
                with probe.piece(units=4):
                    x, y = batch(4, generator)
                    loss = (model["body"](x) - y).square().mean()
                    if window < 10:
                        loss = loss + (model["unused"](x) - y).square().mean()
                    loss.backward()
            if window == 9:
                model["unused"].weight.grad.add_(1.0)  # type: ignore[union-attr,operator]
            probe.step()
            optimizer.zero_grad()
        assert probe.reading().status == "resolved"


def test_large_pieces_in_sixteen_bits_are_not_the_same_data() -> None:
    model = nn.Linear(6, 2).bfloat16()
    generator = torch.Generator().manual_seed(0)
    with attached(model) as probe:
        for _ in range(20):
            for _ in range(4):
                x = torch.randn(2048, 6, generator=generator)
                y = x[:, :2] + 0.5 * torch.randn(2048, 2, generator=generator)
                with probe.piece(units=2048):
                    ((model(x.bfloat16()) - y.bfloat16()).square().mean() / 4).backward()
            probe.step()
            model.zero_grad()
        assert "same_data" not in probe.reading().doubts
        assert probe.reading().windows == 20


def test_one_changed_window_in_a_deep_model_is_soon_forgotten(caplog: pytest.LogCaptureFixture) -> None:
    """Every parameter compared in that window was changed, among them matrices that are compared again much later."""
    model, after = Many(80), 0
    generator = torch.Generator().manual_seed(0)
    with attached(model, groups=None) as probe:
        for window in range(80):
            for _ in range(2):
                with probe.piece(units=4):
                    model(torch.randn(4, 6, generator=generator)).square().sum(1).mean().backward()
            if window == 60:
                for p in model.parameters():
                    p.grad.mul_(1 + torch.rand(p.shape, generator=generator))  # type: ignore[union-attr]
            probe.step()
            model.zero_grad()
            if window > 60:
                after += probe.reading().status == "resolved"
        assert probe.reading().windows == 79
    assert after == 19


def test_an_interrupted_piece_is_named() -> None:
    model = small_model()
    with attached(model) as probe:
        for loss in piece_losses(model, [4, 4]):
            with probe.piece(units=4):
                loss().backward()
        with contextlib.suppress(KeyError), probe.piece(units=4):
            mean_loss(model, *batch(4, torch.Generator().manual_seed(0))).backward()
            raise KeyError
        probe.step()
        assert "a piece was interrupted in or after its backward" in next(iter(probe.reading().dropped))


def test_a_model_may_be_converted_after_attach() -> None:
    """Its sums round differently from then on."""
    model = small_model()
    generator = torch.Generator().manual_seed(0)
    with attached(model) as probe:
        model.bfloat16()
        for _ in range(10):
            for _ in range(4):
                with probe.piece(units=4):
                    mean_loss(model, *batch(4, generator, torch.bfloat16)).backward()
            probe.step()
            model.zero_grad()
        assert (probe.reading().windows, dict(probe.reading().dropped)) == (10, {})
