"""Norms that look wrong: the loop's own, a clip's coefficient, an update that spikes before the gradient."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

import pytest
import torch

from sonde.batch_size.stats.norm_watch import NormWatch, OwnNorm

N_RANKS = 4


def shards(generator: torch.Generator) -> list[torch.Tensor]:
    """The shards of a gradient, the first of which is the smallest."""
    return [(1.0 + rank) * torch.randn(50, generator=generator, dtype=torch.float64) for rank in range(N_RANKS)]


def own_norm(norms: Sequence[float], clipped: Sequence[torch.Tensor], max_norm: float | None) -> OwnNorm:
    """As the ranks sum it."""
    limits = [1.0 if max_norm is None else min(max_norm / (n + 1e-6), 1.0) for n in norms]
    unclipped = sum(float(g.square().sum()) / c**2 for g, c in zip(clipped, limits, strict=True))
    return OwnNorm(norms[0], sum(n**2 for n in norms), unclipped)


@pytest.mark.parametrize("max_norm", [None, 0.5])
@pytest.mark.parametrize("fault", ["shard", "in bf16", "right", "loss scale", "noise after the clip"])
def test_a_norm_of_a_shard_is_told_from_a_right_one(fault: str, max_norm: float | None) -> None:
    generator, watch, factors, found = torch.Generator().manual_seed(0), NormWatch(N_RANKS), [], {}
    for window in range(20):
        parts = shards(generator)
        true = float(torch.cat(parts).norm())
        norms = [float(g.norm()) for g in parts]
        factors.append(norms[0] / true)
        if fault == "in bf16":
            norms = torch.tensor(norms, dtype=torch.bfloat16).tolist()
        elif fault != "shard":
            norms = [true * (65536.0 if fault == "loss scale" else 1.0)] * N_RANKS
        limits = [1.0 if max_norm is None else min(max_norm / (n + 1e-6), 1.0) for n in norms]
        clipped = [g * c for g, c in zip(parts, limits, strict=True)]
        if fault == "noise after the clip":
            clipped = [g + torch.randn(50, generator=generator, dtype=torch.float64) for g in clipped]
        # Where each rank clips by its own norm, the window is dropped: its average is not known.
        averaged = None if fault == "noise after the clip" or len(set(limits)) > 1 else true
        own = own_norm(norms, clipped, max_norm)
        found |= watch.add(window, own=own.norm, true=own.true_norm(averaged))
        assert not found or window >= 4  # a few windows are no pattern
    if fault in ("shard", "in bf16"):
        assert f"your grad norm was {sorted(factors)[10]:.2f} of the true one in 20 of 20 windows" in found["own_norm"]
        assert "its own shard of 4" in found["own_norm"]
    else:
        assert not found


def test_a_clip_that_sets_the_length_of_every_step() -> None:
    watch, found = NormWatch(), []
    for window in range(60):
        gradient = 5e7 if window >= 30 or window < 15 else 0.5  # 15 windows in a row are too few
        found += [window for _ in watch.add(window, gradient=gradient, max_norm=1.0)]
    assert found == list(range(49, 60))
    (message,) = dict(watch.add(60, gradient=5e7, max_norm=1.0)).values()
    assert "by 2.0 × 10⁻⁸ now" in message


CASES = {  # the sizes of gradients, updates and rates from window 40 on, over the usual ones; and whether it is a spike
    "spike": ([1.0], [8.0], [1.0], True),
    "the gradient follows": ([1.0, 8.0], [8.0, 8.0], [1.0, 1.0], True),
    "the gradient first": ([9.0, 1.0], [8.0, 8.0], [1.0, 1.0], False),
    "the rate": ([1.0], [8.0], [8.0], False),
    "small": ([1.0], [1.5], [1.0], False),
    "no step": ([1.0], [0.0], [1.0], False),
}


@pytest.mark.parametrize("case", CASES)
def test_a_spike_of_the_update_before_the_gradients(case: str) -> None:
    gradients, updates, rates, is_spike = CASES[case]
    rng, watch, found, before = random.Random(0), NormWatch(), [], None
    for window in range(1, 60):
        k = window - 40
        changed = (series[k] if 0 <= k < len(series) else 1.0 for series in (gradients, updates, rates))
        gradient, update, rate = (each * rng.lognormvariate(0.0, 0.1) for each in changed)
        found += dict(watch.add(window, gradient=gradient, update_before=before, rate=rate)).items()
        before = update
    assert [name for name, _ in found] == ["update_spike"] * is_spike
    if is_spike:
        assert "the step of window 40 moved the parameters" in found[0][1]


def test_too_few_steps_show_no_spike() -> None:
    watch = NormWatch()
    for window in range(1, 17):
        assert not list(watch.add(window, gradient=1.0, update_before=9.0 if window == 16 else 1.0))
    watch.begin_anew()
    assert not list(watch.add(17, gradient=1.0, update_before=9.0))


def test_steps_without_a_gradient_and_updates_that_are_not_finite_are_no_measure() -> None:
    """As where all advantages are 0, and momentum alone moves the parameters."""
    watch = NormWatch()
    for window in range(1, 90):
        update = math.nan if window % 7 == 0 else 1.0
        gradient = 0.0 if window % 3 else 1.0
        assert not list(watch.add(window, gradient=gradient, update_before=update, rate=0.1))
    assert not list(watch.add(90, gradient=1.0, update_before=1.0, rate=0.1))
    assert [name for name, _ in watch.add(91, gradient=1.0, update_before=9.0, rate=0.1)] == ["update_spike"]
