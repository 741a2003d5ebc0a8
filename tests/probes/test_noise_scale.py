"""The probe on plain modules: values against whole gradients, and everything a loop may do to them."""

from __future__ import annotations

import contextlib
import copy
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import sonde
from sonde import NoiseScaleProbe
from tests.oracles import per_example_gradients, population, window_by_hand
from tests.probes.loops import Recording, batch, mean_loss, small_model, train


def attached(model: nn.Module, optimizer: torch.optim.Optimizer | None = None, **options: Any) -> NoiseScaleProbe:
    return sonde.attach(model, optimizer, **({"unit": "rows", "verbose": False, "horizon": math.inf} | options))


def flat_grad(model: nn.Module, loss: Tensor) -> Tensor:
    """The whole gradient of a loss, without touching `.grad`: [parameters], float64."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    grads = torch.autograd.grad(loss, parameters, allow_unused=True, materialize_grads=True)
    return torch.cat([g.to_dense().flatten() if g.is_sparse else g.flatten() for g in grads]).double()


def one_window(
    model: nn.Module,
    losses: list[Callable[[], Tensor]],
    *,
    units: list[float],
    weights: list[float] | None = None,
    **options: Any,
) -> tuple[sonde.NoiseScaleReading, tuple[float, float]]:
    """The probe's reading of one window, and the same from whole gradients."""
    weights = weights or [1.0] * len(units)
    with attached(model, **options) as probe:
        for loss, n, w in zip(losses, units, weights, strict=True):
            with probe.piece(units=n, weight=w):
                loss().backward()
        probe.step()
        reading = probe.reading()
    model.zero_grad()
    gradients = [flat_grad(model, loss()) for loss in losses]
    return reading, window_by_hand(gradients, weights, units, torch.stack(gradients).sum(0))


def assert_same(reading: sonde.NoiseScaleReading, expected: tuple[float, float], rel: float = 1e-5) -> None:
    # fp32 gradients, and the two sides round differently: a few 1e-7 of S and B, amplified by their difference.
    assert reading.windows == 1, reading.dropped
    assert reading.trace_cov == pytest.approx(expected[0], rel=rel)
    assert reading.grad_sq == pytest.approx(expected[1], rel=rel, abs=rel * expected[0])


