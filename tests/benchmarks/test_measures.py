"""What benchmarks compare with is right: exact moments, the cost of a window, models that are cut over ranks."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from benchmarks.accuracy import exact_moments, population
from benchmarks.contestants import Plain
from benchmarks.gpt import TINY, build, sequences
from benchmarks.timing import cost
from benchmarks.training import Cut, Run, Setup, draw_windows

from benchmarks import device, scaling
from tests import oracles


# functorch has no batching rule for attention on the CPU, and says so.
@pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")
def test_the_exact_moments_are_those_of_the_oracle() -> None:
    model, tokens = build(TINY, torch.device("cpu")), population()[:32]
    double = build(TINY, torch.device("cpu")).double()
    expected = oracles.population(oracles.per_example_gradients(double, lambda loss, _: loss, tokens, tokens))
    exact = exact_moments(model.state_dict(), tokens)
    # Two ways to the same float64 gradients: they differ in the order of sums only.
    assert (exact.grad_sq, exact.trace_cov) == pytest.approx((expected.grad_sq, expected.trace_cov), rel=1e-10)


def test_the_cost_is_the_median_ratio_which_one_slow_block_does_not_move() -> None:
    blocks = [(1.0, 1.01)] * 20 + [(1.0, 9.0)]
    measured = cost([blocks, blocks], n_resamples=400)
    assert (measured.median, measured.high) == pytest.approx((0.01, 0.01))


def test_results_have_the_name_of_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    assert device.stem("norm", "cpu") == "norm_cpu"
    monkeypatch.setattr(device, "full_name", lambda _: "NVIDIA H100 80GB HBM3")
    assert device.stem("norm", "cuda") == "norm_nvidia_h100_80gb_hbm3"


class Differentiates(Plain):
    """Leaves the gradients of a window in place."""

    def step(self) -> None:
        pass


def gradients(setup: Setup) -> dict[str, torch.Tensor]:
    """Of the parameters of this rank's blocks, whole, after one window."""
    run = Run(setup)
    [window] = draw_windows(setup, sequences(setup.shape), 1, seed=1)
    run.train_window(Differentiates(run), window)
    held = {id(p) for p in run.wrapped.parameters()}
    named = {name: p for name, p in run.model.named_parameters() if name.startswith("blocks") and id(p) in held}
    grads: dict[str, Any] = {name: p.grad for name, p in named.items()}
    return {name: grad.full_tensor() if hasattr(grad, "full_tensor") else grad for name, grad in grads.items()}


@pytest.mark.parametrize("cut", ["DDP", *scaling.CUTS_OF_TWO, "HSDP"])
def test_a_model_that_is_cut_has_the_gradient_of_one_process(request: pytest.FixtureRequest, cut: Cut) -> None:
    shape = scaling.QUICK_SHAPES[28]
    setup = Setup(4 if cut == "HSDP" else 2, 1, micro_batches=2, sequences=2, shape=shape, cut=cut)
    alone = dataclasses.replace(setup, ranks=1, cut="DDP", micro_batches=2 * setup.data_ranks)
    expected = gradients(alone)
    found = request.getfixturevalue(f"ranks{setup.ranks}")(gradients, setup)
    assert set().union(*found) == set(expected)
    for name, grad in (each for grads in found for each in grads.items()):
        torch.testing.assert_close(grad, expected[name], rtol=1e-4, atol=1e-7, msg=lambda m, n=name: f"{n}: {m}")
