"""Norms that look wrong: the loop's own, a clip's coefficient, an update that spikes before the gradient."""

from __future__ import annotations

import math
import random

import pytest
import torch

from sonde.batch_size.stats.norm_watch import NormWatch, OwnNorm

N_RANKS = 4


def shards(generator: torch.Generator) -> list[torch.Tensor]:
    """The shards of a gradient, the first of which is the smallest."""
    return [(1.0 + rank) * torch.randn(50, generator=generator, dtype=torch.float64) for rank in range(N_RANKS)]


@pytest.mark.parametrize("fault", ["shard", "in bf16", "copies on all", "right", "only one rank takes it"])
def test_a_norm_of_something_else_is_told_from_a_right_one(fault: str) -> None:
    generator, watch, factors, found = torch.Generator().manual_seed(0), NormWatch(N_RANKS, N_RANKS), [], {}
    for window in range(20):
        parts = shards(generator)
        true = float(torch.cat(parts).norm())
        copies = 0.2 * true**2  # on each rank, of which one counts
        held = float(parts[0].square().sum()) + copies
        all_held = true**2 + N_RANKS * copies
        whole = (true**2 + copies) ** 0.5
        norm = {"shard": held**0.5, "in bf16": held**0.5, "copies on all": all_held**0.5}.get(fault, whole)
        factors.append(norm / whole)
        norm = float(torch.tensor(norm, dtype=torch.bfloat16)) if fault == "in bf16" else norm
        n = 1 if fault == "only one rank takes it" else N_RANKS
        # By the end, all is a hundredth as large, and the half of it that was partial has been summed.
        own = OwnNorm(norm, held, n, whole**2 / 2, all_held, partial=0.5 * whole**2 / 1e4, final=whole**2 / 1e4)
        found |= watch.add(window, own=own)
        assert not found or window >= 4  # a few windows are no pattern
    if fault in ("right", "only one rank takes it"):
        assert not found
        return
    assert f"your grad norm was {sorted(factors)[10]:.2f} of the true one in 20 of 20 windows" in found["own_norm"]
    cause = "counted on each of them" if fault == "copies on all" else "each rank sees its own shard of 4"
    assert cause in found["own_norm"]


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
