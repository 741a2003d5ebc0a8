"""Several backwards of one forward pass are noticed, and loops that are sound are not accused."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from sonde import NoiseScaleReading
from tests.batch_size.loops import attached, batch, mean_loss, small_model

Micro = Callable[[nn.Module, torch.Tensor, torch.Tensor], None]


def two_losses(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> None:
    out = model(x)
    (out - y).square().sum(-1).mean().backward(retain_graph=True)
    out.square().mean().backward()


def twice(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> None:
    loss = mean_loss(model, x, y)
    loss.backward(retain_graph=True)
    loss.backward()


def once(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> None:
    mean_loss(model, x, y).backward()


def two_forwards(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> None:
    (mean_loss(model, x, y) + model(x + 1).square().mean()).backward()


def by_submodules(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> None:
    for layer in model:  # type: ignore[attr-defined]
        x = layer(x)
    (x - y).square().sum(-1).mean().backward()


def with_evaluation(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> None:
    once(model, x, y)
    with torch.no_grad():
        model(x)


def train_undeclared(
    micro: Micro, *, windows: int = 6, wrap: Callable[[nn.Module], nn.Module] = lambda m: m, every: int = 1
) -> tuple[NoiseScaleReading, dict[str, str]]:
    model = wrap(small_model())
    generator = torch.Generator().manual_seed(0)
    with attached(model, units_per_piece=4, log_every=1, every=every) as probe:
        for _ in range(windows):
            for _ in range(2):
                micro(model, *batch(4, generator))
            probe.step()
            model.zero_grad()
        return probe.reading(), dict(probe.alerts)


@pytest.mark.parametrize("micro", [two_losses, twice])
def test_several_backwards_of_one_forward_are_named(micro: Micro) -> None:
    reading, alerts = train_undeclared(micro)
    assert reading.b_simple is None
    assert reading.windows == 0
    assert "into one 'with probe.piece():'" in alerts["more_backwards"]
    assert [n for reason, n in reading.dropped.items() if "more often than the model's forward" in reason] == [6]


def test_a_compiled_model_is_watched_too() -> None:
    torch._dynamo.reset()
    _, alerts = train_undeclared(twice, wrap=lambda m: torch.compile(m, backend="aot_eager"))  # type: ignore[arg-type,return-value]
    assert "more_backwards" in alerts


@pytest.mark.parametrize("micro", [once, two_forwards, by_submodules, with_evaluation])
def test_sound_loops_are_not_accused(micro: Micro) -> None:
    reading, alerts = train_undeclared(micro)
    assert reading.windows == 6
    assert alerts == {}


def test_a_first_forward_that_comes_before_attach_or_early_is_no_proof() -> None:
    model = small_model()
    generator = torch.Generator().manual_seed(0)
    out, y = (lambda x, y: (model(x), y))(*batch(4, generator))
    with attached(model, units_per_piece=4, log_every=1) as probe:
        for window in range(5):
            (out - y).square().mean().backward()
            once(model, *batch(4, generator))
            if window < 4:
                out, y = (lambda x, y: (model(x), y))(*batch(4, generator))  # of the next window
            probe.step()
            model.zero_grad()
        assert probe.reading().windows == 5


def own_l1(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> None:
    (model(x) - y).abs().sum(-1).mean().backward()


def own_smoothness(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> None:
    (model(x + 0.1) - model(x)).square().sum().backward()


@pytest.mark.parametrize(("second", "n_batches"), [(own_l1, 1), (own_smoothness, 4)])
def test_two_forwards_of_one_batch_are_noticed(second: Micro, n_batches: int) -> None:
    """Each has its own backward, so no count shows it: docs/noise-scale.md says when it is noticed."""
    model = small_model()
    generator = torch.Generator().manual_seed(0)
    with attached(model, units_per_piece=4, log_every=10) as probe:
        for _ in range(100):
            for _ in range(n_batches):
                x, y = batch(4, generator)
                once(model, x, y)
                second(model, x, y)
            probe.step()
            model.zero_grad()
        probe.reading()
        assert "'with probe.piece():'" in probe.alerts["dependent_pieces"]


@torch._dynamo.config.patch(recompile_limit=1)
def test_a_model_that_is_compiled_for_some_shapes_only_is_not_accused() -> None:
    """Its compiled forwards are not counted, and those of other shapes are."""
    torch._dynamo.reset()
    model = small_model()
    generator = torch.Generator().manual_seed(0)
    with attached(model, units_per_piece=4, log_every=1) as probe:
        compiled = torch.compile(model, backend="eager", dynamic=False)
        for _ in range(6):
            for n in (4, 5, 6):
                x, y = batch(n, generator)
                (compiled(x) - y).square().sum(-1).mean().backward()
            probe.step()
            model.zero_grad()
        assert probe.reading().windows == 6, probe.reading().dropped
        assert "more_backwards" not in probe.alerts


def test_several_backwards_are_noticed_where_few_windows_are_measured() -> None:
    """The forward passes of windows that are not measured do not count for those that are."""
    reading, alerts = train_undeclared(two_losses, windows=30, every=5)
    assert "backward ran more often than the model's forward" in alerts["more_backwards"]
    assert reading.windows == 0
    sound, alerts = train_undeclared(once, windows=30, every=5)
    assert (sound.windows, sound.dropped, alerts) == (sound.windows, {}, {})
    assert sound.windows >= 6
