"""The numbers of the probe on plain modules, against whole gradients."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sonde
from sonde.batch_size.last_words import decision_of
from sonde.wording import number
from tests.batch_size.loops import Recording, attached, batch, mean_loss, n_recent, piece_losses, small_model, train
from tests.oracles import per_example_gradients, population

SIZES, POPULATION = (2, 3, 5), 11
"""Of the pieces of a window, which are uneven and weighted by their size; and of the examples, a prime number."""


def test_unbiased_for_the_exact_moments_of_a_population() -> None:
    """The average over windows in which any two draws take every pair of examples equally often is exact.

    The estimates are quadratic in the examples' gradients: their expectation over independent draws asks for no more.
    """
    generator = torch.Generator().manual_seed(0)
    model = small_model(torch.float64)
    inputs, targets = batch(POPULATION, generator, torch.float64)
    exact = population(per_example_gradients(model, lambda out, y: (out - y).square().sum(-1).mean(), inputs, targets))
    sink = Recording()
    every = torch.arange(POPULATION)
    # a + b j modulo a prime, at any two j, is every pair once, over all a and b: an orthogonal array of strength two.
    windows = [(a + b * torch.arange(sum(SIZES))) % POPULATION for a in every for b in every]
    with attached(model, log=sonde.RunLog(sink, log_windows=True)) as probe:
        for window in windows:
            for rows in window.split(SIZES):
                n = len(rows)
                with probe.piece(units=n, weight=n):
                    (n * mean_loss(model, inputs[rows], targets[rows])).backward()
            for p in model.parameters():
                p.grad.div_(sum(SIZES))  # type: ignore[union-attr]
            probe.step()
            model.zero_grad()
        reading, n = probe.reading(), n_recent(probe)
    assert len(sink.of_kind("window")) == reading.windows == len(windows)
    squares = sum(SIZES) ** 2  # they are in units of the sum of the pieces
    for measured, true, name in (
        (reading.trace_cov, exact.trace_cov, "trace_cov"),
        (reading.grad_sq, exact.grad_sq, "grad_sq"),
    ):
        assert measured is not None
        own = torch.tensor([window["metrics"][f"gns/{name}"] for window in sink.of_kind("window")], dtype=torch.float64)
        assert own.mean().item() / squares == pytest.approx(true, rel=1e-9)  # rounding in float64
        assert measured == pytest.approx(own[-n:].mean().item(), rel=1e-9)  # the last windows
        assert own.std().item() / squares > 0.1 * true  # which the average has to even out
    assert reading.low is not None
    assert reading.high is not None
    assert reading.low <= exact.b_simple <= reading.high


def test_another_default_device_does_not_matter() -> None:
    model = small_model()
    with attached(model) as probe:
        for loss in piece_losses(model, [4, 4]):
            with probe.piece(units=4):
                loss().backward()
        with torch.device("meta"):
            probe.log(loss=1.0)
            probe.step()
            assert probe.reading().windows == 1


def test_a_single_piece_gives_no_number_and_names_two_solutions() -> None:
    model = small_model()
    with attached(model) as probe:
        with probe.piece(units=4):
            piece_losses(model, [4])[0]().backward()
        probe.step()
        reading = probe.reading()
    assert (reading.windows, reading.b_simple, reading.low) == (0, None, None)
    assert "Accumulate gradients over 2 or more micro-batches" in reading.reason
    assert "2 or more data-parallel ranks" in reading.reason
    assert "not known yet" in str(reading)


def test_reading_before_the_first_window() -> None:
    with attached(small_model()) as probe:
        reading = probe.reading()
    assert (reading.status, reading.windows, reading.units_per_window) == ("unresolved", 0, None)
    assert reading.reason == "no window has ended yet"


def test_one_piece_with_all_the_weight_is_dropped() -> None:
    model = small_model()
    with attached(model) as probe:
        for loss, weight in zip(piece_losses(model, [4, 4]), (1.0, 1e-20), strict=True):
            with probe.piece(units=4, weight=weight):
                loss().backward()
        probe.step()
        assert "all the weight" in probe.reading().reason


def test_a_reading_says_what_it_means_for_the_batch() -> None:
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with attached(model, optimizer) as probe:
        nothing = decision_of(probe, probe.reading())
        train(model, probe, optimizer, windows=40)
        early, too_early = probe.reading(), decision_of(probe, probe.reading())
        train(model, probe, optimizer, windows=80)
        reading = probe.reading()
        decision = decision_of(probe, reading)
    assert (early.status, reading.status) == ("resolved", "resolved")
    assert (nothing.kind, nothing.sentence) == ("wait", "No verdict yet.")
    assert too_early.sentence == "No verdict yet on the batch of 12 rows."
    assert str(early).endswith(", 40 windows")
    average = reading.average
    assert decision.kind != "wait"
    for known in (average, reading.now):
        size = f"{number(known.ratio)} rows [{number(known.low)} – {number(known.high)}]"
        assert f"the noise scale, {size}, times " in decision.reason
    assert str(reading).endswith(f"{number(average.ratio)} over the run, batch 12 rows, 120 windows")


# The clip.


@pytest.mark.parametrize(
    ("norm_type", "max_norm", "every"),
    [
        *((2.0, most, 1) for most in (0.0, 0.1, 1e9, math.inf, None)),
        *((1.0, 0.1, 1), (3.0, 0.1, 1), (math.inf, None, 1)),
        *((1.0, 0.1, 4), (math.inf, 0.1, 4)),
    ],
)
def test_clip_is_torchs_and_the_window_is_measured_before_it(
    norm_type: float, max_norm: float | None, every: int
) -> None:
    """In windows that are not measured too."""
    ours, theirs = small_model(), small_model()
    n_windows = 2 if every == 1 else 20
    with attached(ours, every=every) as probe:
        for _ in range(n_windows):
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
        # By the 2-norm all the same.
        assert probe.reading().windows == 2 if every == 1 else 2 < probe.reading().windows < 8


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((1.0, 0), "norm_type must be > 0, got 0"),
        ((1.0, 7.0), "norm_type must be at most 6, or math.inf"),
        ((-1.0,), "max_norm must be ≥ 0"),
        ((math.nan,), "max_norm must be ≥ 0"),
        (("1",), "max_norm must be a number"),
        ((torch.ones(2),), "max_norm must be a number"),
        ((True,), "max_norm must be a number"),
    ],
    ids=str,
)
def test_a_clip_refuses_what_cannot_be_and_touches_nothing(arguments: Any, message: str) -> None:
    model = small_model()
    piece_losses(model, [4])[0]().backward()
    before = [p.grad.clone() for p in model.parameters()]  # type: ignore[union-attr]
    with attached(model) as probe, pytest.raises(ValueError, match=message):
        probe.clip_grad_norm_(arguments[0], norm_type=(*arguments, 2.0)[1])
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