def piece_losses(model: nn.Module, sizes: list[int], dtype: torch.dtype = torch.float32) -> list[Callable[[], Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return [
        (lambda x=x, y=y: mean_loss(model, x, y))
        for x, y in (batch(n, generator, dtype) for n in sizes)  # type: ignore[misc]
    ]


# Values.


def test_equal_pieces() -> None:
    model = small_model()
    assert_same(*one_window(model, piece_losses(model, [4, 4, 4, 4]), units=[4, 4, 4, 4]))


def test_double_precision_is_exact() -> None:
    model = small_model(torch.float64)
    losses = piece_losses(model, [4, 8, 2], torch.float64)
    assert_same(*one_window(model, losses, units=[4, 8, 2], weights=[4, 8, 2]), rel=1e-12)


def test_uneven_pieces_weights_and_effective_units() -> None:
    model = small_model()
    losses = piece_losses(model, [3, 7, 5])
    assert_same(*one_window(model, losses, units=[3, 7, 5], weights=[1.5, 7.0, 0.3]))


def test_kish_from_unit_weights() -> None:
    model = small_model()
    losses = piece_losses(model, [4, 4])
    skewed, flat = [1.0, 2.0, 3.0, 10.0], [1.0] * 4
    for weights in (skewed, torch.tensor(skewed)):
        with attached(model) as probe:
            for loss, of_units in zip(losses, (weights, flat), strict=True):
                with probe.piece(unit_weights=of_units):
                    loss().backward()
            probe.step()
            reading = probe.reading()
        model.zero_grad()
        gradients = [flat_grad(model, loss()) for loss in losses]
        effective = [16.0**2 / 114, 4.0]
        assert_same(reading, window_by_hand(gradients, [1, 1], effective, gradients[0] + gradients[1]))
        assert reading.effective_units == pytest.approx(4 / (1 / effective[0] + 1 / effective[1]))
        assert reading.units_per_window == 8


def test_counts_may_stay_on_the_device() -> None:
    model = small_model()
    losses = piece_losses(model, [4, 8])
    with attached(model) as probe:
        for loss, n in zip(losses, (4, 8), strict=True):
            with probe.piece(units=torch.tensor(n), weight=torch.tensor(float(n))):
                loss().backward()
        probe.step()
        reading = probe.reading()
    model.zero_grad()
    gradients = [flat_grad(model, loss()) for loss in losses]
    assert_same(reading, window_by_hand(gradients, [4, 8], [4, 8], gradients[0] + gradients[1]))


def test_groups_add_up_and_are_what_they_say() -> None:
    model = small_model()
    losses = piece_losses(model, [4, 4])
    reading, total = one_window(model, losses, units=[4, 4])
    assert list(reading.groups) == ["0", "2", "3", "4"]
    assert sum(g.trace_cov or 0 for g in reading.groups.values()) == pytest.approx(total[0], rel=1e-5)
    last = model[4]
    model.requires_grad_(False)
    last.requires_grad_(True)
    gradients = [flat_grad(model, loss()) for loss in losses]
    trace_cov, grad_sq = window_by_hand(gradients, [1, 1], [4, 4], gradients[0] + gradients[1])
    assert reading.groups["4"].trace_cov == pytest.approx(trace_cov, rel=1e-5)
    assert reading.groups["4"].grad_sq == pytest.approx(grad_sq, rel=1e-5)


@pytest.mark.parametrize(
    ("groups", "names"),
    [(None, ["all"]), (lambda name: name.split(".")[-1], ["weight", "bias"]), ("blocks", ["0", "2", "3", "4"])],
)
def test_groups_are_chosen_by_name(groups: Any, names: list[str]) -> None:
    model = small_model()
    reading, expected = one_window(model, piece_losses(model, [4, 4]), units=[4, 4], groups=groups)
    assert list(reading.groups) == names
    assert_same(reading, expected)


@pytest.mark.slow
def test_unbiased_for_the_exact_moments_of_a_population() -> None:
    """Averages over many windows against tr Σ and |G|² of every example's gradient."""
    generator = torch.Generator().manual_seed(0)
    model = small_model(torch.float64)
    inputs, targets = batch(96, generator, torch.float64)
    exact = population(per_example_gradients(model, lambda out, y: (out - y).square().sum(-1).mean(), inputs, targets))
    with attached(model) as probe:
        for _ in range(12_000):
            for n in (6, 10, 16):  # uneven, and weighted by their size
                rows = torch.randint(96, (n,), generator=generator)
                with probe.piece(units=n, weight=n):
                    (n * mean_loss(model, inputs[rows], targets[rows])).backward()
            for p in model.parameters():
                p.grad.div_(32.0)  # type: ignore[union-attr]
            probe.step()
            model.zero_grad()
        reading = probe.reading()
        moments = probe._tracker._total._moments()
    # Squares are in units of the sum of the pieces: 32 times the mean gradient, 1024 times its square.
    for got, true, variance in (
        (reading.trace_cov, exact.trace_cov, moments["var_numerator"]),
        (reading.grad_sq, exact.grad_sq, moments["var_denominator"]),
    ):
        assert got is not None
        error = math.sqrt(variance) / 1024
        assert error < 0.01 * true / 2.5  # so that 1 % would be seen
        assert got / 1024 == pytest.approx(true, rel=0.01)
    assert reading.low is not None
    assert reading.high is not None
    assert reading.low <= exact.b_simple <= reading.high


# What a model may contain.


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


class Tied(nn.Module):
    """A byte model whose output head is its embedding."""

    def __init__(self, *, sparse: bool = False, tie: bool = True) -> None:
        super().__init__()
        self.embed = nn.Embedding(40, 16, sparse=sparse)
        self.mix = nn.Linear(16, 16)
        self.head = nn.Linear(16, 40, bias=False)
        if tie:
            self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(torch.tanh(self.mix(self.embed(tokens))))


def token_losses(model: nn.Module, sizes: list[int]) -> list[Callable[[], Tensor]]:
    generator = torch.Generator().manual_seed(0)
    losses = []
    for n in sizes:
        tokens = torch.randint(40, (n, 9), generator=generator)
        losses.append(lambda t=tokens: nn.functional.cross_entropy(model(t[:, :-1]).flatten(0, 1), t[:, 1:].flatten()))
    return losses


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


def test_backward_inside_backward_first_is_refused_with_the_way_out() -> None:
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


def test_sixteen_bit_gradients_are_squared_in_more() -> None:
    model = small_model().bfloat16()
    losses = piece_losses(model, [4, 4], torch.bfloat16)
    reading, expected = one_window(model, losses, units=[4, 4])
    # .grad itself is added up in 8 bits, so F is H to about 2⁻⁸; squares in bf16 would be off by several %.
    assert_same(reading, expected, rel=2e-2)


@pytest.mark.parametrize(("n_pieces", "windows"), [(64, 2), (192, 2), (3000, 0)])
def test_many_sixteen_bit_gradients_are_sums_until_they_stop_adding_up(n_pieces: int, windows: int) -> None:
    """Rounding grows as the root of the pieces; past some thousand, bf16 sums no longer move, and that is named."""
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
    assert windows or "16-bit gradients lost what is small" in reading.reason


# What a loop may do.


def test_without_piece_each_backward_is_one() -> None:
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


@pytest.mark.parametrize("metric", ["euclidean", "adam"])
@pytest.mark.parametrize("zeroed", ["None", "0"])
def test_several_backwards_in_the_first_piece_need_no_memory(metric: str, zeroed: str) -> None:
    """`.grad` is the piece's gradient so far, so cross terms are at hand, from the first window on."""
    model = small_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, weight_decay=0.0)
    losses = piece_losses(model, [4, 4, 4, 4])
    losses[3]().backward()
    optimizer.step()  # a second moment for Adam's metric
    optimizer.zero_grad(set_to_none=zeroed == "None")
    with attached(model, optimizer, metric=metric, staging_mib=0.0) as probe:
        with probe.piece(units=4):
            for loss in losses[:3]:
                loss().backward()
        with probe.piece(units=4):
            losses[3]().backward()
        probe.step()
        reading = probe.reading()
    model.zero_grad()
    gradients = [flat_grad(model, losses[0]() + losses[1]() + losses[2]()), flat_grad(model, losses[3]())]
    if metric == "adam":
        second = torch.cat([optimizer.state[p]["exp_avg_sq"].flatten() for p in model.parameters()]).double()
        gradients = [g / ((second / 1e-3).sqrt() + 1e-8).sqrt() for g in gradients]
    assert_same(reading, window_by_hand(gradients, [1, 1], [4, 4], gradients[0] + gradients[1]), rel=3e-5)


def test_several_backwards_in_one_piece() -> None:
    """Cross terms count: the piece's gradient is the sum. The first window finds out, the next are right."""
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


# κ: everything that scales the gradient as a whole, and what does more.


def b_simple_of(**options: Any) -> float:
    """tr Σ/|G|² after 30 windows at a fixed model, resolved or not."""
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    attach_options = {k: options.pop(k) for k in ("grad_scaler",) if k in options}
    with attached(model, optimizer, **attach_options) as probe:
        make = options.pop("before_step", None)
        train(model, probe, optimizer, windows=30, before_step=make(model) if make else lambda: None, **options)
        reading = probe.reading()
    assert reading.windows == 30, reading.dropped
    assert reading.trace_cov is not None
    assert reading.grad_sq is not None
    return reading.trace_cov / reading.grad_sq


def _divide(model: nn.Module) -> Callable[[], None]:
    counts = iter(range(90, 1000))  # differs from window to window, as token counts do

    def divide() -> None:
        tokens = next(counts)
        for p in model.parameters():
            p.grad.div_(tokens)  # type: ignore[union-attr]

    return divide


@pytest.mark.parametrize(
    "change",
    [
        {"scale_loss": lambda loss: loss / 3},
        {"scale_loss": lambda loss: loss * 1024},
        {"before_step": lambda model: lambda: torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)},
        {"before_step": lambda model: lambda: torch.nn.utils.clip_grad_norm_(model.parameters(), 1e6)},
        {"before_step": _divide},
    ],
    ids=["mean-of-micro-losses", "loss-scaled", "clipped-every-time", "clip-never-reached", "divided-by-tokens"],
)
def test_scaling_does_not_matter(change: dict[str, Any]) -> None:
    assert b_simple_of(**change) == pytest.approx(b_simple_of(), rel=1e-4)


