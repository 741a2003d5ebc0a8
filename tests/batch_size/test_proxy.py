"""What the study found of B_simple with this optimizer reaches the verdict, of a probe and of a log."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sonde.batch_size.stats.proxy import FACTORS, LAW_FITS_BETTER, kind_of, law_in_words, proxy_in_words
from sonde.runs.advice import looked_up
from torch import nn

import sonde
from sonde.runs.report.verdicts import verdict_panels
from sonde.runs.report.write import write_report
from sonde.wording import number
from tests.batch_size.loops import attached, batch, mean_loss
from tests.runs.report.visible_text import visible_text

Optimizers = list[torch.optim.Optimizer]
PUBLISHED = "which was 0.1 to 20 times B_simple in published runs (McCandlish et al. 2018"


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


@pytest.mark.parametrize(("kind", "metric"), FACTORS)
def test_the_study_is_quoted_for_its_own_optimizers_and_metrics(kind: str, metric: str) -> None:
    found, text = FACTORS[kind, metric], proxy_in_words("images", kind, metric)
    assert found.median is not None
    assert found.low < found.median < found.high <= 20 * found.low
    low, median, high = (number(end, 2) for end in (found.low, found.median, found.high))
    assert f"With {kind}, that was {low} to {high} times the run's average (median {median})" in text
    assert f"in 90 % of {found.n_trainings} trainings" in text
    assert (f"B_simple (metric {metric!r}) is" in text) == (metric != "euclidean")
    assert ("times B_simple now" in text) == (metric == "euclidean")  # branches were not measured in others


@pytest.mark.parametrize(
    ("kind", "metric"), [("", "euclidean"), ("Lion (β = 0.9)", "euclidean"), ("SGD (β = 0)", "adam")]
)
def test_others_have_the_published_runs_alone(kind: str, metric: str) -> None:
    text = proxy_in_words("images", kind, metric)
    assert PUBLISHED in text
    assert "study" not in text


def trained(
    folder: Path,
    make: Callable[[nn.Module], Optimizers],
    *,
    is_given: bool = True,
    betas: Callable[[int], float] | None = None,
) -> sonde.NoiseScaleReading:
    """The last reading of 120 steps that are logged; `betas` says the β of each step."""
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
        return probe.reading()


@pytest.mark.parametrize("kind", OF_STUDY)
def test_probe_and_log_say_the_same(tmp_path: Path, kind: str) -> None:
    verdict = trained(tmp_path, OF_STUDY[kind]).verdict
    assert verdict is not None
    assert verdict.kind != "unknown"
    assert verdict.detail.endswith(proxy_in_words("images", kind, "euclidean"))
    [panel] = verdict_panels(run := sonde.read_run(tmp_path))
    assert panel.detail == verdict.detail
    assert looked_up(run.readings[-1], run.probe("reading")) == (kind, "euclidean")


@pytest.mark.parametrize("make", [momentum, adamw])
def test_where_the_momentum_is_cycled_no_row_is_quoted(tmp_path: Path, make: Callable[[nn.Module], Optimizers]) -> None:
    """As OneCycleLR does by default; here the last β is that at attach again."""
    reading = trained(tmp_path, make, betas=lambda step: 0.85 if 50 <= step < 70 else 0.9)
    assert reading.verdict is not None
    assert (reading.optimizer, "B_crit is" in reading.verdict.headline) == ("", True)
    assert PUBLISHED in reading.verdict.detail
    assert "study" not in reading.verdict.detail
    [panel] = verdict_panels(sonde.read_run(tmp_path))
    assert panel.detail == reading.verdict.detail


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


def test_the_page_says_it_once_with_the_verdict(tmp_path: Path) -> None:
    trained(tmp_path, momentum)
    text = visible_text(write_report(tmp_path))
    said = proxy_in_words("rows", "SGD (β = 0.9)", "euclidean").replace(
        "B_simple", "B simple"
    )  # the page has an index there
    assert text.count(said) == 1
    assert law_in_words() in text
    assert "optimizer kind" not in text


def test_without_the_optimizer_the_published_runs_are_named_alone(tmp_path: Path) -> None:
    verdict = trained(tmp_path, adamw, is_given=False).verdict
    assert verdict is not None
    assert PUBLISHED in verdict.detail
    assert "study" not in verdict.detail


def test_the_law_is_that_of_most_cases() -> None:
    n, of = LAW_FITS_BETTER
    assert of / 2 < n <= of
    assert f"in {n} of {of} cases" in law_in_words()
