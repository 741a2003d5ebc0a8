"""What the blocks of each page assume: a model, data, ranks. A page that assumes only `training` needs no scene."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import re
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import sonde
from tests import small_policy
from tests.docs_blocks import Block, Names, Page, pattern_of
from tests.new_process import Python
from tests.ranks import mesh_of
from tests.schedule import noisy_gradients

Scene = Callable[[Page], None]
SCENES: dict[str, Scene] = {}
"""By the name of the page."""
N_WINDOWS, N_MICRO, N_EACH = 150, 3, 4


def scene(page: str) -> Callable[[Scene], Scene]:
    """Declare the scene of a page."""

    def declare(function: Scene) -> Scene:
        SCENES[page] = function
        return function

    return declare


def training() -> Names:
    """A regression whose noise scale is 11 at its start, where it stays, and whose batch is 12: about right."""
    model = nn.Linear(4, 1)
    nn.init.zeros_(model.weight)
    nn.init.zeros_(model.bias)
    x = torch.randn(N_WINDOWS, N_MICRO, N_EACH, 5)
    return {
        "sonde": sonde,
        "torch": torch,
        "model": model,
        "optimizer": torch.optim.SGD(model.parameters(), lr=1e-5),
        "loader": [list(micro_batches) for micro_batches in x],
        "batches": list(x.flatten(1, 2)),
        "loss_of": loss_of,
    }


def loss_of(model: nn.Module, micro: Tensor) -> Tensor:
    """The model predicts the sum of the first and the last feature, of which it does not see the last."""
    return (model(micro[:, :-1]) - micro[:, :1] - micro[:, -1:]).square().mean()


def plain(page: Page) -> None:
    """Each block trains anew."""
    while page.left:
        names = training()
        page.run(names)
        if "probe" in names:
            names["probe"].close()


def a_run(folder: str, n_windows: int = N_WINDOWS) -> sonde.Run:
    """The log that a block has left."""
    run = sonde.read_run(folder)
    assert run.readings[-1].window == n_windows
    assert run.readings[-1].metrics["gns/units_per_window"] == N_MICRO * N_EACH
    return run


@scene("README.md")
def readme(page: Page) -> None:
    while page.left:
        Path("runs/my-run/records.jsonl").unlink(missing_ok=True)
        names = training()
        page.run(names)
        names["probe"].close()
        assert a_run("runs/my-run").header.unit == "sequences"


@scene("getting-started.md")
def getting_started(page: Page) -> None:
    for folder in ("plain", "one-batch"):
        names = training()
        page.run(names)
        names["probe"].close()
        a_run(f"runs/{folder}")
    for folder in ("ddp", "fsdp2"):
        page.run_on_ranks(on_a_rank)
        run = sonde.read_run(f"runs/{folder}")
        assert run.header.setup["ranks"] == 2
        assert run.readings[-1].metrics["gns/units_per_window"] == 2 * N_MICRO * N_EACH


def on_a_rank(blocks: list[Block], folder: str) -> None:
    """The same model on each rank, with data of the rank's own."""
    os.chdir(folder)
    names = training()
    generator = torch.Generator().manual_seed(dist.get_rank())
    names["rank_batches"] = list(torch.randn(15, N_MICRO * N_EACH, 5, generator=generator))
    names["model"] = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    for block in blocks:
        block.run(names)


# The questions.


@scene("grad-norm-too-small.md")
def grad_norm_too_small(page: Page) -> None:
    Path("norms.py").write_text(page.left.pop(0).code)
    path = {"PATH": os.environ["PATH"], "PYTHONPATH": str(Path(sonde.__file__).parents[1]), "OMP_NUM_THREADS": "1"}
    command = ("-m", "sonde", "run", "--nproc", "4", "--no-report", "--", "norms.py")
    with Python(*command, folder=Path.cwd(), environment=path) as process:
        ended = process.wait()
    (claim,) = re.findall(r"^    (sonde: your grad norm.*)$", page.path.read_text(), flags=re.M)
    assert len(re.findall(pattern_of(claim), ended.err)) == 2, ended.err


@scene("batch-size.md")
def batch_size(page: Page) -> None:
    names = training()
    page.run(names)  # one line
    names["probe"].close()
    page.run(names)  # pieces in two units
    reading = names["probe"].reading()
    assert reading.units_per_window == N_MICRO * N_EACH
    assert reading.in_unit("tokens").units_per_window == 512 * N_MICRO * N_EACH
    names["probe"].close()

    names["optimizer"] = torch.optim.Adam(names["model"].parameters(), lr=1e-4)
    train(names, None, 1)  # Adam's metric needs a step's second moment
    page.run(names)  # several metrics
    train(names, names["probe"], 30)
    assert names["probe"].reading(metric="adam").windows > 20
    names["probe"].close()

    reinforced = reinforcement() | {"log": sonde.RunLog(sonde.JsonlSink("runs/policy"))}
    page.run(reinforced)  # the noise scale in prompts
    assert reinforced["reading"].windows == 1
    reinforced["policy_log"].end("measured")