@pytest.mark.parametrize("unscaled_first", [True, False])
def test_grad_scaler(unscaled_first: bool) -> None:
    """A real GradScaler that grows every 5 windows: pieces are unscaled by the scale they were taken at."""
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=5)
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    generator = torch.Generator().manual_seed(0)
    with attached(model, optimizer, grad_scaler=scaler) as probe:
        for _ in range(30):
            for _ in range(3):
                with probe.piece(units=4):
                    scaler.scale(mean_loss(model, *batch(4, generator))).backward()
            if unscaled_first:
                scaler.unscale_(optimizer)
            probe.step()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        reading = probe.reading()
    assert scaler.get_scale() > 100
    assert reading.windows == 30
    assert reading.trace_cov is not None
    assert reading.grad_sq is not None
    assert reading.trace_cov / reading.grad_sq == pytest.approx(b_simple_of(), rel=1e-4)


def test_overflow_under_a_grad_scaler_is_dropped_and_poisons_nothing() -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127, backoff_factor=2.0**-80, growth_interval=1000)
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    generator = torch.Generator().manual_seed(0)
    sink = Recording()
    with attached(model, optimizer, grad_scaler=scaler, sinks=[sink]) as probe:
        for _ in range(40):
            for _ in range(2):
                with probe.piece(units=4):
                    scaler.scale(100 * mean_loss(model, *batch(4, generator))).backward()
            scaler.unscale_(optimizer)
            probe.clip_grad_norm_(1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        reading = probe.reading()
        dropped = sum(reading.dropped.values())
        assert 0 < dropped < 20
        assert reading.windows == 40 - dropped
        assert all("not finite" in reason for reason in reading.dropped)
        assert math.isfinite(reading.trace_cov or math.nan)
        assert "not_finite" in probe.alerts
    assert [a["name"] for a in sink.of_kind("alert")].count("not_finite") == 1


def test_one_nan_piece_is_dropped_counted_and_named() -> None:
    model = small_model()
    losses = piece_losses(model, [4, 4])
    with attached(model) as probe:
        for window in range(3):
            for i, loss in enumerate(losses):
                with probe.piece(units=4):
                    (loss() * (math.nan if window == 1 and i == 0 else 1.0)).backward()
            probe.step()
            model.zero_grad()
        reading = probe.reading()
    assert (reading.windows, sum(reading.dropped.values())) == (2, 1)
    assert "not finite" in next(iter(reading.dropped))
    gradients = [flat_grad(model, loss()) for loss in losses]
    trace_cov, _ = window_by_hand(gradients, [1, 1], [4, 4], gradients[0] + gradients[1])
    assert reading.trace_cov == pytest.approx(trace_cov, rel=1e-5)


@pytest.mark.parametrize("bad", [math.nan, math.inf, 0.0, -1.0])
def test_bad_counts_on_the_device_drop_the_window(bad: float) -> None:
    model = small_model()
    losses = piece_losses(model, [4, 4])
    with attached(model) as probe:
        for loss in losses:
            with probe.piece(units=4, weight=torch.tensor(bad)):
                loss().backward()
        probe.step()
        reading = probe.reading()
    assert reading.windows == 0
    assert "not finite and positive" in reading.reason


def _clip_by_value(model: nn.Module) -> Callable[[], None]:
    def clip() -> None:
        largest = max(float(p.grad.abs().max()) for p in model.parameters())  # type: ignore[union-attr]
        torch.nn.utils.clip_grad_value_(model.parameters(), 0.02 * largest)

    return clip


def _add_noise(model: nn.Module) -> Callable[[], None]:
    def add() -> None:
        for p in model.parameters():
            p.grad.add_(torch.randn_like(p.grad) * 0.05 * p.grad.std().nan_to_num())  # type: ignore[union-attr,arg-type]

    return add


@pytest.mark.parametrize(
    ("before_step", "reason"),
    [(_clip_by_value, "clipped by value"), (_add_noise, "noise was added")],
    ids=["value", "noise"],
)
def test_more_than_a_scale_is_told_apart_and_named(before_step: Any, reason: str) -> None:
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with attached(model, optimizer) as probe:
        train(model, probe, optimizer, windows=3, before_step=before_step(model))
        reading = probe.reading()
        assert reading.windows == 0
        assert reason in reading.reason
        assert "changed" in probe.alerts


def test_a_change_to_one_layer_of_many_is_met() -> None:
    """Half of the elements that are compared move with every window; here one layer of 40 is set to 0 each time."""
    model = nn.ModuleList(nn.Linear(12, 3) for _ in range(40))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    generator = torch.Generator().manual_seed(0)
    with attached(model, optimizer) as probe:
        for _ in range(12):
            for _ in range(2):
                with probe.piece(units=4):
                    x, y = batch(4, generator)
                    (sum(layer(x) for layer in model) - y).square().mean().backward()  # type: ignore[union-attr]
            model[23].weight.grad.zero_()  # type: ignore[union-attr]
            probe.step()
            optimizer.zero_grad()
        reading = probe.reading()
        assert "changed" in probe.alerts
        assert 1 <= sum(reading.dropped.values()) <= 4


def test_a_gradient_larger_than_its_pieces_allow_is_dropped() -> None:
    """Written where nothing is compared: one element of many, in the large matrix; |F|² > Σw Σ|h|²/w cannot be."""
    model = small_model()
    losses = piece_losses(model, [4, 4])
    with attached(model) as probe:
        for loss in losses:
            with probe.piece(units=4):
                loss().backward()
        grad = model[3].weight.grad
        assert isinstance(grad, Tensor)
        compared = torch.zeros_like(grad)
        index = [p is model[3].weight for p in model.parameters()].index(True)
        probe._reader._witness.read(index, compared).fill_(1.0)
        grad.view(-1)[int(compared.view(-1).argmin())] += 1e3
        probe.step()
        assert "larger than its pieces can add up to" in probe.reading().reason


def test_gradients_present_at_attach_are_noticed_and_zeros_are_fine() -> None:
    model = small_model()
    losses = piece_losses(model, [4, 4])
    losses[0]().backward()
    with attached(model) as probe:
        for _ in range(2):
            for loss in losses:
                with probe.piece(units=4):
                    loss().backward()
            probe.step()
            model.zero_grad(set_to_none=False)
        reading = probe.reading()
    assert (reading.windows, sum(reading.dropped.values())) == (1, 1)
    assert "gradients were there before the probe was attached" in next(iter(reading.dropped))


def test_zeroed_gradients_are_named() -> None:
    model = small_model()
    with attached(model) as probe:
        for loss in piece_losses(model, [4, 4]):
            with probe.piece(units=4):
                loss().backward()
        model.zero_grad()
        probe.step()
        assert "was it zeroed" in probe.reading().reason


# Windows.


def test_a_single_piece_gives_no_number_and_both_ways_out() -> None:
    model = small_model()
    reading, _ = _single(model)
    assert (reading.windows, reading.b_simple, reading.low) == (0, None, None)
    assert "accumulate gradients over 2 micro-batches" in reading.reason
    assert "2 data-parallel ranks" in reading.reason
    assert "not known yet" in str(reading)


def _single(model: nn.Module) -> tuple[sonde.NoiseScaleReading, None]:
    with attached(model) as probe:
        with probe.piece(units=4):
            piece_losses(model, [4])[0]().backward()
        probe.step()
        return probe.reading(), None


def test_reading_before_anything() -> None:
    with attached(small_model()) as probe:
        reading = probe.reading()
    assert (reading.status, reading.windows, reading.units_per_window) == ("unresolved", 0, None)
    assert reading.reason == "no window has ended yet"


def test_called_twice_is_said_and_counted_once() -> None:
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with attached(model, optimizer) as probe:
        for _ in range(3):
            for loss in piece_losses(model, [4, 4]):
                with probe.piece(units=4):
                    loss().backward()
            norm = probe.clip_grad_norm_(0.5)
            probe.step()
            again = probe.clip_grad_norm_(0.5)
            assert float(norm) > 0.5
            assert float(again) == pytest.approx(0.5, rel=1e-4)
            optimizer.step()
            optimizer.zero_grad()
        reading = probe.reading()
        assert (reading.windows, reading.units_per_window) == (3, 8)
        assert "ended twice" in probe.alerts["called_twice"]


def test_never_called_is_said_and_the_pieces_forgotten() -> None:
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with attached(model, optimizer) as probe:
        for window in range(3):
            for loss in piece_losses(model, [4, 4]):
                with probe.piece(units=4):
                    loss().backward()
            if window:
                probe.step()
            optimizer.step()
            optimizer.zero_grad()
        reading = probe.reading()
        assert (reading.windows, reading.dropped) == (2, {})
        assert "call probe.step()" in probe.alerts["never_called"]


@pytest.mark.parametrize("max_norm", [0.0, 0.1, 1e9, math.inf])
def test_clip_is_torchs(max_norm: float) -> None:
    ours, theirs = small_model(), small_model()
    with attached(ours) as probe:
        for a, b in zip(piece_losses(ours, [4, 4]), piece_losses(theirs, [4, 4]), strict=True):
            with probe.piece(units=4):
                a().backward()
            b().backward()
        got = probe.clip_grad_norm_(max_norm)
        expected = torch.nn.utils.clip_grad_norm_(theirs.parameters(), max_norm)
        assert float(got) == pytest.approx(float(expected), rel=1e-6)
        for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
            torch.testing.assert_close(p.grad, q.grad, rtol=1e-6, atol=0)
        assert probe.reading().windows == 1  # measured before the clip


@pytest.mark.parametrize("max_norm", [-1.0, math.nan])
def test_clip_refuses_a_bad_threshold_and_touches_nothing(max_norm: float) -> None:
    model = small_model()
    piece_losses(model, [4])[0]().backward()
    before = [p.grad.clone() for p in model.parameters()]  # type: ignore[union-attr]
    with attached(model) as probe, pytest.raises(ValueError, match="max_norm must be ≥ 0"):
        probe.clip_grad_norm_(max_norm)
    assert all(torch.equal(p.grad, b) for p, b in zip(model.parameters(), before, strict=True))  # type: ignore[arg-type]


def test_clip_raises_on_a_norm_that_is_not_finite() -> None:
    model = small_model()
    with attached(model) as probe:
        with probe.piece(units=4):
            (piece_losses(model, [4])[0]() * math.nan).backward()
        with pytest.raises(RuntimeError, match="the gradient norm is nan"):
            probe.clip_grad_norm_(1.0, error_if_nonfinite=True)


# Alerts.


def test_same_data_in_all_micro_batches() -> None:
    model = small_model()
    loss = piece_losses(model, [4])[0]
    with attached(model, log_every=1) as probe:
        for _ in range(8):
            for _ in range(3):
                with probe.piece(units=4):
                    loss().backward()
            probe.step()
            model.zero_grad()
        probe.reading()
        assert "the same data" in probe.alerts["same_data"]


def test_an_alert_is_over_with_its_cause() -> None:
    """Raised once, written with every reading of its time, and with none after it."""
    model = small_model()
    sink = Recording()
    losses = piece_losses(model, [4, 4])
    with attached(model, sinks=[sink], log_every=1) as probe:
        for window in range(4):
            for loss in losses:
                with probe.piece(units=4):
                    (loss() * (math.nan if window in (1, 2) else 1.0)).backward()
            probe.step()
            model.zero_grad()
    assert [list(r["alerts"]) for r in sink.of_kind("reading")] == [[], ["not_finite"], ["not_finite"], []]
    assert [a["name"] for a in sink.of_kind("alert")] == ["not_finite"]


def test_healthy_data_raise_no_alert() -> None:
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with attached(model, optimizer, log_every=1) as probe:
        train(model, probe, optimizer, windows=40)
        assert probe.reading().status == "resolved"
        assert probe.alerts == {}


def test_unresolved_signal_is_said() -> None:
    """Pure noise: the true gradient is 0, so no number of windows finds an upper end."""
    model = nn.Linear(30, 1, bias=False)
    generator = torch.Generator().manual_seed(0)
    with attached(model, log_every=10, units_per_piece=2) as probe:
        for _ in range(60):
            for _ in range(3):
                (model.weight * torch.randn(1, 30, generator=generator)).sum().backward()
            probe.step()
            model.zero_grad()
        reading = probe.reading()
        assert reading.status != "resolved"
        assert reading.b_simple is None
        assert "not told from 0 after 50 windows" in probe.alerts["unresolved"]


# Bad input.


def test_refuses_complex_parameters_by_name() -> None:
    model = nn.Module()
    model.phase = nn.Parameter(torch.zeros(3, dtype=torch.complex64))
    with pytest.raises(ValueError, match=r"gradients must be real, got torch.complex64 for 'phase'"):
        attached(model)


def test_refuses_a_model_without_trainable_parameters() -> None:
    with pytest.raises(ValueError, match="no trainable parameters: attach after requires_grad is set"):
        attached(small_model().requires_grad_(False))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"unit": " "}, "unit must name the independent sample"),
        ({"units_per_piece": 0}, "units_per_piece must be positive"),
        ({"units_per_piece": math.nan}, "units_per_piece must be positive"),
        ({"log_every": 0}, "log_every must be at least 1"),
        ({"horizon": 1.0}, "horizon must be more than 1"),
        ({"tap": "hooks"}, "tap must be 'auto', 'leaf' or 'comm_hook'"),
        ({"tap": "comm_hook"}, "got a plain model"),
        ({"comm_hook": print}, "wrapped by tap='comm_hook' only"),
        ({"staging_mib": -1}, "staging_mib must be"),
        ({"groups": "layers"}, "groups must be"),
        ({"groups": len}, "groups must return a group's name"),
    ],
)
def test_refuses_bad_options_and_leaves_no_hook(options: dict[str, Any], message: str) -> None:
    model = small_model()
    with pytest.raises(ValueError, match=message):
        attached(model, **options)
    assert not any(p._backward_hooks for p in model.parameters())


