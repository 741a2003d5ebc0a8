"""Two consecutive steps as the two pieces of one window: the equations, and what is done with windows out of turn."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from sonde.batch_size.stats.critical_batch import judge_batch
from sonde.batch_size.stats.noise_scale import WindowEstimate
from sonde.batch_size.stats.scale_witness import RoundingTolerance
from sonde.batch_size.stats.solved_window import solve_window
from sonde.batch_size.stats.step_pairs import Step, StepProducts, common_scales, join_steps
from sonde.batch_size.stats.tracker import NoiseScaleTracker
from sonde.batch_size.stats.window_row import Drop, WindowRow
from tests.oracles import StepsOnAQuadratic, window_by_hand


def step(gradient: Tensor, first: Tensor | None, *, scale: float, units: float) -> Step:
    """A window whose sketch is its gradient, in one group; its F is `scale` times that gradient."""
    final = scale * gradient
    products = StepProducts([float(final @ final)], None if first is None else [float(first @ final)])
    return Step([float(final @ final)], products, scale, units)


def row(final: Tensor, products: StepProducts | None, *, h: Tensor | None = None, units: float = 8.0) -> WindowRow:
    """A window of one piece whose gradient is all witness."""
    h = final if h is None else h
    square = float(h @ h)
    return WindowRow(
        sq_norm_over_weight=[square],
        weight=1.0,
        weight_over_units=1 / units,
        sq_weight_over_units=1 / units,
        n_pieces=1,
        n_units=units,
        problems=[],
        explanations=[],
        witness_small=square,
        witness_ranks=square,
        rank_sq_weight_over_units=1 / units,
        witness_sizes={0: len(h)},
        witness_sum=h,
        witness_squares=h.square(),
        sq_norm_big=[float(final @ final)],
        witness_final=final,
        step=products,
    )


def pair_of(
    first: Tensor, second: Tensor, *, scales: Sequence[float] = (1, 1), units: Sequence[float] = (8, 8)
) -> WindowEstimate:
    """The estimate of a pair, from sketches that are the gradients themselves."""
    one = step(first, None, scale=scales[0], units=units[0])
    two = step(second, scales[0] * first, scale=scales[1], units=units[1])
    pair = join_steps(one, two)
    assert pair is not None
    of_second = replace(row(scales[1] * second, two.products, h=second), pair=pair)
    return solve_window(of_second, scale=scales[1], n_ranks=1).total


@pytest.mark.parametrize(("scales", "units"), [((1.0, 1.0), (8, 8)), ((0.25, 3.0), (6, 11))])
def test_a_pair_is_a_window_of_two_pieces_of_equal_weight(scales: Sequence[float], units: Sequence[float]) -> None:
    generator = torch.Generator().manual_seed(0)
    first, second = torch.randn(2, 30, generator=generator, dtype=torch.float64)
    expected = window_by_hand([first, second], [1, 1], units, (first + second) / 2)
    solved = pair_of(first, second, scales=scales, units=units)
    assert (solved.trace_cov, solved.grad_sq) == pytest.approx(expected, rel=1e-12)
    assert solved.grad_sq == pytest.approx(float(first @ second), rel=1e-12)
    difference = (second - first).square().sum()
    assert solved.trace_cov == pytest.approx(float(difference) / (1 / units[0] + 1 / units[1]), rel=1e-12)


@pytest.mark.parametrize(
    ("weights", "scales", "expected"),
    [
        ((1, 1), (0.1, 0.7), (0.1, 0.7)),  # clipped, each by its own factor
        ((300, 500), (1, 1), None),  # losses may be means already, or sums that nobody divides
        ((300, 500), (1 / 300, 1 / 500), (1, 1)),  # sums of losses, divided by the weight afterwards
        ((300, 500), (64 / 300, 64 / 500), (64, 64)),  # the same under a loss scale
        ((300, 330), (1, 1), None),  # weights that differ by a tenth differ
        ((300, 300.3), (0.1, 0.7), (0.1, 0.7)),  # by less than half a percent, they do not
        ((300, 500), (1.001 / 300, 1 / 500), (1.001, 1)),  # scales are estimates, in fp32
        ((300, 500), (0.1, 0.7), None),  # clipped too: the two factors cannot be told apart
    ],
)
def test_gradients_of_two_windows_are_brought_to_one_size(
    weights: tuple[float, float], scales: tuple[float, float], expected: tuple[float, float] | None
) -> None:
    steps = [Step([1.0], StepProducts([1.0], [1.0]), k, 8.0, w) for k, w in zip(scales, weights, strict=True)]
    assert common_scales(*steps) == (None if expected is None else pytest.approx(expected))
    assert (join_steps(*steps) is None) == (expected is None)


def test_a_pair_whose_sizes_cannot_be_compared_is_dropped() -> None:
    a, b = windows(2)
    of_pairs = tracker()
    heavy = {"weight": 7.0, "weight_over_units": 7 / 8, "sq_weight_over_units": 49 / 8}
    of_pairs.update(as_first(a), number=1)
    drop = of_pairs.update(replace(as_second(3 * b, a), witness_sum=b, **heavy), number=2)
    assert drop is not None
    assert drop.kind == "other_sizes"
    assert "leave out weight=" in drop.reason


def test_equal_gradients_have_no_noise_and_never_less() -> None:
    gradient = torch.randn(50, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    solved = pair_of(gradient, gradient * (1 + 1e-16), scales=(1 / 3, 1 / 7))
    assert 0 <= solved.trace_cov < 1e-13 * float(gradient @ gradient)


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_the_mean_over_pairs_has_the_bias_that_the_closed_form_predicts(sign: float) -> None:
    """200,000 pairs on a quadratic. Negative curvature turns the bias round, and the closed form with it."""
    generator = torch.Generator().manual_seed(2)
    n, pairs = 6, 200_000
    basis = torch.linalg.qr(torch.randn(n, n, generator=generator, dtype=torch.float64)).Q
    values = sign * torch.linspace(0.2, 2.0, n, dtype=torch.float64)
    factor = torch.randn(n, n, generator=generator, dtype=torch.float64)
    case = StepsOnAQuadratic(
        hessian=basis @ values.diag() @ basis.T,
        noise=factor @ factor.T,
        weights=torch.randn(n, generator=generator, dtype=torch.float64),
        rate=0.2,
        batch=8,
    )
    own = torch.randn(2, pairs, n, generator=generator, dtype=torch.float64) @ factor.T / math.sqrt(case.batch)
    first = case.weights @ case.hessian + own[0]
    second = (case.weights - case.rate * first) @ case.hessian + own[1]
    estimates = torch.stack([case.batch / 2 * (second - first).square().sum(1), (first * second).sum(1)])
    one = pair_of(first[0], second[0], units=(case.batch, case.batch))
    assert (one.trace_cov, one.grad_sq) == pytest.approx(estimates[:, 0].tolist())
    means, errors = estimates.mean(1), estimates.std(1) / math.sqrt(pairs)
    expected, truth = case.expected, case.truth
    for mean, error, predicted, exact in zip(
        means.tolist(),
        errors.tolist(),
        (expected.trace_cov, expected.grad_sq),
        (truth.trace_cov, truth.grad_sq),
        strict=True,
    ):
        assert abs(mean - predicted) < 3 * error
        assert abs(mean - exact) > 10 * error
    assert (expected.b_simple > truth.b_simple) == (sign > 0)


def tracker() -> NoiseScaleTracker:
    rounding = RoundingTolerance(1e-3, 0.0, "something else")
    return NoiseScaleTracker(unit="rows", groups=["all"], horizon=math.inf, n_ranks=1, rounding=rounding)


def windows(n: int) -> list[Tensor]:
    return list(torch.randn(n, 20, generator=torch.Generator().manual_seed(3), dtype=torch.float64) + 2.0)


def as_first(gradient: Tensor) -> WindowRow:
    return row(gradient, StepProducts([float(gradient @ gradient)]))


def as_second(gradient: Tensor, first: Tensor) -> WindowRow:
    return row(gradient, StepProducts([float(gradient @ gradient)], [float(first @ gradient)]))


def test_a_pair_is_averaged_once_under_the_number_of_its_first_window() -> None:
    a, b, c, d = windows(4)
    of_pairs = tracker()
    assert of_pairs.update(as_first(a), number=1) is None
    assert (of_pairs.windows, of_pairs.last) == (0, None)
    assert of_pairs.update(as_second(b, a), number=2) is None
    assert of_pairs.update(as_first(c), number=3) is None
    assert of_pairs.update(as_second(d, c), number=4) is None
    reading = of_pairs.reading(now=4)
    assert (reading.windows, reading.every, dict(reading.dropped)) == (2, 2.0, {})
    assert reading.units_per_window == 8.0
    # Parameters that change between c and d: the pair of both is not of the new ones.
    of_pairs.parameters_changed(["all"], gone=(), first=4)
    assert of_pairs.reading().trace_cov is None
    of_pairs = tracker()
    for number, each in enumerate((as_first(a), as_second(b, a), as_first(c), as_second(d, c)), start=1):
        of_pairs.update(each, number=number)
    of_pairs.parameters_changed(["all"], gone=(), first=3)
    assert of_pairs.reading().trace_cov == pytest.approx(4 * float((d - c).square().sum()))


def test_a_window_left_alone_is_dropped_with_the_reason() -> None:
    a, b, c, d = windows(4)
    of_pairs = tracker()
    of_pairs.update(as_first(a), number=1)  # the next one is not measured
    drop = of_pairs.update(as_second(c, b), number=4)  # the one before came from before a restart
    assert drop is not None
    assert drop.kind == "no_partner"
    assert of_pairs.reading().dropped == {drop.reason: 2}
    of_pairs.update(as_first(c), number=5)
    assert of_pairs.update(as_second(d, c), number=6) is None
    assert of_pairs.reading().windows == 1


@pytest.mark.parametrize("spoilt", [0, 1])
def test_a_window_with_a_problem_takes_the_other_with_it(spoilt: int) -> None:
    a, b, c, d = windows(4)
    of_pairs = tracker()
    pair = [as_first(a), as_second(b, a)]
    pair[spoilt] = replace(pair[spoilt], problems=[Drop("loss_scale", "it has overflown")])
    assert of_pairs.update(pair[0], number=1) is None
    drop = of_pairs.update(pair[1], number=2)
    assert drop is not None
    assert drop.kind == "loss_scale"
    assert ("the window before it" in drop.reason) == (spoilt == 0)
    assert sum(of_pairs.reading().dropped.values()) == 1
    of_pairs.update(as_first(c), number=3)
    assert of_pairs.update(as_second(d, c), number=4) is None
    assert (of_pairs.windows, sum(of_pairs.reading().dropped.values())) == (1, 1)  # the other one is not dropped again


def test_a_verdict_rests_on_the_upper_end_alone() -> None:
    known = {"unit": "rows", "status": "resolved", "b_simple": 400.0, "low": 300.0, "high": 500.0, "reason": ""}
    sound, biased = judge_batch(32, **known), judge_batch(32, **known, is_biased=True)  # type: ignore[arg-type]
    assert (sound.kind, biased.kind) == ("too_small", "unknown")
    assert "biased" in biased.headline
    assert "so the true B_simple is probably smaller" in biased.detail
    assert "Accumulate over 2 or more micro-batches" in biased.detail
    assert judge_batch(4096, **known, is_biased=True).kind == "too_large"  # type: ignore[arg-type]
    assert judge_batch(300, **known, is_biased=True).kind == "about_right_or_too_large"  # type: ignore[arg-type]
    bound = known | {"status": "lower_bound", "b_simple": None, "high": math.inf}
    assert judge_batch(32, **bound, is_biased=True).kind == "unknown"  # type: ignore[arg-type]
