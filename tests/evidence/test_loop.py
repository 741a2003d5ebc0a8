"""Branches in a loop: the critical batch is that of a closed form, and the training goes on as if nothing had been."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

import sonde
from sonde.evidence.stats.branched_batch import UnitsRatio, critical_batch
from sonde.evidence.stats.loss_curves import Curve, log_units_ratio
from tests.evidence.small_training import OPTIMIZERS, Training, X, Y, training


def branched(loop: Training, **options: Any) -> sonde.Branches:
    given: dict[str, Any] = {"batches": [8, 16, 32], "units": 96, "seeds": 2, "evaluations": 4, "verbose": False}
    of_seed = {"seed": loop.sampler.reseed} if "seed" not in options else {}
    return sonde.branch(loop.step, loop.state(), loss=loop.loss, **(given | of_seed | options))


# The critical batch.

DIM, UNITS, TOLERANCE = 300, 1024, 0.2
CURVATURES = torch.logspace(-1, 0, DIM, dtype=torch.float64)


def exact_curve(units: tuple[float, ...], batch: float, rate: float, noise: float, *, decay: bool) -> Curve:
    """The expected loss of a noisy quadratic, by the recursion of the second moment of each coordinate."""
    losses = []
    for at in units:
        squares, n_steps = torch.ones(DIM, dtype=torch.float64), round(at / batch)
        for n in range(n_steps):
            now = rate * (1 - n / n_steps) if decay else rate
            squares = (1 - now * CURVATURES) ** 2 * squares + now**2 * noise**2 / batch
        losses.append(0.5 * float(CURVATURES @ squares))
    return Curve(units, tuple(losses))


@pytest.mark.parametrize(
    ("noise", "rule", "decay"), [(2.0, "sqrt", False), (4.0, "sqrt", False), (4.0, "none", False), (4.0, "sqrt", True)]
)
def test_the_critical_batch_of_a_noisy_quadratic_is_found(noise: float, rule: Any, decay: bool) -> None:
    """The loss of 300 coordinates scatters by 5 to 15 % over a run; 4 seeds give the critical batch within 20 %."""
    weights = nn.Parameter(torch.ones(DIM, dtype=torch.float64))
    optimizer = torch.optim.SGD([weights], lr=0.02)

    def step(batch: int) -> None:
        optimizer.zero_grad()
        drawn = noise * torch.randn(DIM, dtype=torch.float64) / batch**0.5
        (0.5 * CURVATURES @ weights.square() + drawn @ weights).backward()
        optimizer.step()

    found = sonde.branch(
        step,
        {"model": nn.ParameterList([weights]), "optimizer": optimizer},
        loss=lambda: 0.5 * float(CURVATURES @ weights.detach().square()),
        batches=[4, 8, 16, 32],
        units=UNITS,
        seeds=4,
        rate_rule=rule,
        decay=decay,
        tolerance=TOLERANCE,
        verbose=False,
    )
    of_batch = {b.batch: b for b in found.branches}
    curves = [exact_curve(b.curve.units, b.batch, b.rate or 0.0, noise, decay=decay) for b in of_batch.values()]
    ratios = [math.exp(log_units_ratio(curve, curves[0]) or 0.0) for curve in curves[1:]]
    exact = critical_batch([UnitsRatio(b, (), r, r, r) for b, r in zip([8, 16, 32], ratios, strict=True)], 4, TOLERANCE)
    assert found.critical.status == exact.status == "resolved"
    assert found.critical.low < exact.ratio < found.critical.high  # type: ignore[operator]
    assert found.critical.ratio == pytest.approx(exact.ratio, rel=0.2)


# Nothing is changed.


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_training_goes_on_bit_for_bit(optimizer: str) -> None:
    ends = []
    for has_branches in (False, True):
        loop = training(optimizer)
        before = loop.everything()
        if has_branches:
            with torch.inference_mode():  # as where a loop evaluates
                branched(loop)
        assert loop.everything() == before
        for _ in range(3):
            loop.step(8)
        ends.append(loop.everything())
    assert ends[0] == ends[1]


def test_copies_may_lie_elsewhere() -> None:
    loop = training("AdamW")
    before = loop.everything()
    found = branched(loop, keep_on="cpu")
    assert loop.everything() == before
    assert found == branched(loop)


def test_an_optimizer_that_has_not_stepped_has_no_state_afterwards() -> None:
    loop = training("AdamW", n_steps=0)
    branched(loop)
    assert not loop.optimizer.state


def test_gradients_that_a_buffer_of_the_loop_holds_are_given_back() -> None:
    """DDP may keep `.grad` in memory of its own, which a backward overwrites."""
    loop = training()
    weight = loop.model[0].weight  # type: ignore[index]
    held, before = weight.grad, weight.grad.clone()
    step = loop.step

    def overwrites(batch: int) -> None:
        step(batch)
        held.fill_(7.0)

    loop.step = overwrites  # type: ignore[method-assign]
    branched(loop)
    assert weight.grad is held
    assert torch.equal(held, before)


def test_a_parameter_that_only_the_optimizer_has_is_given_back() -> None:
    """A temperature, for example, which is in no module."""
    loop, temperature = training("SGD"), torch.ones((), requires_grad=True)
    temperature.grad = gradient = torch.tensor(3.0)
    loop.optimizer.add_param_group({"params": [temperature]})

    def step(batch: int) -> None:
        rows = loop.sampler.take(batch)
        loop.optimizer.zero_grad()
        functional.cross_entropy(loop.model(X[rows]) * temperature, Y[rows]).backward()
        loop.optimizer.step()

    loop.step = step  # type: ignore[method-assign]
    branched(loop)
    assert temperature.item() == 1.0
    assert temperature.grad is gradient
    assert gradient.item() == 3.0


@pytest.mark.parametrize("error", [MemoryError, KeyboardInterrupt])
def test_an_error_gives_the_state_back_and_keeps_what_was_reported(error: type[BaseException]) -> None:
    loop = training()
    kept: list[sonde.Branches] = []
    before, step, n = loop.everything(), loop.step, 0

    def fails(batch: int) -> None:
        nonlocal n
        n += 1
        step(batch)
        if n == 40:
            raise error

    loop.step = fails  # type: ignore[method-assign]
    with pytest.raises(error):
        branched(loop, on_branch=kept.append)
    assert loop.everything() == before
    assert len(kept[-1].branches) >= 2


def test_ctrl_c_while_a_branch_gives_the_state_back() -> None:
    loop = training()
    before, load, n = loop.everything(), loop.sampler.load_state_dict, 0

    def interrupted(state: dict[str, Any]) -> None:
        nonlocal n
        n += 1
        if n == 6:
            raise KeyboardInterrupt
        load(state)

    loop.sampler.load_state_dict = interrupted  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        branched(loop)
    assert loop.everything() == before


def test_evaluations_do_not_reach_the_training() -> None:
    """More of them, and random draws in them, leave the end of each branch as it is."""
    ends = []
    for n in (2, 12):
        loop = training()
        quiet = loop.loss
        loop.loss = lambda quiet=quiet: quiet() + 0.0 * torch.rand(())  # type: ignore[method-assign, misc]
        ends.append([b.curve.losses[-1] for b in branched(loop, evaluations=n).branches])
    assert ends[0] == ends[1]


# What a branch does.


def test_the_first_branch_is_the_training_as_it_would_go_on() -> None:
    """At the checkpoint's rate, which the schedule does not change there."""
    [first, again, *_] = branched(training(), evaluations=12).branches
    alone = training()
    rate = alone.optimizer.param_groups[0]["lr"]
    alone.sampler.reseed(0)
    losses = [float(alone.loss())]
    alone.model.train()
    for _ in range(12):
        alone.optimizer.param_groups[0]["lr"] = rate
        alone.step(8)
        losses.append(float(alone.loss()))
        alone.model.train()
    assert first.curve == Curve(tuple(8.0 * k for k in range(13)), tuple(losses))
    assert (again.copy, again.curve) == (1, first.curve)