@pytest.mark.parametrize(
    "counts",
    [
        {"units": 0},
        {"units": -4},
        {"units": math.nan},
        {"units": 4, "weight": math.nan},
        {"units": 4, "weight": 0.0},
        {"unit_weights": []},
        {"unit_weights": [1.0, math.nan]},
        {"units": torch.ones(2)},
        {"unit_weights": torch.ones(2, 2)},
    ],
    ids=str,
)
def test_refuses_bad_counts_at_the_door(counts: dict[str, Any]) -> None:
    with attached(small_model()) as probe:
        with pytest.raises(ValueError, match=r"must be|must hold"), probe.piece(**counts):
            pytest.fail("the piece was entered")
        with probe.piece(units=4):  # and the probe goes on
            pass


def test_unknown_units_are_asked_for() -> None:
    model = small_model()
    with attached(model) as probe:
        with pytest.raises(RuntimeError, match="pass units_per_piece="), probe.piece():
            pass
        piece_losses(model, [4])[0]().backward()
        with pytest.raises(RuntimeError, match="pass units_per_piece="):
            probe.step()


def test_wrong_order_of_calls() -> None:
    with attached(small_model(), units_per_piece=1) as probe, probe.piece():
        with pytest.raises(RuntimeError, match="inside another piece"), probe.piece():
            pass
        with pytest.raises(RuntimeError, match="inside a piece"):
            probe.step()


