"""Optimizers are known by their class and the options that change their steps; what the study found of them is used."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import sonde
from sonde.batch_size.last_words import decision_of
from sonde.decision.facts import FROM_HERE_ON, RUN_LIKE_THIS
from sonde.decision.proxy import FACTORS, OF_BRANCHES, PUBLISHED
from sonde.parallel.unwrap import kind_of, settings_of
from sonde.runs.facts import facts_of_run
from tests.batch_size.loops import attached, batch, mean_loss

Optimizers = list[torch.optim.Optimizer]


def network() -> nn.Module:
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(12, 8), nn.Tanh(), nn.Linear(8, 3))


def sgd(model: nn.Module) -> Optimizers:
    return [torch.optim.SGD(model.parameters(), lr=0.01)]


def momentum(model: nn.Module) -> Optimizers:
    return [torch.optim.SGD(model.parameters(), lr=0.001, momentum=0.9, weight_decay=0.1, foreach=False)]


def adamw(model: nn.Module) -> Optimizers:
    return [torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), fused=True)]


def adam(model: nn.Module) -> Optimizers:
    return [torch.optim.Adam(model.parameters(), lr=1e-3)]


def muon(model: nn.Module) -> Optimizers:
    matrices = [p for p in model.parameters() if p.ndim == 2]
    others = [p for p in model.parameters() if p.ndim != 2]
    return [torch.optim.Muon(matrices, lr=1e-3), torch.optim.AdamW(others, lr=1e-3, betas=(0.8, 0.95))]


OF_STUDY = {
    "SGD (β = 0)": sgd,
    "SGD (β = 0.9)": momentum,
    "Adam or AdamW (β = 0.9)": adamw,
    "Muon (β = 0.95, nesterov)": muon,
}


def two_momenta(model: nn.Module) -> Optimizers:
    first, *rest = model.parameters()
    return [torch.optim.SGD([{"params": [first], "momentum": 0.5}, {"params": rest}], lr=0.01, momentum=0.9)]


def nesterov(model: nn.Module) -> Optimizers:
    return [torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, nesterov=True)]


def without_first_moment(model: nn.Module) -> Optimizers:
    return [torch.optim.AdamW(model.parameters(), betas=(0.0, 0.99), amsgrad=True)]


def adam_with_l2(model: nn.Module) -> Optimizers:
    return [torch.optim.Adam(model.parameters(), weight_decay=0.1)]


def inside_another(model: nn.Module) -> list[Any]:
    """As ZeroRedundancyOptimizer has it."""
    [inner] = adamw(model)
    return [SimpleNamespace(optim=inner, param_groups=inner.param_groups)]


def muon_and_sgd(model: nn.Module) -> Optimizers:
    return [muon(model)[0], torch.optim.SGD([p for p in model.parameters() if p.ndim != 2], lr=0.01)]


class AdamW8bit(torch.optim.AdamW):
    """Of the name of one whose moments are rounded to 8 bits."""


@pytest.mark.parametrize(
    ("make", "name"),
    [
        *((make, name) for name, make in OF_STUDY.items()),
        (adam, "Adam or AdamW (β = 0.9)"),
        (two_momenta, "SGD (β = 0.5) and SGD (β = 0.9)"),
        (nesterov, "SGD (β = 0.9, nesterov)"),
        (without_first_moment, "Adam or AdamW (β = 0, amsgrad)"),
        (adam_with_l2, "Adam (β = 0.9, L2)"),
        (inside_another, "Adam or AdamW (β = 0.9)"),
        (muon_and_sgd, "Muon (β = 0.95, nesterov) and SGD (β = 0)"),
        (lambda model: [AdamW8bit(model.parameters())], "AdamW8bit (β = 0.9)"),
        (lambda model: [torch.optim.Adagrad(model.parameters())], "Adagrad"),
        (lambda _: [], ""),
    ],
)
def test_the_kind_of_an_optimizer_has_the_options_that_change_its_steps(
    make: Callable[[nn.Module], Optimizers], name: str
) -> None:
    assert kind_of(make(network())) == name
    assert ((name, "euclidean") in FACTORS) == (name in OF_STUDY)


def test_settings_are_read_without_waiting_for_a_device() -> None:
    """The rate of a schedule is the one it starts from, and a rate in a tensor is read on the CPU alone."""
    first, second, third = (nn.Linear(2, 2) for _ in range(3))
    groups = [
        {"params": first.parameters(), "lr": torch.tensor(0.5)},
        {"params": second.parameters(), "lr": torch.tensor(0.5, device="meta"), "weight_decay": 0.0},
        {"params": third.parameters(), "lr": torch.tensor(0.5)},
    ]
    adamw = torch.optim.AdamW(groups, betas=(0.9, 0.99), foreach=False)  # type: ignore[arg-type]
    sgd = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1, momentum=0.9)
    torch.optim.lr_scheduler.LinearLR(sgd, start_factor=0.01)
    found = settings_of([adamw, sgd])
    betas = {"name": "AdamW", "betas": [0.9, 0.99], "eps": 1e-8}
    flag = {"decoupled_weight_decay": True} if "decoupled_weight_decay" in adamw.param_groups[0] else {}
    assert found == [
        {"lr": 0.5, "weight_decay": 0.01, **betas, **flag},
        {"weight_decay": 0.0, **betas, **flag},
        {"name": "SGD", "lr": 0.1, "momentum": 0.9, "weight_decay": 0.0},
    ]


def trained(
    folder: Path,
    make: Callable[[nn.Module], Optimizers],
    *,
    is_given: bool = True,
    betas: Callable[[int], float] | None = None,
) -> sonde.Decision:
    """The decision after 120 steps that are logged; `betas` says the β of each step."""
    generator = torch.Generator().manual_seed(0)
    optimizers = make(model := network())
    log = sonde.RunLog(sonde.JsonlSink(folder), every=60)
    with attached(model, optimizers if is_given else None, log=log) as probe:  # type: ignore[arg-type]
        for step in range(120):
            for _ in range(3):
                mean_loss(model, *batch(4, generator)).backward()
            for optimizer in optimizers:
                if betas is not None:
                    for group in optimizer.param_groups:
                        beta = betas(step)
                        group.update({"momentum": beta} if "momentum" in group else {"betas": (beta, 0.99)})
                optimizer.step()
            model.zero_grad()
        return decision_of(probe, probe.reading())


@pytest.mark.parametrize("kind", OF_STUDY)
def test_the_factor_of_the_optimizer_is_used(tmp_path: Path, kind: str) -> None:
    found = trained(tmp_path, OF_STUDY[kind])
    factors = {name: advice.scope.factor for name, advice in found.advice.items()}
    assert factors == {RUN_LIKE_THIS: FACTORS[kind, "euclidean"], FROM_HERE_ON: OF_BRANCHES[kind]}
    assert facts_of_run(sonde.read_run(tmp_path)).optimizer == found.facts.optimizer == kind


@pytest.mark.parametrize("make", [momentum, adamw])
def test_where_the_momentum_is_cycled_the_study_says_nothing(
    tmp_path: Path, make: Callable[[nn.Module], Optimizers]
) -> None:
    """As OneCycleLR does by default; here the last β is that at attach again."""
    found = trained(tmp_path, make, betas=lambda step: 0.85 if 50 <= step < 70 else 0.9)
    assert found.facts.optimizer == facts_of_run(sonde.read_run(tmp_path)).optimizer == ""
    assert {advice.scope.factor for advice in found.advice.values()} == {PUBLISHED}
    assert all(change.rates == () for change in found.changes)


def test_without_the_optimizer_the_published_runs_are_taken(tmp_path: Path) -> None:
    found = trained(tmp_path, adamw, is_given=False)
    assert {advice.scope.factor for advice in found.advice.values()} == {PUBLISHED}


def test_a_restart_remembers_that_the_momentum_was_cycled() -> None:
    optimizers = momentum(model := network())
    with attached(model, optimizers) as probe:
        optimizers[0].param_groups[0]["momentum"] = 0.5
        probe.reading()
        optimizers[0].param_groups[0]["momentum"] = 0.9
        state = probe.state_dict()
    with attached(model, optimizers) as probe:
        assert probe.reading().optimizer == "SGD (β = 0.9)"
        probe.load_state_dict(state)
        assert probe.reading().optimizer == ""