def test_what_is_planned_is_trained() -> None:
    found = branched(training(), batches=np.array([32, 16, 8]), reference=16, unit="rows")
    assert sonde.Branches.from_json(json.loads(json.dumps(found.as_json()))) == found
    asked = [(16, 0, 0), (16, 0, 1), (16, 1, 0), (8, 0, 0), (8, 1, 0), (32, 0, 0), (32, 1, 0)]
    assert [(b.batch, b.seed, b.copy) for b in found.branches] == asked
    rate = found.branches[0].rate
    assert rate
    assert [b.rate for b in found.branches[3::2]] == [rate / 2, rate * 2]  # linear, for SGD
    assert (found.unit, found.reference, found.rule) == ("rows", 16, "learning rate ∝ batch")
    assert {b.curve.units[-1] for b in found.branches} == {96.0}


def test_a_branch_that_diverges_ends_early() -> None:
    loop = training("SGD")
    found = branched(loop, rate_rule={16: 1.0, 32: 1e30}, seeds=1)
    last = found.branches[-1].curve
    assert not math.isfinite(last.losses[-1])
    assert last.units[-1] < 96
    assert last.has_diverged
    assert found.ratios[-1].n_diverged == 1


def test_default_seeds_are_of_all_generators() -> None:
    generator, weight = torch.Generator(), nn.Parameter(torch.zeros(4))
    optimizer = torch.optim.SGD([weight], lr=0.1)

    def step(batch: int) -> None:
        optimizer.zero_grad()
        ((weight - torch.randn(batch, 4, generator=generator)).square().sum() / batch).backward()
        optimizer.step()

    state = {"model": nn.ParameterList([weight]), "optimizer": optimizer, "draws": generator}
    before = generator.get_state()
    found = sonde.branch(
        step, state, loss=lambda: weight.detach().square().sum(), batches=[2, 4], units=16, verbose=False
    )
    assert torch.equal(generator.get_state(), before)
    assert len({b.curve for b in found.branches}) == 6  # 2 batches × 3 seeds, the first of them twice