@pytest.mark.parametrize(
    ("scalars", "message"),
    [
        ({"loss": torch.ones(3)}, "0-dim tensor"),
        ({"loss": "low"}, "takes a number"),
        ({"gns/b_simple": 7.0}, "is measured by sonde"),
    ],
)
def test_log_refuses(scalars: dict[str, Any], message: str) -> None:
    with attached(small_model()) as probe, pytest.raises(ValueError, match=message):
        probe.log(**scalars)


def test_negative_unit_weights_on_the_device_drop_the_window() -> None:
    model = small_model()
    with attached(model) as probe:
        for loss in piece_losses(model, [4, 4]):
            with probe.piece(unit_weights=torch.tensor([3.0, -1.0, 2.0, -2.0])):
                loss().backward()
        probe.step()
        assert "not finite and positive" in probe.reading().reason


# State and records.


def test_state_goes_on_where_it_stopped() -> None:
    def run(model: nn.Module, probe: NoiseScaleProbe, seed: int) -> None:
        train(model, probe, torch.optim.SGD(model.parameters(), lr=0.0), windows=10, seed=seed)

    model = small_model()
    with attached(model, horizon=20.0) as whole:
        run(model, whole, 0)
        run(model, whole, 1)
        expected = whole.reading()
    with attached(model, horizon=20.0) as first:
        run(model, first, 0)
        state = first.state_dict()
    with attached(model, horizon=20.0) as second:
        second.load_state_dict(state)
        run(model, second, 1)
        got = second.reading()
    # Other elements are compared after a restart, and κ has their rounding: some 1e-8.
    assert (got.b_simple, got.low, got.high) == pytest.approx(
        (expected.b_simple, expected.low, expected.high), rel=1e-6
    )
    assert got.windows == 20
    for name, group in got.groups.items():
        assert group.trace_cov == pytest.approx(expected.groups[name].trace_cov, rel=1e-6)


