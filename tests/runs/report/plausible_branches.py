"""Branches from one checkpoint as `sonde branch` finds them: a loss that falls by a power of the units, and a law."""

from __future__ import annotations

import math
import random
from typing import Any

from sonde.evidence.branches import Branch, Branches, Proxy
from sonde.evidence.stats.loss_curves import Curve

UNITS, REFERENCE, CRITICAL = 20_000.0, 16.0, 200.0
"""By the law 1 + B/200, a batch needs a fifth more than one of 16 at 1.2 × 16 + 0.2 × 200 = 59.2."""
PROXIES = (
    Proxy("B_simple, now", "euclidean", 90.0, 140.0, 112.0),
    Proxy("B_simple, average", "euclidean", 40.0, 62.0, 50.0),
    Proxy("B_simple, now", "adam", 150.0, None, None),
    Proxy("B_simple, now", "sign", 0.0, 900.0, None),
    Proxy("B_noise", "euclidean", 160.0, 260.0, 205.0),
)


def curve_of(batch: float, seed: int, *, scatter: float = 1e-3) -> Curve:
    """The held-out loss of one branch."""
    noise = random.Random(f"{batch} {seed}")
    slower = (1 + batch / CRITICAL) / (1 + REFERENCE / CRITICAL) * math.exp(noise.gauss(0.0, 10 * scatter))
    units = tuple(UNITS * k / 20 for k in range(21))
    losses = tuple(2.0 + (1 + 4 * u / slower / UNITS) ** -0.5 + noise.gauss(0.0, scatter) * (u > 0) for u in units)
    return Curve(units, losses)


def diverged() -> Curve:
    """A branch whose loss rises and then is not finite."""
    return Curve((0.0, 1000.0, 2000.0, 3000.0), (3.0, 3.4, 5.0, math.nan))


def plausible_branches(
    batches: tuple[float, ...] = (16.0, 32.0, 64.0, 128.0), *, seeds: int = 3, **changed: Any
) -> Branches:
    """All branches, every one finished.

    Args:
        batches: sizes.
        seeds: of each.
        **changed: other fields of `Branches`.
    """
    branches = [
        Branch(batch, seed, 1e-3 * math.sqrt(batch / REFERENCE), curve_of(batch, seed))
        for batch in batches
        for seed in range(seeds)
    ]
    known: dict[str, Any] = {
        "unit": "sequences",
        "reference": REFERENCE,
        "units": UNITS,
        "tolerance": 0.2,
        "rule": "the rate grows by the square root of the batch size",
        "branches": tuple(branches),
        "proxies": PROXIES,
    }
    return Branches(**known | changed)
