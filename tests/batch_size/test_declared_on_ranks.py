"""Ranks without data fill up with backwards outside `piece()`: they count on no rank once any rank declares its pieces.

Weights stay as they are, so one process holds the truth of every window.
"""

from __future__ import annotations

import contextlib
import functools
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch.distributed as dist

from tests.batch_size import norms_by_hand
from tests.batch_size.cut_loops import Piece, attached, gradient_of
from tests.batch_size.cut_models import last_window, n_collectives
from tests.batch_size.cuts import Cut, made
from tests.batch_size.set_ups import Loop, build, loss_of, tokens
from tests.ranks import Ranks

UNITS = 4.0
"""That each piece is said to have."""
NOT_ALL_DECLARED = "a rank had backwards outside piece(), each counted as a piece of units_per_piece"
UNKNOWN = "the number of units in a piece is not known"
CHANGED = "the gradient is not a multiple of the sum of its pieces"


@dataclass(frozen=True)
class Case:
    """A loop: how many pieces each rank has in each window, and which windows have no number."""

    plan: tuple[tuple[int, ...], ...]
    dropped: dict[int, str] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    readers: tuple[int, ...] | None = None
    """Ranks that wait for each window's numbers; all by default."""
    fills_last: bool = False
    sync: str = "last"
    """If "every" backward reduces, `.grad` of a rank that fills up holds the gradient of others."""
    forgetful: int | None = None
    """A rank that runs its pieces outside `piece()`."""


def run_window(cut: Cut, probe: Any, case: Case, window: int) -> None:
    """The backwards of one window, as many on each rank."""
    rank, most = cut.loop.data_rank, max(case.plan[window])
    own: list[int | None] = [*range(case.plan[window][rank])]
    fill: list[int | None] = [None] * (most - len(own))
    for i, piece in enumerate(own + fill if case.fills_last else fill + own):
        with cut.synchronised(i == most - 1):
            if piece is None:
                (0.0 * cut.loss(window, 0)).backward()
                continue
            with contextlib.nullcontext() if rank == case.forgetful else probe.piece(units=UNITS):
                cut.loss(window, piece).backward()


def windows_of(cut_by: str, cases: list[Case]) -> list[dict[str, Any]]:
    """Each window's numbers, and how many collectives its end took."""
    found = []
    for case in cases:
        cut = made(Loop(cut_by, sync=case.sync))
        result: dict[str, Any] = {"values": [], "collectives": set()}
        with attached(cut, None, **{"units_per_piece": None} | case.options) as probe:
            for window in range(len(case.plan)):
                run_window(cut, probe, case, window)
                before = n_collectives()
                probe.step()
                result["collectives"].add(n_collectives() - before)
                cut.model.zero_grad()
                if case.readers is None or dist.get_rank() in case.readers:
                    result["values"].append((last_window(probe) or [None])[0])
            result["dropped"] = dict(probe.reading().dropped)
        found.append(result)
    return found


@functools.cache
def truth(cut: str, counts: tuple[int, ...], window: int) -> tuple[float, float]:
    """tr Σ and |G|² of one process that holds the same pieces, in float64."""
    loop = Loop(cut)
    model = build(loop).double()
    every: list[Piece] = [
        (gradient_of(model, loss_of(loop, model, tokens(loop, rank, window, k))), 1.0, UNITS)
        for rank, n in enumerate(counts)
        for k in range(n)
    ]
    gradients, weights, units = zip(*every, strict=True)
    return norms_by_hand.window(gradients, weights, units, norms_by_hand.euclidean, 1 / len(counts))


def check(cut: str, case: Case, result: dict[str, Any]) -> None:
    assert result["collectives"] == {1}
    reasons = list(dict.fromkeys(case.dropped.values()))
    assert len(result["dropped"]) == len(reasons), result["dropped"]
    for reason, (message, n) in zip(reasons, result["dropped"].items(), strict=True):
        assert message.startswith(reason)
        assert n == list(case.dropped.values()).count(reason)
    for window, value in enumerate(result["values"]):
        if window in case.dropped:
            assert value is None, window
        else:
            expected = truth(cut, case.plan[window], window)
            # |G|² is a difference of numbers as large as tr Σ, so it may be much smaller than their rounding.
            assert value == pytest.approx(expected, rel=1e-5, abs=1e-6 * expected[0]), window


def cases_of(*plans: tuple[tuple[int, ...], ...], **more: Any) -> list[Case]:
    """Each plan with the number of units given to `piece()` only, and at attach too.

    With the first, all windows are right. With the second, the first window shows the ranks that pieces are declared.
    """
    first = {0: NOT_ALL_DECLARED}
    return [
        Case(plan, dropped, {"units_per_piece": units}, **more)
        for plan in plans
        for units, dropped in ((None, {}), (UNITS, first))
    ]


LATE = ((3, 0), (3, 0), (2, 2), (1, 3))
SHARED = ((2, 0), (2, 0), (2, 1), (1, 1))
CASES = {
    2: [
        *cases_of(((3, 0),) * 3, ((2, 0), (0, 2)) * 2, LATE, ((1, 3),) * 3),
        *cases_of(LATE, fills_last=True),
        *cases_of(((1, 3),) * 3, sync="every"),
        # No rank raises where its peers would wait: no number of units, or a rank that declares no pieces.
        Case(((2, 0),) * 3, dict.fromkeys(range(3), UNKNOWN), forgetful=0),
        Case(((2, 1),) * 3, dict.fromkeys(range(3), CHANGED), forgetful=1),
        Case(((2, 1),) * 3, {0: NOT_ALL_DECLARED, 1: CHANGED, 2: CHANGED}, {"units_per_piece": 4}, forgetful=1),
    ],
    3: cases_of(((0, 3, 0),) * 3, ((2, 0, 1),) * 3, ((3, 0, 0), (0, 0, 3), (0, 3, 0))),
    # Ranks that share a piece learn it together, by the first that they declare: else one would wait for the sum of a
    # piece that its peer ignores.
    4: [
        Case(SHARED, {}, {"units_per_piece": None}, readers=(0,)),
        Case(SHARED, dict.fromkeys(range(3), NOT_ALL_DECLARED), {"units_per_piece": UNITS}, readers=(0,)),
    ],
}


@pytest.mark.parametrize(
    ("cut", "n_ranks"), [("ddp", 2), ("fsdp", 2), ("ddp", 3), ("fsdp", 3), ("fsdp over sp", 4)], ids=str
)
def test_a_rank_without_pieces_fills_up(request: pytest.FixtureRequest, cut: str, n_ranks: int) -> None:
    cases = CASES[n_ranks]
    for results in request.getfixturevalue(f"ranks{n_ranks}")(windows_of, cut, cases):
        for case, result in zip(cases, results, strict=True):
            check(cut, case, result)


@pytest.mark.parametrize("cut", ["ddp", "fsdp"])
def test_ranks_that_learn_at_different_times_drop_the_windows_between(ranks2: Ranks, cut: str) -> None:
    """Rank 0 waits for each window's numbers, rank 1 has them a few windows later, and fills up until then."""
    plan = ((3, 0),) * 12
    case = Case(plan, {}, {"units_per_piece": UNITS}, readers=(0,))
    (first,), (second,) = ranks2(windows_of, cut, [case])
    n_dropped = first["values"].index(next(filter(None, first["values"])))
    assert 1 < n_dropped < 10
    check(cut, Case(plan, dict.fromkeys(range(n_dropped), NOT_ALL_DECLARED), case.options, readers=(0,)), first)
    assert second["dropped"] == first["dropped"]