@pytest.mark.parametrize("change", [{"version": 2}, {"more": 1}, {"averages": {}}, {"run": {"window": 1}}])
def test_foreign_state_is_refused_whole(change: dict[str, Any]) -> None:
    model = small_model()
    with attached(model) as probe:
        train(model, probe, torch.optim.SGD(model.parameters(), lr=0.0), windows=3)
        before = probe.state_dict()
        with pytest.raises(ValueError, match=r"version|unknown keys"):
            probe.load_state_dict(before | change)
        assert probe.state_dict() == before


_DAMAGE: list[tuple[list[str], Any]] = [
    (["run"], None),
    (["run", "window"], -1),
    (["run", "window"], 2.5),
    (["run", "units_seen"], "many"),
    (["averages", "groups"], []),
    (["averages", "total"], 7),
    (["averages", "total", "windows"], True),
    (["averages", "total", "windows"], -3),
    (["averages", "total", "windows"], 0),
    (["averages", "total", "weight"], 0.0),
    (["averages", "total", "sq_weight"], math.nan),
    (["averages", "total", "dev_trace_trace"], -1.0),
    (["averages", "groups", "4", "trace_cov"], None),
    (["averages", "units"], math.inf),
    (["averages", "units_weight"], -1),
    (["averages", "dropped"], ["zero"]),
    (["averages", "dropped"], {"zero": -1}),
]


@pytest.mark.parametrize(("path", "value"), _DAMAGE, ids=str)
def test_damaged_state_is_refused_whole(path: list[str], value: Any) -> None:
    model = small_model()
    with attached(model) as probe:
        train(model, probe, torch.optim.SGD(model.parameters(), lr=0.0), windows=3)
        before = probe.state_dict()
        damaged = place = copy.deepcopy(before)
        for key in path[:-1]:
            place = place[key]
        place[path[-1]] = value
        with pytest.raises(ValueError, match=r"must be|must map|do not fit"):
            probe.load_state_dict(damaged)
        assert probe.state_dict() == before


