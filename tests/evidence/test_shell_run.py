from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from sonde.evidence.branches import Branch
from sonde.evidence.shell_plan import Asked
from sonde.evidence.shell_run import joined
from sonde.evidence.stats.loss_curves import Curve


def test_trainings_of_several_lengths_are_one_branch() -> None:
    asked = [Asked(16, 1, units, (), (), Path(f"{units}")) for units in (50.0, 100.0)]
    short = Branch(16, 1, None, Curve((0, 25, 50), (4.0, 3.5, 2.0)))
    long = Branch(16, 1, None, Curve((0, 50, 100), (4.0, 3.0, 1.0)))
    (one,) = joined(dict(zip(asked, (short, long), strict=True)))
    assert one == replace(long, curve=Curve((0, 50, 100), (4.0, 2.0, 1.0)))
    # If one of them has failed, the branch has.
    failed = replace(long, state="failed", message="no memory")
    assert joined(dict(zip(asked, (short, failed), strict=True))) == (failed,)
    # One length alone keeps all of its losses.
    assert joined({asked[0]: short}) == (short,)
    # A twin is no branch, and other seeds are branches of their own.
    assert joined({asked[0]: short, replace(asked[1], changed="lr"): long}) == (short,)
    other = replace(asked[1], seed=2)
    assert joined({asked[0]: short, other: replace(long, seed=2)}) == (short, replace(long, seed=2))
