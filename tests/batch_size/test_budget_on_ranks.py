"""Ranks measure the same windows: one collective in each of them, none in the others, and never a hang."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch.distributed as dist

from sonde.batch_size.arrivals import Delivery
from tests.batch_size.cut_loops import attached, both, run_pieces
from tests.batch_size.cuts import made
from tests.batch_size.set_ups import Loop
from tests.ranks import Ranks

EVERY_FIFTH = {"every": 5}


@pytest.mark.parametrize(
    "loop",
    [
        Loop("ddp", windows=50, n_pieces=3, options=EVERY_FIFTH),
        Loop("ddp", windows=50, n_pieces=1, clips=False, options=EVERY_FIFTH),
    ],
    ids=["pieces", "no clip"],
)
def test_one_collective_in_measured_windows_and_none_in_the_others(ranks2: Ranks, loop: Loop) -> None:
    results = ranks2(both, loop, False)
    for probed, plain in results:
        measured = probed["measured"]
        assert measured == results[0][0]["measured"]
        assert probed["reading"].windows == sum(measured) in (10, 11)
        more = [a - b for a, b in zip(probed["collectives"], plain["collectives"], strict=True)]
        assert more[2:] == measured[2:]  # after the first two windows DDP has rebuilt its buckets
        assert probed["alerts"] == {}


def windows_of(
    n_windows: int, options: dict[str, Any], *, hold_back: bool = False, state: dict[str, Any] | None = None
) -> dict[str, Any]:
    """The measured windows, at fixed weights.

    Args:
        n_windows: how many.
        options: of the probe.
        hold_back: let nothing arrive on the host, unless it is waited for.
        state: loaded first.
    """
    cut, measured = made(Loop("ddp", n_pieces=1)), []
    with attached(cut, None, **{"every": None} | options) as probe:
        if state is not None:
            probe.load_state_dict(state)
        if hold_back:
            receive = Delivery.receive
            probe._delivery.receive = lambda *, wait: receive(probe._delivery, wait=True) if wait else None  # type: ignore
        for window in range(1, n_windows + 1):
            if probe._pace.is_measured:
                measured.append(window)
            run_pieces(cut, probe, window)
            probe.step()
            cut.model.zero_grad()
        found = {"measured": measured, "every": probe.cost().every, "state": probe.state_dict()}
        return found | {"alerts": dict(probe.alerts)}


def at_a_tiny_budget(hold_back_on: int) -> dict[str, Any]:
    return windows_of(300, {"budget": 1e-7, "allowance": 0.0}, hold_back=dist.get_rank() == hold_back_on)


@pytest.mark.parametrize("hold_back_on", [0, 1])
def test_ranks_agree_on_a_budget_whenever_their_numbers_arrive(ranks2: Ranks, hold_back_on: int) -> None:
    """On one rank nothing arrives before it is waited for: that rank waits at the window where it has to decide."""
    first, second = ranks2(at_a_tiny_budget, hold_back_on)
    assert first["measured"] == second["measured"]
    # Measuring costs far more than the budget, so the floor decides: 16 windows while the run doubles.
    assert 50 <= len(first["measured"]) < 150
    assert first["every"] == second["every"]
    assert 8 <= first["every"] <= int(300 * math.log(2) / 16)
    assert first["alerts"] == {}


def one_rank_loads_a_state() -> dict[str, Any]:
    state = windows_of(40, {"every": 3})["state"]
    return windows_of(60, {"every": 3}, state=state if dist.get_rank() == 0 else None)


def test_a_state_that_only_one_rank_loads_changes_no_choice(ranks2: Ranks) -> None:
    first, second = ranks2(one_rank_loads_a_state)
    assert first["measured"] == second["measured"]
    assert len(first["measured"]) in (20, 21)
    assert first["alerts"] == second["alerts"] == {}


def one_stops_reading_examples() -> tuple[list[int], list[bool]]:
    """Rank 0 finds that its model has changed, and reads no examples any more; the other goes on."""

    def refuses() -> None:
        raise ValueError("a layer was compiled")

    cut, measured, states = made(Loop("ddp", covered=True)), [], []
    options: dict[str, Any] = {"every": None, "budget": 0.02, "allowance": 0.0, "per_example": "always"}
    with attached(cut, None, **options) as probe:
        mechanism = probe._mechanism
        assert mechanism.examples is not None
        for window in range(1, 101):
            if window == 6 and dist.get_rank() == 0:
                mechanism.examples.open = refuses  # type: ignore[method-assign]
            if probe._pace.is_measured:
                measured.append(window)
            run_pieces(cut, probe, window)
            probe.step()
            cut.model.zero_grad()
            states.append(mechanism.reads_examples)
    return measured, states


def test_a_rank_that_stops_reading_examples_alone_measures_the_same_windows(ranks2: Ranks) -> None:
    (measured, states), (of_other, other_states) = ranks2(one_stops_reading_examples)
    assert measured == of_other
    assert len(measured) < 100
    assert states != other_states