def test_state_of_another_model_is_refused() -> None:
    with (
        attached(small_model()) as a,
        attached(nn.Linear(2, 2)) as b,
        pytest.raises(ValueError, match="parameter groups"),
    ):
        b.load_state_dict(a.state_dict())


def test_what_sinks_receive() -> None:
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    sink = Recording()
    with attached(model, optimizer, sinks=[sink], log_every=5, run="a run", metadata={"lr": 0.01}) as probe:
        generator = torch.Generator().manual_seed(0)
        norms, losses = [], []
        for window in range(12):
            for _ in range(3):
                with probe.piece(units=4):
                    loss = mean_loss(model, *batch(4, generator))
                    loss.backward()
            probe.log(loss=loss, lr=0.01)
            norms.append(float(probe.clip_grad_norm_(3.0)))
            losses.append(float(loss.detach()))
            optimizer.step()
            optimizer.zero_grad()
            if window == 6:
                assert len(sink.of_kind("reading")) == 1  # one copy each log_every windows, not each window
    (header,) = sink.of_kind("header")
    assert header["run"] == "a run"
    assert header["unit"] == "rows"
    assert header["setup"]["ranks"] == 1
    assert header["metadata"] == {"lr": 0.01}
    assert header["metrics"]["gns/b_simple"]["unit"] == "rows"
    readings = sink.of_kind("reading")
    assert [r["window"] for r in readings] == [5, 10, 12]
    for reading, part in zip(readings, (slice(0, 5), slice(5, 10), slice(10, 12)), strict=True):
        metrics = reading["metrics"]
        assert metrics["loss"] == pytest.approx(sum(losses[part]) / len(losses[part]))
        assert metrics["lr"] == pytest.approx(0.01)
        assert metrics["grad/norm"] == pytest.approx(sum(norms[part]) / len(norms[part]), rel=1e-6)
        assert metrics["grad/clip_fraction"] == sum(n > 3.0 for n in norms[part]) / len(norms[part])
        assert 0 < metrics["cost/fraction"] < 1
        assert reading["pieces"]["per_window"] == 3
    assert readings[-1]["metrics"]["run/units_seen"] == 12 * 12
    assert sink.of_kind("end")[0]["reason"] == "closed"
    assert sink.closed == 1


def test_norm_is_logged_as_it_was_before_somebody_else_clipped() -> None:
    model = small_model()
    sink = Recording()
    norms = []
    with attached(model, sinks=[sink], log_every=1) as probe:
        for loss in piece_losses(model, [4, 4]):
            with probe.piece(units=4):
                loss().backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)))
        probe.step()
    metrics = sink.of_kind("reading")[0]["metrics"]
    assert metrics["grad/norm"] == pytest.approx(norms[0], rel=1e-5)
    assert metrics["grad/clip_fraction"] is None  # not ours to say


def test_an_exception_in_the_loop_is_the_reason_in_the_log() -> None:
    sink = Recording()
    with pytest.raises(KeyError), attached(small_model(), sinks=[sink]):
        raise KeyError("x")
    assert sink.of_kind("end")[0]["reason"] == "stopped by KeyError"


def test_close_removes_every_hook_and_may_be_called_again() -> None:
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    probe = attached(model, optimizer)
    assert all(p._backward_hooks for p in model.parameters())
    probe.close()
    probe.close()
    assert not any(p._backward_hooks for p in model.parameters())
    assert not optimizer._optimizer_step_pre_hooks


def test_what_attach_prints(capsys: pytest.CaptureFixture[str]) -> None:
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with attached(model, optimizer, verbose=True) as probe:
        said = capsys.readouterr()
        assert said.out == ""
        for part in ("plain", "28,", "1 data-parallel", "rows", "4: 0, 2, 3, 4", "leaf hooks"):
            assert part in said.err
        train(model, probe, optimizer, windows=1)
        probe.reading()
        assert "3 pieces per window, 12 rows in all" in capsys.readouterr().err


