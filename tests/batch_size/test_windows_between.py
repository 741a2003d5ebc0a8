"""Windows that are not measured: nothing is read in them, and everything else goes on as in the others."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter

import sonde
from sonde import NoiseScaleProbe
from sonde.batch_size.pace import CostRow, WindowCosts
from tests.batch_size.loops import Recording, attached, batch, flat_grad, mean_loss, n_recent, small_model
from tests.oracles import window_by_hand


def windows(
    model: nn.Module,
    probe: NoiseScaleProbe,
    optimizer: torch.optim.Optimizer,
    n: int,
    *,
    first: int = 1,
    clip: float | None = None,
    declared: bool = True,
) -> Iterator[tuple[int, bool]]:
    """Windows of two pieces, with data that follow from the window's number: its number, and whether it is measured."""
    for number in range(first, first + n):
        is_measured = probe._pace.is_measured
        for x, y in pieces(number):
            if declared:
                with probe.piece(units=4):
                    mean_loss(model, x, y).backward()
            else:
                mean_loss(model, x, y).backward()
        if clip is None:
            probe.step()
        else:
            probe.clip_grad_norm_(clip)
        yield number, is_measured
        optimizer.step()
        optimizer.zero_grad()


def pieces(number: int) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(number)
    return [batch(4, generator) for _ in range(2)]


def at_fixed_weights(**options: Any) -> tuple[nn.Module, NoiseScaleProbe, torch.optim.Optimizer]:
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    return model, attached(model, optimizer, **options), optimizer


@pytest.mark.parametrize("declared", [True, False])
def test_the_numbers_are_those_of_the_measured_windows_alone(declared: bool) -> None:
    """tr Σ and |G|² of each measured window equal those of its whole gradients, whatever came between."""
    sink = Recording()
    log = sonde.RunLog([sink], every=5, log_windows=True)
    model, probe, optimizer = at_fixed_weights(every=4, log=log, units_per_piece=4)
    with probe:
        measured = [n for n, is_measured in windows(model, probe, optimizer, 60, declared=declared) if is_measured]
        reading, n = probe.reading(), n_recent(probe)
    by_number = {record["window"]: record["metrics"] for record in sink.of_kind("window")}
    assert list(by_number) == measured
    assert 15 <= len(measured) <= 16
    estimates = []
    for number in measured:
        gradients = [flat_grad(model, mean_loss(model, x, y)) for x, y in pieces(number)]
        estimates.append(window_by_hand(gradients, [1, 1], [4, 4], torch.stack(gradients).sum(0)))
        # fp32 gradients: a few 1e-7 of S and B, amplified by their difference.
        assert by_number[number]["gns/trace_cov"] == pytest.approx(estimates[-1][0], rel=1e-5)
        assert by_number[number]["gns/grad_sq"] == pytest.approx(
            estimates[-1][1], rel=1e-5, abs=1e-5 * estimates[-1][0]
        )
    assert n == len(measured)  # two blocks are not yet full
    assert reading.trace_cov == pytest.approx(sum(t for t, _ in estimates[-n:]) / n, rel=1e-5)
    assert (reading.windows, reading.dropped) == (len(measured), {})
    assert reading.every == pytest.approx(4.0, rel=0.2)  # at random places, over few windows
    assert f"{len(measured)} windows measured, one in {reading.every:.3g}" in str(reading)


def test_no_hook_is_left_in_windows_between() -> None:
    model, probe, optimizer = at_fixed_weights(every=4)
    seen = set()
    with probe:
        for number in range(1, 41):
            hooks = [p._backward_hooks for p in model.parameters()]
            seen.add(probe._pace.is_measured)
            if probe._pace.is_measured:
                assert all(len(h) == 1 for h in hooks), number  # type: ignore[arg-type]
            else:
                assert hooks == [None] * len(hooks), number
            list(windows(model, probe, optimizer, 1, first=number))
    assert seen == {True, False}


def test_hooks_of_the_user_stay_and_run_in_every_window() -> None:
    """Registered before attach, while windows are measured, and in a window between."""
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    calls = dict.fromkeys(("before", "measured", "between"), 0)
    weights: list[Tensor] = [model[0].weight, model[0].bias, model[3].weight]  # type: ignore[list-item]

    def count(name: str) -> Any:
        def hook(grad: Tensor) -> None:
            calls[name] += 1

        return hook

    handles = {"before": weights[0].register_hook(count("before"))}
    expected = dict.fromkeys(calls, 0)
    with attached(model, optimizer, every=3) as probe:
        for number in range(1, 31):
            if probe._pace.is_measured and number > 3 and "measured" not in handles:
                handles["measured"] = weights[1].register_hook(count("measured"))
            elif not probe._pace.is_measured and number > 6 and "between" not in handles:
                handles["between"] = weights[2].register_hook(count("between"))
            expected = {name: n + 2 * (name in handles) for name, n in expected.items()}
            list(windows(model, probe, optimizer, 1, first=number))
        n_windows = probe.reading().windows
    assert len(handles) == 3
    assert calls == expected
    assert min(calls.values()) > 20
    assert n_windows in (10, 11)
    for handle in handles.values():
        handle.remove()