@scene("checkpoint.md")
def checkpoint(page: Page) -> None:
    at_checkpoint = images()
    page.run(at_checkpoint)
    assert at_checkpoint["measurement"].reading.units_per_window == 512  # the batch to judge
    assert "GroupReading(status='resolved'" in page.printed


@scene("batch-schedule.md")
def batch_schedule(page: Page) -> None:
    """Gradients are rows of a noise scale of 160 rows, so that the batch grows from 8."""
    model = noisy_gradients.Linear()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    names: Names = {"sonde": sonde, "model": model, "optimizer": optimizer}
    names |= {"draw": lambda: noisy_gradients.MEAN / 2 + torch.randn(4, noisy_gradients.DIMS)}
    names |= {"loss_of": lambda model, rows: model(rows).mean(), "probe": noisy_gradients.attached(model, optimizer)}
    names["lr_scheduler"] = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 800)
    page.run(names)
    schedule = names["schedule"]
    assert schedule.last is not None
    assert schedule.micro_batches > 2
    assert names["lr_scheduler"].last_epoch > 200
    names["probe"].close()


@scene("single-examples.md")
def single_examples(page: Page) -> None:
    names = training() | {"model": nn.Linear(4, 1), "loss": loss_of, "batch": torch.randn(6, 5)}
    page.run(names)
    assert names["squares"].sq_norms.shape == (2, 6)
    assert names["squares"].not_covered() == {}


def train(names: Names, probe: sonde.NoiseScaleProbe | None, n: int) -> None:
    """n windows of the loop, with a probe whose pieces are declared or with none."""
    for micro_batches in names["loader"][:n]:
        for micro in micro_batches:
            with probe.piece(units=len(micro)) if probe else contextlib.nullcontext():
                loss_of(names["model"], micro).backward()
        names["optimizer"].step()
        names["optimizer"].zero_grad()


def images() -> Names:
    """A model with a body and a head, and a data set large enough for an interval of ± 10 %."""
    body = nn.Sequential(nn.Linear(5, 8), nn.Tanh())
    model = nn.Sequential()
    model.add_module("body", body)
    model.add_module("head", nn.Linear(8, 1))
    x = torch.randn(3000, 4, 5)
    return {
        "sonde": sonde,
        "model": model,
        "loss_of": nn.functional.mse_loss,
        "loader": [{"x": one, "y": one[:, :1] + torch.randn(4, 1)} for one in x],
    }


@scene("gradient-norm.md")
def gradient_norm(page: Page) -> None:
    names = training()
    loss_of(names["model"], names["batches"][0]).backward()
    before = names["model"].bias.grad.clone()
    page.run(names)  # in place of torch's
    assert names["norm"] > 0
    torch.testing.assert_close(names["model"].bias.grad, before / max(1.0, float(names["norm"])))
    page.run_on_ranks(with_stages, 2)


def with_stages(blocks: list[Block], folder: str) -> None:
    """The page plans for 64 GPUs in 2 pipeline stages; here are 2 processes, a stage each."""
    plan, by_group = blocks
    code = plan.code.replace('"cuda", (2, 4, 8)', '"cpu", (2, 1, 1)')
    assert code != plan.code
    stage = nn.Linear(5, 1 + dist.get_rank())
    stage(torch.randn(4, 5)).square().mean().backward()
    names: Names = {"sonde": sonde, "model": stage, "loader": [1]}
    names["optimizer"] = torch.optim.SGD(stage.parameters(), lr=0.1)
    dataclasses.replace(plan, code=code).run(names)
    assert names["norm"] > 0
    names |= {"model": nn.Linear(4, 1), "mesh": mesh_of((2,))}
    names["model"](torch.ones(1, 4)).sum().backward()
    by_group.run(names)
    assert names["by_group"].keys() == {"weight", "bias"}
    assert float(names["norm"]) == pytest.approx(5**0.5)


# A policy.


def reinforcement() -> Names:
    """A policy about to take a step, and responses that it sampled."""
    model = small_policy.policy()
    return {
        "sonde": sonde,
        "torch": torch,
        "model": model,
        "optimizer": small_policy.optimizer_of(model),
        "rollouts": small_policy.drawn(model, 0, 8, seed=1),
        "evaluation": small_policy.drawn(model, 0, 16, seed=1),
        "update": small_policy.drawn(model, 200, 8, seed=2),
        "sample_fresh_responses": lambda model: small_policy.sample(model, list(range(300, 312))),
        "step": 1,
    }


@scene("policy-entropy.md")
def policy_entropy(page: Page) -> None:
    names = reinforcement()
    page.run(names)
    assert 0 < names["entropy"].token_weighted < math.log(small_policy.N_TOKENS)


