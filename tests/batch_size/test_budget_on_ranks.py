"""Ranks measure the same windows: one collective in each of them, none in the others, and never a hang."""

from __future__ import annotations

import contextlib
import math
from typing import Any

import pytest
import torch
import torch.distributed as dist

from sonde.batch_size.arrivals import Delivery
from tests.batch_size.ddp_loops import batches, wrap
from tests.batch_size.loops import Recording, attached, mean_loss
from tests.ranks import Ranks


def _n_collectives() -> int:
    return dist.group.WORLD._get_sequence_number_for_group()  # type: ignore[union-attr]


def _loop(
    n_windows: int,
    options: dict[str, Any] | None,
    *,
    n_micro: int = 1,
    clip: bool = True,
    hold_back: bool = False,
    state: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Train at fixed weights; the measured windows and the collectives of each window.

    Args:
        n_windows: how many.
        options: of the probe; None for no probe.
        n_micro: micro-batches of a window.
        clip: end windows by a clip.
        hold_back: let nothing arrive on the host, unless it is waited for.
        state: loaded first.
    """
    rank = dist.get_rank()
    _, model = wrap({})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    measured, issued = [], []
    sink = Recording()
    if options is not None:
        options = {"every": None, "sinks": [sink]} | options
    with attached(model, optimizer, **options) if options is not None else contextlib.nullcontext() as probe:
        if probe and state is not None:
            probe.load_state_dict(state)
        if hold_back:
            receive = Delivery.receive
            probe._delivery.receive = lambda *, wait: receive(probe._delivery, wait=True) if wait else None  # type: ignore
        for window in range(1, n_windows + 1):
            before = _n_collectives()
            if probe and probe._pace.is_measured:
                measured.append(window)
            data = batches(rank, n_micro, window)
            for i, (x, y) in enumerate(data):
                sync = contextlib.nullcontext() if i == len(data) - 1 else model.no_sync()
                with probe.piece(units=len(x)) if probe else contextlib.nullcontext(), sync:
                    mean_loss(model, x, y).backward()
            if probe:
                _ = probe.clip_grad_norm_(1.0) if clip else probe.step()
            optimizer.step()
            optimizer.zero_grad()
            issued.append(_n_collectives() - before)
        if probe is None:
            return {"measured": measured, "issued": issued}
        reading, alerts = probe.reading(), probe.alerts
        return {
            "measured": measured,
            "issued": issued,
            "reading": reading,
            "alerts": alerts,
            "tap": probe._reader.tap_name,
            "every": probe.cost().every,
            "state": probe.state_dict(),
            "records": sink.of_kind("reading"),
        }


def _with_and_without(n_windows: int, options: dict[str, Any], n_micro: int, clip: bool) -> tuple[Any, Any]:
    kind = {"n_micro": n_micro, "clip": clip}
    return _loop(n_windows, options, **kind), _loop(n_windows, None, **kind)


def assert_one_collective(on: dict[str, Any], off: dict[str, Any]) -> None:
    """DDP's own collectives are the same in all windows but the first two, after which it rebuilds its buckets."""
    for window, (n_on, n_off) in enumerate(zip(on["issued"], off["issued"], strict=True), start=1):
        if window > 2:
            assert n_on - n_off == (window in on["measured"]), window


@pytest.mark.parametrize(("tap", "n_micro", "clip"), [("leaf", 3, True), ("leaf", 1, False), ("comm_hook", 1, True)])
def test_one_collective_in_measured_windows_and_none_in_the_others(
    ranks2: Ranks, tap: str, n_micro: int, clip: bool
) -> None:
    results = ranks2(_with_and_without, 50, {"every": 5, "tap": tap}, n_micro, clip)
    for on, off in results:
        assert_one_collective(on, off)
        assert on["measured"] == results[0][0]["measured"]
        assert len(on["measured"]) in (10, 11)
        assert on["reading"].windows == len(on["measured"])
        assert on["alerts"] == {}
        assert on["tap"] == ("leaf hooks" if tap == "leaf" else "DDP's communication hook")


def _at_a_tiny_budget(hold_back_on: int | None) -> dict[str, Any]:
    hold_back = dist.get_rank() == hold_back_on
    return _loop(300, {"budget": 1e-7, "allowance": 0.0, "log_every": 20}, hold_back=hold_back)


@pytest.mark.parametrize("hold_back_on", [None, 0, 1])
def test_ranks_agree_on_a_budget_whenever_their_numbers_arrive(ranks2: Ranks, hold_back_on: int | None) -> None:
    """On one rank nothing arrives before it is waited for: that rank waits at the window where it has to decide."""
    results = ranks2(_at_a_tiny_budget, hold_back_on)
    assert results[0]["measured"] == results[1]["measured"]
    # Measuring costs far more than the budget, so the floor decides: 16 windows while the run doubles.
    assert 50 <= len(results[0]["measured"]) < 150
    assert results[0]["every"] == results[1]["every"]
    assert 8 <= results[0]["every"] <= int(300 * math.log(2) / 16)
    assert results[0]["alerts"] == {}


def _one_rank_loads_a_state() -> dict[str, Any]:
    state = _loop(40, {"every": 3})["state"]
    return _loop(60, {"every": 3}, state=state if dist.get_rank() == 0 else None)


def test_a_state_that_only_one_rank_loads_changes_no_choice(ranks2: Ranks) -> None:
    first, second = ranks2(_one_rank_loads_a_state)
    assert first["measured"] == second["measured"]
    assert len(first["measured"]) in (20, 21)
    assert first["alerts"] == second["alerts"] == {}


def _one_stops_reading_examples() -> tuple[list[int], list[bool]]:
    """Rank 0 finds that its model has changed, and reads no examples any more; the other goes on."""

    def refuses() -> None:
        raise ValueError("a layer was compiled")

    _, model = wrap({})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    measured, states = [], []
    with attached(model, optimizer, every=None, budget=0.02, allowance=0.0, per_example="always") as probe:
        mechanism = probe._mechanism
        assert mechanism.examples is not None
        for window in range(1, 301):
            if window == 6 and dist.get_rank() == 0:
                mechanism.examples.open = refuses  # type: ignore[method-assign]
            if probe._pace.is_measured:
                measured.append(window)
            data = batches(dist.get_rank(), 2, window)
            for i, (x, y) in enumerate(data):
                sync = contextlib.nullcontext() if i == len(data) - 1 else model.no_sync()
                with probe.piece(units=len(x)), sync:
                    mean_loss(model, x, y).backward()
            probe.step()
            optimizer.step()
            optimizer.zero_grad()
            states.append(mechanism.reads_examples)
    return measured, states


def test_a_rank_that_stops_reading_examples_alone_measures_the_same_windows(ranks2: Ranks) -> None:
    (measured, states), (of_other, other_states) = ranks2(_one_stops_reading_examples)
    assert measured == of_other
    assert len(measured) < 300
    assert states != other_states
