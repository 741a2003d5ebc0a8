"""How fast a pace follows costs that change, and how little it trusts accidents."""

from __future__ import annotations

import itertools
import random

from tests.batch_size.paces import feed, late, timed


def test_a_few_dear_windows_slow_the_pace_by_four_at_most() -> None:
    """At one window in 1,000, it would take thousands of windows to learn that they were an accident."""
    pace, rng = late(1), random.Random(5)
    chosen = []
    for i in range(80):
        idle = 1e-2 if 60 <= i < 64 else 1e-5
        feed(pace, timed(measured=0.005, idle=idle, window=0.03, every=pace.every, rng=rng))
        chosen.append(pace.every)
    steps = list(itertools.pairwise(chosen[chosen.index(next(n for n in chosen if n > 1)) :]))
    assert all(after <= 4 * before for before, after in steps)
    assert any(after > before for before, after in steps)


def test_windows_that_are_dearer_once_others_are_left_out_are_soon_rarer() -> None:
    """Caches are cold then, and each of them writes a reading. The first 64 were cheap, and are not asked for long."""
    pace, rng, n_sparse, chosen = late(1), random.Random(8), 0, []
    while n_sparse < 7:
        n_sparse += pace.every > 1
        chosen.append(pace.every)
        dear = 0.02 if pace.every > 1 else 0.008
        feed(pace, timed(measured=dear, idle=0.0, window=0.03, every=pace.every, rng=rng))
    first = next(n for n in chosen if n > 1)
    assert 20 < first < 50
    assert chosen[-1] > 1.6 * first