def test_progress_is_told(capfd: pytest.CaptureFixture[str]) -> None:
    branched(training(), verbose=True, unit="rows")
    lines = capfd.readouterr().err.splitlines()
    assert len(lines) == 8
    assert lines[1].startswith("sonde: batch 8, seed 0, second run: held-out loss ")
    assert lines[1].endswith(" left)")
    assert "(2 of 7 branches, " in lines[1]
    assert lines[7].startswith("sonde: The critical batch size is ")
    assert "rows" in lines[7]


# Mistakes.


def test_a_step_that_ignores_its_batch_is_refused() -> None:
    loop = training()
    step = loop.step
    loop.step = lambda batch: step(8 * math.ceil(batch / 32))  # type: ignore[method-assign]
    before = loop.everything()
    with pytest.raises(ValueError, match=r"train_step\(8\) and train_step\(16\) do exactly the same"):
        branched(loop)
    assert loop.everything() == before


@pytest.mark.parametrize("n_weights", [1, 1000])
def test_steps_that_take_a_sign_are_no_mistake(n_weights: int) -> None:
    """Adam's first step has the same length for every batch, and moves a single weight to the same place."""
    weight = nn.Parameter(torch.ones(n_weights))
    optimizer = torch.optim.Adam([weight], lr=0.01, eps=0.0)

    def step(batch: int) -> None:
        optimizer.zero_grad()
        (weight - 0.1 * torch.randn(batch, n_weights)).square().mean().backward()
        optimizer.step()

    state = {"model": nn.ParameterList([weight]), "optimizer": optimizer}
    found = sonde.branch(
        step, state, loss=lambda: weight.detach().square().mean(), batches=[2, 4], units=16, verbose=False
    )
    assert len(found.branches) == 7