def test_a_sink_that_cannot_write_is_dropped_and_training_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    class Full(Recording):
        def write(self, record: Any) -> None:
            if len(self.records) == 2:
                raise OSError(28, "No space left on device")
            super().write(record)

    full, sound = Full(), Recording()
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with attached(model, optimizer, sinks=[full, sound], log_every=1) as probe:
        train(model, probe, optimizer, windows=5)
    assert len(full.of_kind("reading")) == 1
    assert len(sound.of_kind("reading")) == 5
    assert "Full writes no more: [Errno 28]" in caplog.text


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_that_cannot_be_written_is_refused_at_attach(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    model = small_model()
    with pytest.raises(PermissionError):
        attached(model, sinks=[sonde.JsonlSink(tmp_path / "run")])
    assert not any(p._backward_hooks for p in model.parameters())


def test_metadata_that_is_not_json_is_refused_at_attach(tmp_path: Path) -> None:
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with pytest.raises(ValueError, match="must hold JSON values only"):
        attached(model, optimizer, sinks=[sonde.JsonlSink(tmp_path / "run")], metadata={"model": model})
    assert not any(p._backward_hooks for p in model.parameters())
    assert not optimizer._optimizer_step_pre_hooks
    assert list(tmp_path.glob("run/*")) == []


def test_a_closed_probe_says_so() -> None:
    probe = attached(small_model())
    probe.close()
    with pytest.raises(RuntimeError, match="the probe is closed"):
        probe.step()


def test_scalars_of_a_window_are_averaged() -> None:
    model = small_model()
    sink = Recording()
    with attached(model, sinks=[sink], log_every=1) as probe:
        for loss, value in zip(piece_losses(model, [4, 4]), (torch.tensor(1.0), 4.0), strict=True):
            with probe.piece(units=4):
                loss().backward()
            probe.log(loss=value)
        probe.step()
    assert sink.of_kind("reading")[0]["metrics"]["loss"] == 2.5


def test_parameters_unfrozen_later_are_noticed() -> None:
    model = small_model()
    model[0].requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with attached(model, optimizer, log_every=1) as probe:
        train(model, probe, optimizer, windows=2)
        assert "not_watched" not in probe.alerts
        model[0].requires_grad_(True)
        train(model, probe, optimizer, windows=2)
        assert "0.weight" in probe.alerts["not_watched"]


def test_the_batch_size_is_the_present_one() -> None:
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with attached(model, optimizer, horizon=5.0) as probe:
        train(model, probe, optimizer, windows=20, sizes=(4, 4))
        train(model, probe, optimizer, windows=40, sizes=(16, 16))
        assert probe.reading().units_per_window == pytest.approx(32, abs=0.1)


def test_one_piece_with_all_the_weight_is_dropped() -> None:
    model = small_model()
    with attached(model) as probe:
        for loss, weight in zip(piece_losses(model, [4, 4]), (1.0, 1e-20), strict=True):
            with probe.piece(units=4, weight=weight):
                loss().backward()
        probe.step()
        assert "all the weight" in probe.reading().reason


def test_a_norm_that_is_not_finite_is_counted_before_it_is_raised() -> None:
    model = small_model()
    with attached(model) as probe:
        for loss in piece_losses(model, [4, 4]):
            with probe.piece(units=4):
                (loss() * math.nan).backward()
        with pytest.raises(RuntimeError, match="the gradient norm is nan"):
            probe.clip_grad_norm_(1.0, error_if_nonfinite=True)
        assert list(probe.reading().dropped.values()) == [1]


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


def test_cost_counts_every_second_once() -> None:
    import time

    model = small_model()
    sink = Recording()
    with attached(model, sinks=[sink], log_every=1) as probe:
        end_piece = probe._reader._tap.end_piece  # type: ignore[union-attr]
        probe._reader._tap.end_piece = lambda: (time.sleep(0.05), end_piece())[1]  # type: ignore[union-attr,assignment]
        for loss in piece_losses(model, [4, 4]):
            with probe.piece(units=4):
                loss().backward()
        probe.step()
    metrics = sink.of_kind("reading")[0]["metrics"]
    assert 0.1 <= metrics["cost/seconds_per_window"] < 0.15
    assert metrics["cost/fraction"] <= 1


# Adam's metric.


@pytest.mark.parametrize("fused", [False, True])
def test_adam_metric_is_the_weighted_sum_of_squares(fused: bool) -> None:
    """Σ P_j g_j² with the second moment of the previous step, from the optimizer's own state, by hand."""
    model = small_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=fused)
    losses = piece_losses(model, [4, 6])
    with attached(model, optimizer, metric="adam") as probe:
        for _ in range(2):
            weight = []
            for p in model.parameters():
                state = optimizer.state.get(p)
                if state:
                    corrected = state["exp_avg_sq"].double() / (1 - 0.999 ** float(state["step"]))
                    weight.append(1 / (corrected.sqrt() + 1e-8).flatten())
            gradients = [flat_grad(model, loss()) for loss in losses]
            for loss, n in zip(losses, (4, 6), strict=True):
                with probe.piece(units=n):
                    loss().backward()
            norm = probe.clip_grad_norm_(math.inf)
            optimizer.step()
            optimizer.zero_grad()
        reading = probe.reading()
    # The first window came before any second moment.
    assert (reading.windows, sum(reading.dropped.values())) == (1, 1)
    root = torch.cat(weight).sqrt()
    assert_same(reading, window_by_hand([root * h for h in gradients], [1, 1], [4, 6], root * sum(gradients)))
    assert float(norm) == pytest.approx(float(sum(gradients).norm()), rel=1e-5)  # type: ignore[union-attr]


def test_adam_metric_follows_a_loaded_state() -> None:
    """Resuming: the optimizer's state is loaded after the probe was attached."""
    model = small_model()
    trained = torch.optim.Adam(model.parameters(), lr=0.0)
    piece_losses(model, [4])[0]().backward()
    trained.step()
    trained.zero_grad()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.0)
    with attached(model, optimizer, metric="adam") as probe:
        optimizer.load_state_dict(trained.state_dict())
        train(model, probe, optimizer, windows=2)
        assert probe.reading().windows == 2


def test_adam_metric_needs_such_an_optimizer() -> None:
    model = small_model()
    with pytest.raises(ValueError, match="got no optimizer"):
        attached(model, metric="adam")
    with pytest.raises(ValueError, match="got SGD: use Adam"):
        attached(model, torch.optim.SGD(model.parameters(), lr=0.1), metric="adam")
    with pytest.raises(ValueError, match="metric must be"):
        attached(model, metric="sign")
