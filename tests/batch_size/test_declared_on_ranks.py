"""Ranks without data fill up with backwards outside `piece()`: they count on no rank once any rank declares its pieces.

Weights stay as they are, so one process holds the truth of every window.
"""

from __future__ import annotations

import contextlib
import functools
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.batch_size.cut_models import n_collectives
from tests.batch_size.loops import attached, flat_grad, mean_loss
from tests.batch_size.sharded_loops import Loop, build, data_rank, loss_of, shard, tokens
from tests.batch_size.two_layers import clear, cut, filled_up, pieces_of, small
from tests.oracles import window_by_hand
from tests.ranks import Ranks

UNITS = 4  # of each piece, as `pieces_of` draws them
NOT_ALL_DECLARED = "a rank had backwards outside piece(), each counted as a piece of units_per_piece"
UNKNOWN = "the number of units in a piece is not known"
OUTSIDE = "a backward outside piece(), or in a piece that was interrupted, added to the gradients, and DDP's buckets"
CHANGED = "the gradient is not a multiple of the sum of its pieces"


@dataclass(frozen=True)
class Case:
    """A loop: how many pieces each rank has in each window, and which windows have no number."""

    plan: tuple[tuple[int, ...], ...]
    dropped: dict[int, str]
    options: dict[str, Any]
    readers: tuple[int, ...] | None = None
    """Ranks that wait for each window's numbers; all by default."""
    fills_last: bool = False
    reduces_each: bool = False
    """Every backward reduces, so that `.grad` of a rank that fills up holds the gradient of others."""
    forgetful: int | None = None
    """A rank that runs its pieces outside `piece()`."""

    @property
    def most(self) -> list[int]:
        return [max(counts) for counts in self.plan]


def run_window(probe: Any, model: Any, case: Case, window: int) -> None:
    """The backwards of one window, as many on each rank."""
    rank = dist.get_rank()
    own: list[Any] = pieces_of(rank, window, case.plan[window][rank])
    fill = [None] * (case.most[window] - len(own))
    every = own + fill if case.fills_last else fill + own
    for piece in filled_up(model, every, reduces_each=case.reduces_each):
        with contextlib.nullcontext() if rank == case.forgetful else probe.piece(units=UNITS):
            mean_loss(model, *piece).backward()


def _windows(setup: str, cases: list[Case]) -> list[dict[str, Any]]:
    """Each window's numbers, and how many collectives its end took."""
    found = []
    for case in cases:
        inner = small()
        model = cut(setup, inner)
        result: dict[str, Any] = {"values": [], "collectives": set()}
        with attached(model, **{"units_per_piece": None} | case.options) as probe:
            for window in range(len(case.plan)):
                run_window(probe, model, case, window)
                before = n_collectives()
                probe.step()
                result["collectives"].add(n_collectives() - before)
                clear(inner)
                if case.readers is None or dist.get_rank() in case.readers:
                    solved = probe.window()
                    result["values"].append(solved and (solved.total.trace_cov, solved.total.grad_sq))
            result["dropped"] = dict(probe.reading().dropped)
        found.append(result)
    return found


@functools.cache
def truth(counts: tuple[int, ...], window: int) -> tuple[float, float]:
    """tr Σ and |G|² of one process that holds the same pieces, in float64."""
    model = small().double()
    every = [piece for rank, n in enumerate(counts) for piece in pieces_of(rank, window, n)]
    gradients = [flat_grad(model, mean_loss(model, x.double(), y.double())) for x, y in every]
    return window_by_hand(
        gradients, [1.0] * len(every), [float(UNITS)] * len(every), torch.stack(gradients).sum(0) / len(counts)
    )


def check(case: Case, result: dict[str, Any]) -> None:
    assert result["collectives"] == {1}
    reasons = [reason for reason in dict.fromkeys(case.dropped.values()) if reason]
    assert len(result["dropped"]) == len(reasons), result["dropped"]
    for reason, (message, n) in zip(reasons, result["dropped"].items(), strict=True):
        assert message.startswith(reason)
        assert n == list(case.dropped.values()).count(reason)
    for window, value in enumerate(result["values"]):
        if window in case.dropped:
            assert value is None, window
        else:
            expected = truth(case.plan[window], window)
            # |G|² is a difference of numbers as large as tr Σ, so it may be much smaller than their rounding.
            assert value == pytest.approx(expected, rel=1e-5, abs=1e-7 * expected[0]), window


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


TWO = {
    "three and none": ((3, 0),) * 3,
    "two and none": ((2, 0),) * 6,
    "in turns": ((2, 0), (0, 2)) * 3,
    "none at first": ((3, 0), (3, 0), (2, 2), (1, 3)),
    "fewer": ((1, 3),) * 3,
}
THREE = {
    "one rank alone": ((0, 3, 0),) * 3,
    "as many pieces as ranks": ((2, 0, 1),) * 6,
    "in turns": ((3, 0, 0), (0, 0, 3), (0, 3, 0)) * 2,
}


