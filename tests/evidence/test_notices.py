from __future__ import annotations

import json
import math
import random
from dataclasses import replace

import pytest

from sonde.evidence.answer import verdict
from sonde.evidence.branches import Branch, Branches, Proxy
from sonde.evidence.notices import notices
from sonde.evidence.stats.loss_curves import Curve
from sonde.evidence.twins import noise_of


def curve(batch: float, seed: int = 1, noise: float = 1e-3, floor: float = 0.0) -> Curve:
    """A power law that the batch goes along 1 + B/50 times as slowly."""
    draw = random.Random(f"{batch} {seed}")
    units = tuple(float(50 * k) for k in range(41))
    return Curve(units, tuple(floor + (u / (1 + batch / 50) + 300) ** -0.5 + noise * draw.gauss(0, 1) for u in units))


def branches(*more: Branch, seeds: int = 3, noise: float = 1e-4) -> Branches:
    each = [Branch(b, s, None, curve(b, s, noise)) for b in (16, 32) for s in range(1, seeds + 1)]
    return Branches("rows", 16, 2000, 0.2, "a rule", (*each, *more))


def only(found: Branches) -> str:
    """The one sentence there is."""
    (sentence,) = notices(found)
    return sentence


def test_sound_branches_need_no_words() -> None:
    assert notices(branches()) == []


def test_failed_and_cut_off() -> None:
    failed = Branch(64, 1, None, Curve((), ()), "failed", "it ended with status 1: no memory")
    assert only(branches(failed)) == "Batch 64, seed 1 failed: it ended with status 1: no memory."


def test_a_checkpoints_loss_alone_is_no_curve() -> None:
    assert only(branches(Branch(64, 4, None, Curve((0, 2000), (300**-0.5, 0.03))))) == (
        "Batch 64, seed 4 has 2 of 3 losses that a comparison needs: evaluate more often."
    )


def test_placeholders_that_could_not_be_verified() -> None:
    assert only(replace(branches(), unverified={"eps": "with 1 the script failed: no"})) == (
        "Whether the script uses {eps} is not known: with 1 the script failed: no."
    )


def test_a_checkpoint_that_does_not_resume() -> None:
    first = Branch(16, 1, None, curve(16, 1, 1e-4))
    again = replace(first, curve=replace(first.curve, losses=tuple(1.01 * loss for loss in first.curve.losses)))
    noise = noise_of(first, again)
    # 1 % of a loss ∝ (u + 400)^-½, at about three quarters of 2,000 units, is 2 · (1 + 400/1500) % of the units.
    assert noise == pytest.approx(0.025, abs=0.003)
    said = only(replace(branches(), noise=noise))
    assert "are not the same bit for bit: they differ by 2.6\N{NO-BREAK SPACE}% of the units. The checkpoint" in said
    assert noise_of(first, first) == 0.0
    nan = replace(first, curve=Curve((0, 1, 2), (2.0, 1.0, math.nan)))
    assert noise_of(nan, replace(nan, curve=Curve((0, 1, 2), (2.0, 1.0, math.nan)))) == 0.0
    assert noise_of(first, nan) is None
    assert "are not the same bit for bit. The checkpoint" in only(replace(branches(), noise=None))


def test_diverged_branches() -> None:
    nan = Curve((0, 1000, 2000), (0.06, math.nan, 0.02))
    rises = Curve((0, 1000, 2000), (0.06, 0.07, 0.09))
    said = notices(branches(Branch(64, 1, None, nan), Branch(64, 2, None, rises)))
    assert said[0] == "Batch 64 diverged with 2 of 2 seeds: try a lower rate."
    said = notices(branches(Branch(16, 4, None, nan)))
    assert "diverged with 1 of 4 seeds, the reference, so these seeds show nothing" in said[0]


def test_slow_is_not_diverged() -> None:
    """Without the checkpoint's loss, a ratio above the reach of the first losses is not known."""
    slow = [Branch(1000, seed, None, curve(1000, seed, 1e-5)) for seed in (1, 2)]
    late = replace(
        branches(*slow),
        branches=tuple(
            replace(b, curve=Curve(b.curve.units[8:], b.curve.losses[8:])) for b in branches(*slow).branches
        ),
    )
    ratio = late.ratios[-1]
    assert (ratio.ratio, ratio.n_slow, ratio.n_diverged) == (math.inf, 2, 0)
    assert verdict(ratio, 0.2) == "too slow"
    nan = replace(slow[0], curve=Curve((0, 1000, 2000), (0.06, math.nan, 0.02)))
    assert verdict(branches(nan).ratios[-1], 0.2) == "diverged"
    # From a fourth of the units on, means of halves find no ratio above 2.
    half = [replace(b, curve=Curve(b.curve.units[12:], b.curve.losses[12:])) for b in branches(*slow).branches]
    assert replace(late, branches=tuple(half)).ratios[-1].ratio is None


def test_batches_that_never_come_near() -> None:
    far = [Branch(400, seed, None, curve(400, seed, 1e-5)) for seed in (1, 2, 3)]
    # A ninth over 1.32: the reference's loss after 15 % of the units.
    assert "the reference has the last loss of batch 400 (after 15" in only(branches(*far))


def test_a_loss_that_hardly_falls() -> None:
    flat = Branches("rows", 16, 2000, 0.2, "", (Branch(16, 1, None, curve(16, noise=0.02)),))
    assert notices(flat)[0].startswith("The reference's loss falls by 0.0336 in all, and scatters by 0.0186 ")
    constant = Branch(16, 1, None, Curve((0, 1, 2), (2.0, 2.0, 2.0)))
    assert notices(replace(flat, branches=(constant,)))[0].startswith("The reference's loss falls by 0 in all")
    rises = Branch(16, 1, None, Curve((0, 1, 2), (2.0, 2.1, 2.2)))
    for stuck in (constant, rises):
        pair = (stuck, replace(stuck, batch=32))
        assert replace(flat, branches=pair).critical.reason == "the reference's loss does not fall"


def test_too_few_seeds_and_how_many_would_do() -> None:
    assert "use 3 seeds or more" in branches(seeds=1).critical.reason
    said = only(branches(noise=4e-3))
    found = branches(noise=4e-3).ratios[0]
    assert found.high is not None
    assert found.ratio is not None
    times = math.log(found.high / found.ratio) / math.log(1.2)
    assert times > 1
    assert f"use about {math.ceil(3 * times**2)} seeds, or about {2000 * times:,.0f} rows" in said


def test_a_file_holds_all_of_it() -> None:
    nan = Branch(64, 1, 0.1, Curve((0, 1), (0.5, math.nan)), "failed", "why")
    found = replace(branches(nan), proxies=(Proxy("B_noise", "adam", 3.0, None, None),), unverified={"lr": "why"})
    text = json.dumps(found.as_json(), allow_nan=False)
    back = Branches.from_json(json.loads(text))
    assert back.branches[:-1] == found.branches[:-1]
    assert math.isnan(back.branches[-1].curve.losses[1])
    assert replace(back, branches=()) == replace(found, branches=())
    assert back.critical == found.critical
    with pytest.raises(ValueError, match="another version of sonde"):
        Branches.from_json({"schema": 0})


def test_a_shorter_window_is_that_of_shorter_branches() -> None:
    found = branches(noise=0.0).of_shorter(0.5)
    assert found.units == 1000
    assert {branch.curve.units[-1] for branch in found.branches} == {1000}
    assert found.ratios[0].ratio == pytest.approx((1 + 32 / 50) / (1 + 16 / 50), rel=2e-3)
