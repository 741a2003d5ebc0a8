"""Several backwards of one forward pass are noticed, and loops that are sound are not accused."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from sonde import NoiseScaleReading
from tests.batch_size.loops import attached, batch, mean_loss, piece_losses, sgd, small_model

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


# Windows without a backward.


CAUSES = {
    "ended twice": "the same window was ended twice (call probe.step()",
    "by hand": "gradients are set by hand, as those of torch.autograd.grad",
    "others": "other parameters are trained now, such as another adapter (attach to each)",
}


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("cause", CAUSES)
def test_a_window_without_a_backward_names_the_causes(
    cause: str, set_to_none: bool, capfd: pytest.CaptureFixture[str]
) -> None:
    """A window of the usual kind comes first, as where a loop changes from one adapter to another."""
    model, head = small_model(), nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with attached(model, optimizer, units_per_piece="first dim", per_example="auto", verbose=True) as probe:
        for window in range(6):
            loss = piece_losses(model, [4])[0]
            if window and cause == "by hand":
                for p, gradient in zip(
                    model.parameters(), torch.autograd.grad(loss(), [*model.parameters()]), strict=True
                ):
                    p.grad = gradient
            elif window and cause == "others":
                head(model(torch.randn(4, 12)).detach()).sum().backward()
            else:
                loss().backward()
            if window and cause == "ended twice":
                probe.step()
            probe.step()
            optimizer.step()
            optimizer.zero_grad(set_to_none)
        [message] = probe.reading().dropped
    assert CAUSES[cause] in message
    assert "could one example be told" not in capfd.readouterr().err


def test_a_window_without_declared_pieces_names_what_its_loop_may_have_done() -> None:
    model = small_model()
    with attached(model, units_per_piece=4) as probe:
        for loss in piece_losses(model, [4, 4]):
            with probe.piece(units=4):
                loss().backward()
        probe.step()
        model.zero_grad()
        for loss in piece_losses(model, [4, 4]):
            loss().backward()
        probe.step()
        assert probe.reading().windows == 1
        assert "outside 'with probe.piece():'" in probe.alerts["no_backward"]


def test_a_further_backward_may_be_said_to_be_no_micro_batch() -> None:
    model = small_model()
    optimizer, why = sgd(model), "two losses"

    def undeclared(n: int) -> None:
        for loss in piece_losses(model, [8] * n):
            loss().backward()

    with attached(model, optimizer, units_per_piece="first dim") as probe:
        probe.judge_further_backwards(lambda: why)
        undeclared(2)
        optimizer.zero_grad()
        probe.discard()
        for n in (1, 2):
            undeclared(n)
            optimizer.step()
            optimizer.zero_grad()
            assert (probe.alerts.get("units") == "two losses") == (n == 2)
        why = ""
        undeclared(2)
        optimizer.step()
        reading = probe.reading()
    # The window of one backward is too small, and nothing else is wrong with it.
    assert (reading.windows, list(reading.dropped.values())) == (1, [1, 1]), reading.dropped
