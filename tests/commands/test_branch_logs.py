"""The log of a script in a branch: it lies in the branch's folder, and has each loss at its own step."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import sonde
from sonde.commands.run import RunOptions, environment_of
from sonde.commands.run_script.settings import Settings
from sonde.evidence.shell_losses import LossSource, noise_scales, read_losses, unit_of


@pytest.fixture
def branch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a branch that this process is started for."""
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    monkeypatch.setenv("SONDE_BRANCH", str(tmp_path / "branch"))
    monkeypatch.setenv("SONDE_BRANCH_LOSS", "eval_loss")
    return tmp_path / "branch"


def train(
    n_steps: int = 12, before: dict[str, Any] | None = None, model: nn.Linear | None = None, **options: Any
) -> dict[str, Any]:
    """Trains, and logs a loss of 100 minus the step at every third one; the probe's state at the end."""
    model = model or nn.Linear(3, 1)
    with sonde.attach(model, unit="rows", verbose=False, **options) as probe:
        if before is not None:
            probe.load_state_dict(before)
        for step in range(n_steps):
            if step % 3 == 0:
                probe.log(eval_loss=torch.tensor(100.0 - step), rate=0.1)
            for _ in range(2):
                with probe.piece(units=4):
                    model(torch.randn(4, 3)).square().mean().backward()
            probe.step()
            with torch.no_grad():
                model.weight -= 0.01 * model.weight.grad
            model.zero_grad()
        return probe.state_dict()


@pytest.mark.parametrize(
    "log",
    [
        lambda: "runs/mine",
        lambda: None,
        lambda: sonde.JsonlSink("runs/mine"),
        lambda: sonde.RunLog(run="mine", every=5),
        lambda: sonde.RunLog(lambda metrics, step: None),
    ],
    ids=["folder", "none", "sink", "run log", "function"],
)
def test_every_log_goes_to_the_branch(log: Callable[[], Any], branch: Path) -> None:
    train(log=log())
    assert len(list(branch.rglob("records.jsonl"))) == 1
    assert not list(Path().rglob("records.jsonl"))
    losses = read_losses(branch, 8, LossSource())
    assert (losses.curve.units, losses.curve.losses) == ((0, 24, 48, 72), (100, 97, 94, 91))
    assert (losses.trained_batch, losses.problem, unit_of([branch])) == (8, "", "rows")


def test_losses_are_not_averaged_nor_late_where_few_windows_are_measured(branch: Path) -> None:
    train(40, log=sonde.RunLog("runs/mine", every=20), every=7)
    assert read_losses(branch, 8, LossSource()).curve.units == tuple(range(0, 320, 24))
    run = sonde.read_run(next(branch.rglob("records.jsonl")))
    assert run.readings[-1].window == 40
    assert [reading.window for reading in run.own] == [*range(0, 40, 3)]


def test_units_count_from_the_branchs_own_start(branch: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    before = train(30)
    monkeypatch.setenv("SONDE_BRANCH", str(tmp_path / "next"))
    train(12, before)
    assert read_losses(tmp_path / "next", 8, LossSource()).curve.units == (0, 24, 48, 72)


def test_a_log_that_is_in_the_branch_stays_where_it_is(branch: Path) -> None:
    train(log=branch / "here")
    assert [path.parent for path in branch.rglob("records.jsonl")] == [branch / "here"]


def test_sonde_run_in_a_branch(branch: Path) -> None:
    environment = environment_of(RunOptions(out=Path("runs/mine")), ["train.py"], {})
    assert Path(Settings.of_environment(environment).folder) == branch / "log" / "mine"


def test_without_a_branch_nothing_changes(branch: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SONDE_BRANCH")
    monkeypatch.delenv("SONDE_BRANCH_LOSS")
    train(log="runs/mine")
    train()
    assert [str(path) for path in Path().rglob("records.jsonl")] == ["runs/mine/records.jsonl"]
    assert sonde.read_run("runs/mine").own == ()


def test_training_is_the_same_bit_for_bit(branch: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    weights = []
    for _ in range(2):
        torch.manual_seed(0)
        train(model=(model := nn.Linear(3, 1)))
        weights.append(model.weight)
        monkeypatch.delenv("SONDE_BRANCH", raising=False)
        monkeypatch.delenv("SONDE_BRANCH_LOSS", raising=False)
    assert torch.equal(*weights)


def test_why_a_log_shows_no_loss(branch: Path) -> None:
    assert (
        "it has no sonde log: call sonde.attach and probe.log(val=…)"
        in read_losses(branch, 8, LossSource("val")).problem
    )
    train(log="runs/mine")
    said = read_losses(branch, 8, LossSource("val")).problem
    assert said.startswith("its log has no 'val': it has eval_loss, rate; call probe.log(val=…)")


def test_noise_scales_of_all_metrics_and_seeds(branch: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    folders = [tmp_path / name for name in ("one", "two")]
    ends = []
    for folder in folders:
        monkeypatch.setenv("SONDE_BRANCH", str(folder))
        train(60, metric=["euclidean", "sign"], every=1)
        ends.append(sonde.read_run(next(folder.rglob("records.jsonl"))).readings[-1].metrics)
    found = {(proxy.name, proxy.metric): proxy for proxy in noise_scales(folders)}
    for name, metric, key in (
        ("B_simple, now", "euclidean", "gns/b_simple"),
        ("B_simple, average", "euclidean", "gns/b_simple_average"),
        ("B_simple, average", "sign", "gns/sign/b_simple_average"),
    ):
        values, highs = ([end[k] for end in ends] for k in (key, f"{key}_high"))
        proxy = found[name, metric]
        if None not in highs and all(highs):
            assert proxy.high == pytest.approx((highs[0] * highs[1]) ** 0.5)  # type: ignore[operator]
        if None not in values and proxy.low:
            assert proxy.value == pytest.approx((values[0] * values[1]) ** 0.5)  # type: ignore[operator]
    assert found["B_simple, average", "euclidean"].value is not None


def test_a_measurement_beside_the_training(branch: Path) -> None:
    """Its noise scales are those at the start, and have names of their own."""
    torch.manual_seed(0)
    data = [(x, x.sum(1, keepdim=True) + 3 * torch.randn(2, 1)) for x in torch.randn(1000, 2, 3)]
    measured = sonde.measure(
        (model := nn.Linear(3, 1)),
        lambda model, batch: (model(batch[0]) - batch[1]).square().mean(),
        data,
        unit="rows",
        log=sonde.RunLog(Path("a/measured")),
        verbose=False,
    )
    train(log="runs/mine", model=model)
    assert len(list(branch.rglob("records.jsonl"))) == 2
    losses = read_losses(branch, 8, LossSource())
    assert (losses.curve.units, losses.trained_batch) == ((0, 24, 48, 72), 8)
    found = {proxy.name: proxy for proxy in noise_scales([branch])}
    assert found["B_simple"].value == pytest.approx(measured.reading.b_simple)
