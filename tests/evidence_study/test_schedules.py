"""Arms of the study of schedules differ in their batches only, and their losses are compared in units."""

from __future__ import annotations

import math
from typing import Any

import pytest
from evidence.schedule_answers import Case, cases, p_above
from evidence.schedule_figure import place, plots
from evidence.schedules import (
    MICRO,
    START,
    Setting,
    adaptive,
    batches_of,
    constant,
    doubling,
    grown,
    late_switch,
    of_steps,
    seesaw,
    staged,
    train,
)
from evidence.tasks import make_optimizers, perceptron, task
from evidence.training import Training
from evidence.work import Store

import sonde
from sonde.schedule.scaled_rate import usual_rule_of

MLP = Setting(task("mlp"), "adamw", units=4096)


@pytest.mark.parametrize("kind", ["sgd", "sgd-0.9", "adamw", "muon"])
def test_a_schedule_that_never_grows_is_the_constant_arm(kind: str) -> None:
    """The ordinary loop with a probe and the replicas share weights, data, rates and optimizers."""
    setting = Setting(task("mlp"), kind, units=160)
    batches, loss = adaptive(setting, 5, 1e-6)
    [[expected]] = train(setting, constant(setting, 8), [5])
    assert batches == [8] * 20
    assert loss == pytest.approx(expected, rel=1e-4)  # float32, summed in another order


@pytest.mark.parametrize("family", [doubling, late_switch])
def test_ramps_have_as_many_steps_as_asked_for(family: object) -> None:
    ramp = of_steps(family, 200, MLP.units)  # type: ignore[arg-type]
    batches = batches_of(staged(MLP, ramp, MLP.tuned), MLP.units)
    assert abs(len(batches) - 200) <= 1
    assert sum(batches) == MLP.units
    assert batches[:-1] == sorted(batches[:-1])
    assert batches[0] == 8


@pytest.mark.parametrize(("rule", "loss"), [("linear", math.inf), (None, 0.003)])
def test_a_training_that_diverges_by_the_linear_rule_converges_by_the_default(rule: Any, loss: float) -> None:
    """Of ten that the study ran with SGD on the regression. Its noise scale is soon read, at the end of the rise."""
    setting = Setting(task("regression"), "sgd", units=4096, offset=1.5)
    training = Training(setting.task.name, setting.kind, START, seed=1)
    optimizers = make_optimizers(setting.kind, training.model, 1.0)
    training.optimizers, done, group = optimizers, 0, optimizers[0].param_groups[0]
    at_rate_1 = group["lr"]
    options: dict[str, Any] = {"per_example": "never", "groups": None, "every": 1, "verbose": False}
    with sonde.attach(training.model, optimizers, unit=setting.task.unit, **options) as probe:
        schedule = sonde.BatchSchedule(probe, smallest=2, largest=16, ratio=1.0, rule=rule, verbose=False)
        schedule.scale_lr(optimizers[0])
        while done < setting.units:
            batch = min(schedule.micro_batches * MICRO, setting.units - done)
            group["lr"] = at_rate_1 * setting.tuned(START) * setting.decay(done, batch)
            training.step(batch, probe, n_pieces=batch // MICRO)
            done += batch
    assert schedule.last is not None
    assert schedule.last.state.micro_batches > 2
    assert (training.held_out() > 1e3) if loss == math.inf else training.held_out() == pytest.approx(loss, rel=0.5)


def test_seesaw_doubles_where_the_rate_would_halve() -> None:
    """After the rise of 2 %, the rate is at a half at 51 % of the units and at a quarter at 75.5 %."""
    plan = seesaw(MLP, 8)
    found = grown(batches_of(plan, MLP.units))
    assert found["16"] == pytest.approx(0.51 * 4096, abs=8)
    assert found["32"] == pytest.approx(0.755 * 4096, abs=16)
    assert plan(3000)[1] == pytest.approx(MLP.tuned(8) / 2**0.5)


@pytest.mark.parametrize("kind", ["sgd", "sgd-0.9"])
def test_rates_of_sgd_follow_the_batch_with_momentum_too(kind: str) -> None:
    """Seesaw keeps the rate where the batch doubles, and the usual rule is the linear one."""
    setting = Setting(task("mlp"), kind, 4096)
    plan = seesaw(setting, 8)
    assert plan(3000)[1] == plan(1000)[1]
    assert setting.usual(32) == 4 * setting.usual(8)
    assert usual_rule_of(make_optimizers(kind, perceptron(), 0.1)) == "linear"


def test_a_loss_that_was_there_at_half_of_the_units_is_half_of_them_lost() -> None:
    arms = {"constant 8": [1.0, 1.2], "half of the units": [1.1, 1.3], "adaptive": [1.1, 1.3], "Seesaw": [0.9, 1.1]}
    case = Case("mlp", "adamw", "1", {name: {"steps": 1, "losses": losses} for name, losses in arms.items()})
    assert case.lost("adaptive", "constant 8").mean == pytest.approx(0.5)
    assert case.lost("Seesaw", "constant 8").mean == pytest.approx(-1.0)
    assert case.lost("Seesaw", "adaptive").mean == pytest.approx(-3.0)  # four times the units


def test_one_training_that_fails_counts_as_an_eighth_of_its_units() -> None:
    arms = {"constant 8": [1.0] * 3, "half of the units": [1.1] * 3, "failed": [1.0, 1.0, None], "lucky": [1, 1, -9.0]}
    case = Case("mlp", "adamw", "1", {name: {"steps": 1, "losses": losses} for name, losses in arms.items()})
    lost = case.lost("failed", "constant 8")
    assert lost.values == (0.0, 0.0, 3.0)
    assert lost.mean == pytest.approx(0.5)  # one halving in the mean
    assert case.lost("lucky", "constant 8").mean == pytest.approx(-1.0)


def test_the_figure_has_a_row_for_each_case_and_an_interval_for_each_arm() -> None:
    """Of the committed results."""
    fewer, *lost = plots(Store())
    assert {*fewer.y_range.factors} == {place(case) for case in cases(Store())}
    assert [len(plot.renderers) for plot in (fewer, *lost)] == [2 + 2 * 2, 2 + 2 * 5, 2 + 2 * 5]  # after two lines


def test_p_values_count_signs() -> None:
    assert p_above([1.0, 2.0, 3.0]) == 1 / 8
    assert p_above([1.0, 2.0, -3.0]) == 5 / 8  # sums of 0 or more: +++, ++-, +-+, -++ and --+
