"""Windows that end without a look at what was measured: as many are counted, and mistakes are still named."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
import torch

from sonde.batch_size.pace import REVIEW, Pace, WindowCosts
from sonde.batch_size.window_clock import ALWAYS
from sonde.batch_size.window_ends import WindowClip
from tests.batch_size.loops import attached, batch, contents_of, mean_loss, small_model, train
from tests.batch_size.paces import timed


def _chosen(pace: Pace, n_windows: int) -> list[tuple[bool, int]]:
    """Whether each window is measured, and N, while costs arrive some windows late."""
    rng = random.Random(1)
    chosen, late = [], []
    for window in range(n_windows):
        chosen.append((pace.is_measured, pace.every))
        was_measured, number = pace.is_measured, pace.windows + 1
        pace.window_ends()
        if was_measured:
            scale = 1e-2 * (1 + window / 1000)
            costs = timed(measured=scale * 0.1, idle=scale * 1e-4, window=scale, every=pace.every, rng=rng)
            late.append((window + rng.randint(0, 9), number, WindowCosts(**costs)))
        while late and late[0][0] <= window:
            _, arrived, costs_of = late.pop(0)
            pace.take(arrived, costs_of)
    return chosen


@pytest.mark.parametrize("options", [{"every": 2}, {"every": 16}, {"every": 1000}, {"budget": 0.01}, {"budget": 0.04}])
def test_quiet_windows_change_no_choice(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = _chosen(Pace(**options), 6000)
    monkeypatch.setattr(Pace, "n_quiet", property(lambda _: 0, lambda _, n: None), raising=False)
    assert chosen == _chosen(Pace(**options), 6000)
    assert len({every for _, every in chosen}) > 1 or "every" in options


def test_nothing_is_measured_or_decided_at_the_end_of_a_quiet_window() -> None:
    pace, n_quiet = Pace(every=100), 0
    for number in range(1, 5001):
        was_measured, is_quiet = pace.is_measured, pace.n_quiet > 0
        pace.window_ends()
        n_quiet += is_quiet
        assert not (is_quiet and (was_measured or pace.is_measured or number % REVIEW == 0))
    assert n_quiet > 0.9 * 5000


def test_mistakes_are_named_in_quiet_windows_too() -> None:
    model = small_model()
    with attached(model, every=10**6, units_per_piece=None) as probe:
        train(model, probe, windows=4)
        assert probe._pace.n_quiet
        for units, weight in (
            (0, 1.0),
            (-1, 1.0),
            (True, 1.0),
            (4, 0.0),
            (4, math.nan),
            ("4", 1.0),
            (4, math.inf),
            (10**400, 1),
        ):
            with pytest.raises((ValueError, TypeError)), probe.piece(units=units, weight=weight):  # type: ignore[arg-type]
                pass
        with pytest.raises(RuntimeError, match="units"), probe.piece():
            pass
        with pytest.raises(RuntimeError, match="inside another piece"), probe.piece(units=4), probe.piece(units=4):
            pass
        with pytest.raises(RuntimeError, match="inside a piece"), probe.piece(units=4):
            probe.step()
        with pytest.raises(KeyError), probe.piece(units=4):
            raise KeyError
        with probe.piece(units=4):  # the piece that failed is over
            pass
        probe.step()
        assert probe._ends.n_windows == 5


def test_quiet_windows_are_counted_and_paid_for() -> None:
    """Nothing else costs here: no clip, no step of an optimizer, and no forward is watched once pieces are declared."""
    model, generator = small_model(), torch.Generator().manual_seed(0)
    with attached(model, every=40) as probe:
        early = probe.piece(units=4)  # what passes between here and its use is the user's time
        for number in range(1, 201):
            for k in range(2):
                with early if k else probe.piece(units=4):
                    mean_loss(model, *batch(4, generator)).backward()
            probe.step()
            model.zero_grad()
            if number % 23 == 0:
                assert contents_of(probe)["windows"] == number
        assert 0 < probe._pieces.spent[ALWAYS] < 1
    assert 0 < sum(row.costs.n_idle for row in probe._pace._rows) < 200


class _TickingClock:
    """A clock that goes on by one tick whenever it is read."""

    TICK = 2.0**-20

    def __init__(self) -> None:
        self.n_reads = 0

    def perf_counter(self) -> float:
        self.n_reads += 1
        return self.n_reads * self.TICK

    def time(self) -> float:
        return 0.0


@pytest.mark.parametrize("clips", [False, True])
def test_calls_in_windows_that_are_not_measured_are_charged_with_the_way_into_them(
    monkeypatch: pytest.MonkeyPatch, clips: bool
) -> None:
    """Timed from outside by `python -m benchmarks.idle_calls`, they took 2.1 to 2.3 times what they see."""
    clock, clip = _TickingClock(), WindowClip.apply
    for module in ("pieces", "probe", "step_watch", "window_clock", "window_ends"):
        monkeypatch.setattr(f"sonde.batch_size.{module}.time", clock)

    def slow_clip(*args: Any) -> torch.Tensor:
        clock.n_reads += 100
        return clip(*args)

    monkeypatch.setattr(WindowClip, "apply", slow_clip)
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with attached(model, optimizer, every=1000) as probe:
        for n_windows in (REVIEW, REVIEW):  # the first of them are measured
            probe._ends.take_costs()
            for _ in range(n_windows):
                for _ in range(2):
                    with probe.piece(units=4):
                        mean_loss(model, *batch(4, torch.Generator())).backward()
                probe.clip_grad_norm_(1.0) if clips else probe.step()
                optimizer.step()
                optimizer.zero_grad()
        costs = probe._ends.take_costs()
    assert (costs.n_idle, costs.n_measured) == (REVIEW, 0)
    # One tick for `piece()` and for each end of a piece, one for the hook of the optimizer's step, and for `step()` or
    # around a clip, which is the user's own cost.
    assert costs.idle_seconds / REVIEW == pytest.approx(2.5 * (2 * 3 + 1 + (3 if clips else 1)) * clock.TICK, rel=0.1)


def test_a_clip_between_measured_windows_is_of_all_parameters_and_of_no_groups() -> None:
    model, generator = small_model(), torch.Generator().manual_seed(0)
    with attached(model, every=1000, groups="parameters") as probe:
        for number in range(20):
            if number == 10:  # not measured, but clipped
                model.register_parameter("late", torch.nn.Parameter(torch.ones(3)))
            with probe.piece(units=4):
                loss = mean_loss(model, *batch(4, generator))
                (loss if number < 10 else loss + 5 * model.late.sum()).backward()
            expected = torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
            torch.testing.assert_close(probe.clip_grad_norm_(1e-3), expected)
            model.zero_grad()
        assert probe._reader.final.plan.n_parts == 1


def ctrl_c() -> None:
    raise KeyboardInterrupt


class _InterruptingClock:
    """A clock that the user's Ctrl-C meets once."""

    def __init__(self, after: int) -> None:
        self.left = after

    def perf_counter(self) -> float:
        self.left -= 1
        if self.left == 0:
            ctrl_c()
        return 0.0