@scene("entropy-change.md")
def entropy_change(page: Page) -> None:
    page.run(of_trl)
    names = reinforcement()
    names["loss"] = small_policy.loss(names["model"], names["update"])
    page.run(names)  # a forecast
    assert names["forecast"].causes is not None
    rows = names["update"]
    names |= {"ids": rows.inputs["input_ids"], "attention": torch.ones_like(rows.inputs["input_ids"])}
    names |= {"completion_mask": rows.mask, "group": rows.prompt, "advantages": rows.advantage}
    page.run(names)  # rollouts from a loop's tensors
    assert names["rollouts"].credit().shape == rows.mask.shape
    page.run(names)  # from a loop of one's own
    run = sonde.read_run("runs/mine")
    assert [reading.window for reading in run.policy] == [1]
    assert run.ended == "training ended"
    page.run(names)  # comparing losses
    assert names["comparison"].differences["clip-higher"].difference == 0.0  # at a ratio of 1, no clip counts
    assert names["comparison"].differences["dr_grpo"].is_valid


@scene("holding-entropy.md")
def holding_entropy(page: Page) -> None:
    names = reinforcement()
    small_policy.loss(names["model"], names["update"]).backward()
    page.run(names)
    assert names["forecast"].coefficient_to_hold.present == 0.01


def of_trl() -> Names:
    from tests.integrations.grpo_trainer import trainer_of

    return {"trainer": trainer_of(Path("trained"), steps=1)}


# Using it.


@scene("configuration.md")
def configuration(page: Page) -> None:
    (file,) = re.findall(r"```yaml\n(.*?)```", page.path.read_text(), flags=re.S)
    Path("training.yaml").write_text(file)
    names = reinforcement()
    micros = [[small_policy.drawn(names["model"], 8 * k + 4 * i, 2, seed=k + i) for i in range(2)] for k in range(3)]
    names |= {"loader": micros, "loss_of": small_policy.loss}
    page.run(names)  # attach
    assert names["probe"].reading().unit == "sequences"
    page.run(names)  # the loop
    run = sonde.read_run("runs/my-run")
    assert run.readings[-1].metrics["gns/units_per_window"] == 16
    assert [reading.window for reading in run.policy] == [1]


@scene("runs.md")
def runs(page: Page) -> None:
    pytest.importorskip("tensorboard", reason="the page writes TensorBoard too")
    model = nn.Linear(5, 1)
    names: Names = {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.01)}
    write, read, resume = page.left
    page.left.clear()
    write.run(names)
    for step in range(1, 111):
        for _ in range(2):
            with names["probe"].piece(units=4):
                model(torch.randn(4, 5)).square().mean().backward()
        names["probe"].step()
        names["policy_log"].measured(step, {"entropy/evaluation_per_token": 1.0})
        names["optimizer"].step()
        names["optimizer"].zero_grad()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch: one process saves alone here
        resume.run(names)
    assert names["probe"].reading().windows == 110
    names["probe"].close()
    names["policy_log"].end("training ended")
    read.run(names)
    assert names["run"].header.metadata == {"learning rate": 3e-4}
    assert [reading.window for reading in names["run"].readings] == list(range(10, 111, 10))
    assert len(names["run"].policy) == 110
    assert names["run"].ended == "training ended"
    assert list(Path("runs/my-run").glob("events*"))
    written = [json.loads(line) for line in Path("runs/my-run/records.jsonl").read_text().splitlines()]
    shown = [json.loads(line) for line in re.findall(r"^    (\{.*\})$", page.path.read_text(), flags=re.M)]
    assert len(shown) == 1
    for record in shown:  # a line of the log with these keys, or more
        same_kind = [other for other in written if other["kind"] == record["kind"]]
        assert any(record.keys() <= other.keys() for other in same_kind), record


@scene("write-your-own-probe.md")
def your_own_probe(page: Page) -> None:
    model = nn.Sequential(nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 1))
    with torch.no_grad():
        model[0].bias[0] = -1e6  # a dead unit: its 5 weights and its bias get no gradient, nor does what it feeds
    names: Names = {
        "model": model,
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.01),
        "loader": [[torch.randn(64, 5) for _ in range(3)] for _ in range(5)],
        "loss_of": lambda model, micro: (model(micro) - 0.3).square().mean(),
    }
    page.run(names)
    page.run(names)
    assert names["zeros"].metrics()["grad/zero_fraction"] == pytest.approx(7 / 29)
    assert isinstance(names["zeros"], sonde.Probe)
    run = sonde.read_run("runs/my-run")
    assert [reading.window for reading in run.own] == [1, 2, 3, 4, 5]
    assert run.own[-1].metrics["grad/zero_fraction"] == pytest.approx(7 / 29)
    assert "gns/b_simple" in run.readings[-1].metrics
    pytest.importorskip("bokeh", reason="the report needs bokeh")
    report = sonde.write_report("runs/my-run").read_text()
    assert "<h2>Gradients that are exactly 0</h2>" in report
    assert "Dead units and unused embeddings get no gradient." in report