def test_a_seed_that_changes_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="another seed changes nothing"):
        branched(training(), seed=lambda k: None)


def test_a_step_that_changes_nothing_is_refused() -> None:
    loop = training()
    loop.optimizer.param_groups[0]["lr"] = 0.0
    with pytest.raises(ValueError, match="as it is when a warm-up begins"):
        branched(loop)


def test_a_state_that_misses_something_is_noticed() -> None:
    loop = training()
    state = {name: part for name, part in loop.state().items() if name != "dice"}
    with pytest.warns(UserWarning, match="the reference was trained twice.*state misses something"):
        sonde.branch(
            loop.step,
            state,
            loss=loop.loss,
            batches=[8, 16],
            units=96,
            seeds=2,
            seed=loop.sampler.reseed,
            verbose=False,
        )


def test_a_probe_that_is_attached_is_refused_and_may_come_back() -> None:
    readings = []
    for has_branches in (False, True):
        loop = training()
        loop.model.eval()  # examples have gradients of their own
        probe = sonde.attach(loop.model, loop.optimizer, unit="rows", every=1, verbose=False)
        loop.step(8)
        with pytest.raises(ValueError, match="keep its state_dict"):
            branched(loop)
        saved = probe.state_dict()
        probe.close()
        if has_branches:
            branched(loop)
        probe = sonde.attach(loop.model, loop.optimizer, unit="rows", every=1, verbose=False)
        probe.load_state_dict(saved)
        loop.step(8)
        readings.append(probe.reading())
        probe.close()
    assert readings[0].windows == 2  # and none of the branches
    assert readings[0] == readings[1]


def test_a_probe_of_another_model_does_not_matter() -> None:
    other = nn.Linear(2, 2)
    with sonde.attach(other, torch.optim.SGD(other.parameters(), lr=0.1), unit="rows", verbose=False) as probe:
        branched(training())
        assert probe.n_windows == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batches": [8]}, "two different sizes"),
        ({"batches": [8, 0.5]}, "batches must be whole numbers"),
        ({"batches": []}, "two different sizes"),
        ({"reference": 0}, "batches must be whole numbers"),
        ({"seeds": 0}, "seeds must be a whole number"),
        ({"evaluations": 0}, "evaluations must be a whole number"),
        ({"evaluations": 1}, "evaluations must be 2 or more"),
        ({"units": 63}, "enough for 2 steps of the largest batch, 32"),
        ({"tolerance": 0.0}, "tolerance must be positive"),
        ({"rate_rule": "square"}, r"sqrt, linear, none, sgd=N, sign=N, adam, or .* \{32: 1.4\}, got 'square'"),
        ({"rate_rule": 2}, "the rule of the rate must be sqrt, linear.* got 2"),
        ({"rate_rule": {16: 2.0}}, "positive multiple of the rate is needed for a batch of 32"),
    ],
)
def test_arguments_are_checked_before_anything_is_trained(options: dict[str, Any], message: str) -> None:
    loop = training()
    loop.step = pytest.fail  # type: ignore[method-assign, assignment]
    with pytest.raises(ValueError, match=message):
        branched(loop, **options)


def test_parts_that_cannot_be_saved_are_named() -> None:
    loop = training()
    with pytest.raises(ValueError, match=r"state\['rows'\] cannot be saved and restored, got list"):
        sonde.branch(loop.step, {"rows": [1]}, loss=loop.loss, batches=[8, 16], units=96)
    with pytest.raises(ValueError, match="state has no optimizer"):
        sonde.branch(loop.step, {"model": loop.model}, loss=loop.loss, batches=[8, 16], units=96)