def test_a_norm_that_is_not_finite_raises_in_every_window_and_the_window_has_ended() -> None:
    model, probe, _ = at_fixed_weights(every=4)
    with probe:
        for number in range(1, 13):
            model.zero_grad()
            for x, y in pieces(number):
                with probe.piece(units=4):
                    (mean_loss(model, x, y) * float("nan")).backward()
            with pytest.raises(RuntimeError, match="not finite"):
                probe.clip_grad_norm_(1.0, error_if_nonfinite=True)
            assert probe._ends.n_windows == number


# The log.


def test_the_log_counts_windows_of_training_and_keeps_scalars_of_all() -> None:
    sink = Recording()
    model, probe, optimizer = at_fixed_weights(every=4, sinks=[sink], log_every=10)
    measured = []
    with probe:
        for number in range(1, 100):
            if probe._pace.is_measured:
                measured.append(number)
            probe.log(step=float(number))
            list(windows(model, probe, optimizer, 1, first=number))
        probe.reading()
    readings = sink.of_kind("reading")
    # A reading is written at the first measured window from each multiple of 10 on; and one at the end.
    due = [next(n for n in measured if n // 10 >= k) for k in range(1, max(measured) // 10 + 1)]
    assert [r["window"] for r in readings][: len(due)] == list(dict.fromkeys(due))
    assert [r["metrics"]["run/units_seen"] for r in readings] == [8 * r["window"] for r in readings]
    # Each scalar is averaged over the windows up to the measured one, and then over measured windows.
    stretches = list(itertools.pairwise([0, *measured]))
    means = {b: (a + 1 + b) / 2 for a, b in stretches}
    since = 0
    for record in readings[: len(due)]:
        inside = [n for n in measured if since < n <= record["window"]]
        assert record["metrics"]["step"] == pytest.approx(sum(means[n] for n in inside) / len(inside), rel=1e-6)
        since = record["window"]
    # The last reading holds what the windows after the last measured one were given.
    assert readings[-1]["window"] == 99 > measured[-1]
    rest = [means[n] for n in measured if n > since] + [(measured[-1] + 100) / 2]
    assert readings[-1]["metrics"]["step"] == pytest.approx(sum(rest) / len(rest), rel=1e-6)
    assert {r["metrics"]["cost/every"] for r in readings} == {4}
    assert readings[-1]["metrics"]["cost/share"] > 0
    assert readings[-1]["metrics"]["cost/share_error"] > 0
    assert readings[-1]["metrics"]["cost/seconds_per_window"] > 0


def test_a_cost_above_the_budget_at_the_slowest_pace_raises_an_alert() -> None:
    """Even windows that are not measured cost a fifth of the time here."""
    sink = Recording()
    model, probe, optimizer = at_fixed_weights(every=None, budget=0.01, sinks=[sink], log_every=1)
    with probe:
        costs = WindowCosts(
            seconds=0.201, idle_seconds=0.2, idle_time=1.0, n_idle=999, measured_time=0.002, n_measured=1
        )
        probe._pace.every = 1000
        probe._pace._rows.extend(CostRow(number, 1000, costs) for number in range(20))
        list(windows(model, probe, optimizer, 1))
        cost = probe.cost()
        assert (cost.every, cost.budget) == (1000, 0.01)
        assert cost.share == pytest.approx(0.2, rel=0.1)
        list(windows(model, probe, optimizer, 1, first=2))
    [alert] = [record for record in sink.of_kind("alert") if record["name"] == "over_budget"]
    assert re.match(
        r"measuring takes (18|19|2\d)\s% .* even at one window in 1000\. .* raise budget=", alert["message"]
    )
    assert sink.of_kind("reading")[-1]["metrics"]["cost/share"] == pytest.approx(0.2, rel=0.1)


# What a loop does wrong, and what it does not.


def test_sound_loops_raise_no_alert() -> None:
    """Two optimizers with a part of the model each, gradients that rest by turns, evaluation in between."""
    model = small_model()
    halves = [torch.optim.SGD(part.parameters(), lr=1e-3) for part in (model[:3], model[3:])]
    with attached(model, every=4, log_every=1) as probe:
        for number in range(1, 121):
            frozen = model[4] if number % 2 else model[0]  # the parts are trained by turns
            frozen.requires_grad_(False)
            for x, y in pieces(number):
                with probe.piece(units=4):
                    mean_loss(model, x, y).backward()
            probe.step()
            for optimizer in halves:
                optimizer.step()
                with torch.no_grad():
                    model(x)
                optimizer.zero_grad()
            frozen.requires_grad_(True)
        probe.reading()
        assert probe.alerts == {}


# Compiled models.


def test_a_compiled_model_is_not_compiled_again_when_windows_change() -> None:
    torch._dynamo.reset()
    compiled = CompileCounter()
    model = small_model()
    fast = torch.compile(model, backend=compiled)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with attached(fast, optimizer, every=3) as probe:  # type: ignore[arg-type]
        list(windows(fast, probe, optimizer, 4))  # type: ignore[arg-type]
        list(windows(fast, probe, optimizer, 20, first=5))  # type: ignore[arg-type]
        assert compiled.frame_count == 1
        assert probe.reading().windows > 5