@pytest.mark.parametrize("setup", ["DDP", "FSDP2"])
@pytest.mark.parametrize("n_ranks", [2, 3])
def test_a_rank_without_pieces_fills_up_from_the_first_window_on(
    request: pytest.FixtureRequest, setup: str, n_ranks: int
) -> None:
    cases = cases_of(*(TWO if n_ranks == 2 else THREE).values())
    if n_ranks == 2:
        cases += cases_of(TWO["none at first"], fills_last=True) + cases_of(TWO["fewer"], reduces_each=True)
    for results in request.getfixturevalue(f"ranks{n_ranks}")(_windows, setup, cases):
        for case, result in zip(cases, results, strict=True):
            check(case, result)


@pytest.mark.parametrize("setup", ["DDP", "FSDP2"])
def test_ranks_that_learn_at_different_times_drop_the_windows_between(ranks2: Ranks, setup: str) -> None:
    """Rank 0 waits for each window's numbers, rank 1 has them a few windows later, and fills up until then."""
    plan = ((3, 0),) * 12
    case = Case(plan, {}, {"units_per_piece": UNITS}, readers=(0,))
    (first,), (second,) = ranks2(_windows, setup, [case])
    n_dropped = first["values"].index(next(filter(None, first["values"])))
    assert 1 < n_dropped < 10
    late = Case(plan, dict.fromkeys(range(n_dropped), NOT_ALL_DECLARED), case.options, readers=(0,))
    check(late, first)
    assert second["dropped"] == first["dropped"]


def test_no_rank_raises_where_its_peers_would_wait(ranks2: Ranks) -> None:
    """No number of units, or a rank that declares no pieces while its backwards add to the gradient."""
    unknown = Case(((2, 0),) * 3, dict.fromkeys(range(3), UNKNOWN), {}, forgetful=0)
    forgetful = Case(((2, 1),) * 3, dict.fromkeys(range(3), CHANGED), {}, forgetful=1)
    known = Case(((2, 1),) * 3, {0: NOT_ALL_DECLARED, 1: CHANGED, 2: CHANGED}, {"units_per_piece": 4}, forgetful=1)
    in_buckets = [
        Case(((1, 0),) * 3, dict.fromkeys(range(3), OUTSIDE), {"tap": "comm_hook"}),
        Case(((1, 0),) * 3, {0: NOT_ALL_DECLARED, 1: OUTSIDE, 2: OUTSIDE}, {"tap": "comm_hook", "units_per_piece": 4}),
    ]
    for setup in ("DDP", "FSDP2"):
        cases = [unknown, forgetful, known, *(in_buckets if setup == "DDP" else [])]
        for results in ranks2(_windows, setup, cases):
            for case, result in zip(cases, results, strict=True):
                check(case, result)


SHARED = Loop(cut="fsdp+sp")
SHARED_PLAN = ((2, 0), (2, 0), (2, 1), (1, 1))
"""Pieces of the two ranks with data of their own in each window."""


def _shared(units_per_piece: int | None) -> tuple[list[Any], list[str], set[int]]:
    """Ranks that share a piece sum parts of its gradient; only one of them waits for each window's numbers."""
    model: Any = shard(build(SHARED), SHARED)
    rank, values, sums = data_rank(SHARED), [], set()
    with attached(model, unit="sequences", units_per_piece=units_per_piece, groups=None) as probe:
        for window, counts in enumerate(SHARED_PLAN):
            for k in range(2):
                model.set_requires_gradient_sync(k == 1)
                ids = tokens(rank, window, k)
                if k < 2 - counts[rank]:
                    (0.0 * loss_of(model, ids, SHARED)).backward()
                else:
                    with probe.piece(units=len(ids)):
                        loss_of(model, ids, SHARED).backward()
            before = n_collectives()
            probe.step()
            sums.add(n_collectives() - before)
            model.zero_grad()
            solved = probe.window() if dist.get_rank() == 0 else None
            values.append(solved and (solved.total.trace_cov, solved.total.grad_sq))
        return values, list(probe.reading().dropped), sums


def shared_truth(window: int) -> tuple[float, float]:
    model = build(SHARED).double()
    every = [tokens(r, window, k) for r, n in enumerate(SHARED_PLAN[window]) for k in range(2 - n, 2)]
    gradients = [flat_grad(model, loss_of(model, ids, SHARED)) for ids in every]
    final = torch.stack(gradients).sum(0) / 2
    return window_by_hand(gradients, [1.0] * len(every), [float(len(ids)) for ids in every], final)


@pytest.mark.parametrize("units_per_piece", [None, UNITS])
def test_ranks_that_share_pieces_learn_it_together(ranks4: Ranks, units_per_piece: int | None) -> None:
    """By the first piece that they declare: else one would wait for the sum of a piece that its peer ignores."""
    results = ranks4(_shared, units_per_piece)
    for window, value in enumerate(results[0][0]):
        if units_per_piece is None or window == 3:
            expected = shared_truth(window)
            assert value == pytest.approx(expected, rel=1e-5, abs=1e-6 * expected[0]), window
        else:
            assert value is None, window
    for _, dropped, sums in results:
        assert sums == {1}
        assert [reason.startswith(NOT_ALL_DECLARED) for reason in dropped] == (
            [] if units_per_piece is None else [True]
        )
