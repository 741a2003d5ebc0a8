"""The rate of an optimizer under a batch schedule, beside any schedule of the rate."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler as of_torch

import sonde
from sonde.decision.facts import FROM_HERE_ON, facts_of
from sonde.decision.rate import rate_factor
from sonde.schedule.batch_schedule import BatchSchedule
from sonde.schedule.scaled_rate import ScaledRate
from tests.runs.logged_windows import logged_windows
from tests.schedule.noisy_gradients import ROWS, Linear, attached, micro_batches, train
from tests.schedule.replays import now_from, replayed

OPTIONS: dict[str, Any] = {"smallest": 2, "largest": 8, "ratio": 50.0, "verbose": False, "pause": 0}
SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "from the last rate": lambda optimizer: of_torch.ExponentialLR(optimizer, 0.99),
    "a cosine": lambda optimizer: of_torch.CosineAnnealingLR(optimizer, 120),
    "a function of the step": lambda optimizer: of_torch.LambdaLR(optimizer, lambda k: min(1.0, k / 20)),
    "several in turn": lambda optimizer: of_torch.SequentialLR(
        optimizer,
        [of_torch.LinearLR(optimizer, 0.1, total_iters=30), of_torch.ExponentialLR(optimizer, 0.98)],
        milestones=[30],
    ),
}


def sgd(model: torch.nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=0.01)


@pytest.mark.parametrize("kind", SCHEDULERS)
def test_any_schedule_of_the_rate_composes(kind: str, tmp_path: Path) -> None:
    """The rate of each step is that of the schedule after as many rows, times the rule's factor: bit for bit by hand.

    The probe, whose filter heeds changes of the rate, logs the rates at which steps are taken.
    """
    model = Linear()
    optimizer = sgd(model)
    scheduler = SCHEDULERS[kind](optimizer)
    log = sonde.RunLog(str(tmp_path), log_windows=True)
    with attached(model, optimizer, log=log) as probe:
        schedule = BatchSchedule(probe, **OPTIONS, rule="linear")
        schedule.scale_lr(optimizer, scheduler)
        counts = train(model, optimizer, schedule, range(60), lambda window, pieces: schedule.step_lr(scheduler))
    assert set(counts) == {2, 4, 8}
    assert [group["lr"] for group in optimizer.param_groups] == scheduler.get_last_lr()

    by_hand, shown = Linear(), sgd(Linear())
    stepped, same = sgd(by_hand), SCHEDULERS[kind](shown)
    rates = []
    for window, n in enumerate(counts):
        for x in micro_batches(window, n):
            (by_hand(x).mean() / n).backward()
        rates.append(shown.param_groups[0]["lr"] * (n / 2))
        stepped.param_groups[0]["lr"] = rates[-1]
        stepped.step()
        stepped.zero_grad()
        shown.step()
        for _ in range(n // 2):  # smallest batches
            same.step()
    assert torch.equal(model.weight, by_hand.weight)
    logged = [window["metrics"]["gns/learning_rate"] for window in logged_windows(tmp_path)]
    assert logged == pytest.approx(rates, rel=1e-12)


@pytest.mark.parametrize("as_tensor", [False, True])
def test_what_a_failed_step_leaves(as_tensor: bool) -> None:
    """Between steps, and after one that raised, the optimizer has what it had; the tensor of a rate stays the same."""
    weight, n = torch.nn.Parameter(torch.ones(3)), 4
    rate = torch.tensor(0.25) if as_tensor else 0.25
    optimizer = torch.optim.AdamW([weight], lr=rate, capturable=False, foreach=not as_tensor)
    scaled = ScaledRate(optimizer, lambda: ("sqrt", n, 1))
    seen: list[float] = []

    def shown() -> float:
        return float(optimizer.param_groups[0]["lr"])

    def look(*_: Any) -> None:
        seen.append(shown())
        if len(seen) == 2:
            raise KeyboardInterrupt

    before = shown()
    optimizer.register_step_pre_hook(look)  # after the schedule's own
    for _ in range(3):
        weight.grad = torch.ones(3)
        try:
            optimizer.step()
        except KeyboardInterrupt:
            continue
        assert shown() == before
    assert seen == [0.5] * 3
    assert optimizer.param_groups[0]["lr"] is rate or not as_tensor
    n = 1
    optimizer.step()
    assert seen[-1] == before
    scaled.close()
    n = 4
    optimizer.step()
    assert seen[-1] == before


def test_groups_that_share_a_tensor_of_the_rate_are_scaled_once() -> None:
    model, taken = torch.nn.Linear(2, 2), list[list[float]]()
    rate = torch.tensor(1.0)
    groups = [{"params": [parameter]} for parameter in model.parameters()]
    optimizer = torch.optim.SGD(groups, lr=rate)
    place = iter([2, 4, 4, 2])
    now: Any = ["linear", 2, 2]
    scaled = ScaledRate(optimizer, lambda: tuple(now))
    optimizer.register_step_pre_hook(lambda *_: taken.append([float(group["lr"]) for group in optimizer.param_groups]))
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    for now[1] in place:
        optimizer.step()
        assert [float(group["lr"]) for group in optimizer.param_groups] == [1.0, 1.0]
    scaled.close()
    assert taken == [[factor, factor] for factor in (1.0, 2.0, 2.0, 1.0)]


def test_a_rate_that_rises_with_the_batch_is_no_warm_up() -> None:
    """The rate of the loop is constant. A verdict would wait for its end."""
    model = Linear()
    optimizer = sgd(model)
    with attached(model, optimizer) as probe:
        schedule = BatchSchedule(probe, **OPTIONS | {"pause": 8}, rule="linear")
        schedule.scale_lr(optimizer)
        counts = train(model, optimizer, schedule, range(60))
        assert (counts[0], counts[-1], schedule.rate_factor) == (2, 8, 4.0)
        reading = probe.reading()
        assert not reading.warms_up
        later = dataclasses.replace(reading, n_steps=200)  # when a batch is judged
        known = facts_of(**probe.known_of(later))
        assert list(known.scopes) == [FROM_HERE_ON]  # no other batch has had all of the run
        schedule.close()
        assert probe.reading().warms_up  # the same rates without a schedule


def test_a_rule_with_a_noise_scale_in_rows() -> None:
    """η'/η = (1 + 𝓑/B)/(1 + 𝓑/B'), in rows: 8 a window at first, 32 in the end."""
    model = Linear()
    optimizer = sgd(model)
    with attached(model, optimizer) as probe:
        schedule = BatchSchedule(probe, **OPTIONS, rule="sgd=40")
        schedule.scale_lr(optimizer)
        counts = train(model, optimizer, schedule, range(60))
        rates: list[float] = []
        optimizer.register_step_pre_hook(lambda *_: rates.append(optimizer.param_groups[0]["lr"]))
        optimizer.step()
    assert counts[-1] == 8
    assert rates == pytest.approx([0.01 * (1 + 40 / (2 * ROWS)) / (1 + 40 / (8 * ROWS))])


def test_the_usual_rate_of_sgd_is_capped_by_the_noise_scale(tmp_path: Path) -> None:
    """𝓑 is the lower end that made the batch grow. A replayed log gives the rates, and the log has them."""
    model = Linear()
    optimizer = sgd(model)
    rates: list[float] = []
    with attached(model, optimizer, log=str(tmp_path)) as probe:
        schedule = BatchSchedule(probe, **OPTIONS)
        schedule.scale_lr(optimizer)
        optimizer.register_step_pre_hook(lambda *_: rates.append(optimizer.param_groups[0]["lr"]))
        train(model, optimizer, schedule, range(61))
    logged = [own.metrics for own in sonde.read_run(tmp_path).own if "schedule/batch" in own.metrics]
    found = replayed(schedule.batch_rule, map(now_from, logged))
    expected = [
        1.0
        if (low := d.state.noise_scale) is None
        else rate_factor(f"sgd={low}", ROWS * d.state.micro_batches, 2 * ROWS)
        for d in found
    ]
    assert [metrics["schedule/rate_factor"] for metrics in logged] == pytest.approx(expected, rel=1e-12)
    assert rates[10::10] == pytest.approx([0.01 * factor for factor in expected], rel=1e-12)
    assert [d.state.noise_scale == d.now.b_simple_low for d in found if d.changed] == [True, True]
    assert 1.0 < expected[-1] < 4.0


def test_a_schedule_of_the_rate_that_counts_steps_is_refused() -> None:
    model = Linear()
    optimizer = sgd(model)
    scheduler = of_torch.ExponentialLR(optimizer, 0.99)
    with attached(model, optimizer) as probe:
        schedule = BatchSchedule(probe, **OPTIONS)
        with pytest.raises(
            ValueError, match=r"may count optimizer steps.*pass it as scale_lr\(optimizer, lr_scheduler\)"
        ):
            schedule.scale_lr(optimizer)
        schedule.scale_lr(optimizer, scheduler)
        with pytest.raises(ValueError, match=r"its end would move: .*call schedule.step_lr\(lr_scheduler\).*of rows"):
            train(model, optimizer, schedule, range(60), lambda window, pieces: scheduler.step())
        assert probe.n_windows == 10


def test_one_that_counts_epochs_is_stepped_by_the_loop() -> None:
    model = Linear()
    optimizer = sgd(model)
    scheduler = of_torch.StepLR(optimizer, 1, gamma=0.5)
    with attached(model, optimizer) as probe:
        schedule = BatchSchedule(probe, **OPTIONS)
        schedule.scale_lr(optimizer, scheduler)
        scheduler.load_state_dict(scheduler.state_dict() | {"last_epoch": 30})  # of a run that is resumed

        def after(window: int, pieces: Any) -> None:
            if window % 20 == 19:
                scheduler.step()

        counts = train(model, optimizer, schedule, range(60), after)
    assert counts[-1] == 8
    assert scheduler.get_last_lr() == [0.01 / 8]


def test_what_has_no_rate_is_refused_at_once() -> None:
    model = Linear()
    optimizer = torch.optim.AdamW(model.parameters())
    with attached(model, optimizer) as probe:
        schedule = BatchSchedule(probe, **OPTIONS)
        for other in (object(), torch.optim.SGD([{"params": model.parameters(), "lr": 0.1}])):
            getattr(other, "param_groups", [{}])[0].pop("lr", None)
            words = rf"an optimizer of torch, whose steps have hooks, .*, got {type(other).__name__}: pass on_change="
            with pytest.raises(ValueError, match=words):
                schedule.scale_lr(other)


def test_closed_it_leaves_the_optimizer_as_it_was() -> None:
    model = Linear()
    optimizer = sgd(model)
    with attached(model, optimizer) as probe:
        schedule = BatchSchedule(probe, **OPTIONS, rule="linear")
        schedule.scale_lr(optimizer)
        schedule.scale_lr(optimizer)  # does nothing
        assert len(optimizer._optimizer_step_pre_hooks) == 2  # the probe's and the schedule's
        train(model, optimizer, schedule, range(60))
        schedule.close()
        before = model.weight.detach().clone()
        model.weight.grad = torch.ones_like(model.weight)
        optimizer.step()
    torch.testing.assert_close(before - model.weight, torch.full_like(before, 0.01), rtol=1e-4, atol=0)
    assert not optimizer._optimizer_step_pre_hooks
    assert not optimizer._optimizer_step_post_hooks


def test_several_schedules_of_the_rate_are_stepped_together() -> None:
    """As of Muon and AdamW, which step one model together."""
    model = Linear()
    optimizer = sgd(model)
    schedulers = [of_torch.ExponentialLR(optimizer, gamma) for gamma in (0.99, 0.98)]
    with attached(model, optimizer) as probe:
        schedule = BatchSchedule(probe, **OPTIONS)
        schedule.scale_lr(optimizer, schedulers[0])
        counts = train(model, optimizer, schedule, range(60), lambda window, pieces: schedule.step_lr(*schedulers))
        assert counts[-1] == 8
        assert [each.last_epoch for each in schedulers] == [sum(counts) // 2] * 2
        with pytest.raises(ValueError, match=r"in one call, and the same in every call: schedule.step_lr\(first, sec"):
            schedule.step_lr(schedulers[0])
        with pytest.raises(ValueError, match="Step those that follow a loss, as ReduceLROnPlateau, by yourself"):
            schedule.step_lr(of_torch.ReduceLROnPlateau(optimizer))