@pytest.mark.parametrize(("every", "after"), [(1, 1), (1, 3), (1, "the reader has begun"), (10**6, 1), (10**6, 3)])
def test_a_piece_that_is_interrupted_on_its_way_in_is_not_left_open(
    every: int, after: int | str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = small_model()
    with attached(model, every=every) as probe:
        train(model, probe, windows=4)
        with monkeypatch.context() as patched:
            if isinstance(after, str):
                begin = probe._reader.begin_piece
                patched.setattr(probe._reader, "begin_piece", lambda n: [begin(n), ctrl_c()])
            else:
                patched.setattr("sonde.batch_size.pieces.time", _InterruptingClock(after))
            with pytest.raises(KeyboardInterrupt), probe.piece(units=4):
                pytest.fail("the clock was read less often: interrupt earlier")
        train(model, probe)


def test_a_parameter_that_was_given_a_hook_and_frozen_in_quiet_windows_stops_nothing() -> None:
    model, seen = small_model(), list[float]()
    with attached(model, every=20) as probe:
        for number in range(60):
            if number == 25:  # between two measured windows
                first = next(model.parameters())
                first.register_hook(lambda grad: seen.append(float(grad.norm())))
                first.requires_grad_(False)
            train(model, probe, seed=number)
        assert "has changed" in probe.alerts["trained"]
        assert probe.reading().dropped == {}
        first.requires_grad_(True)
        mean_loss(model, *batch(4, torch.Generator())).backward()
    assert len(seen) == 1
    assert len(first._backward_hooks or {}) == 1  # the user's own
