"""The pages of docs/ and the changelog keep their word: code compiles; names, links, metrics and keys exist."""

from __future__ import annotations

import dataclasses
import importlib
import re
import textwrap
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import nn

import sonde
from sonde.batch_size.stats.noise_scale import RunningNoiseScale

DOCS = Path(__file__).parent.parent / "docs"
PAGES = [*sorted(DOCS.glob("*.md")), DOCS.parent / "CHANGELOG.md"]
METRICS = {metric for name in sonde.__all__ for metric in getattr(getattr(sonde, name), "METRICS", ())}
"""Metrics that the public probes declare."""

each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)


def python_blocks(page: Path) -> list[str]:
    return re.findall(r"```python\n(.*?)```", page.read_text(), flags=re.S)


def exists(name: str) -> bool:
    """Whether a dotted name, `sonde.integrations.trl.attach`, can be imported."""
    parts = name.split(".")
    found: Any = sonde
    for k, part in enumerate(parts[1:], start=2):
        if not hasattr(found, part):
            try:
                importlib.import_module(".".join(parts[:k]))
            except ModuleNotFoundError:
                return False
        found = getattr(found, part)
    return True


@each_page
def test_python_blocks_compile(page: Path) -> None:
    for block in python_blocks(page):
        compile(block, page.name, "exec")


@pytest.mark.filterwarnings(
    "ignore:sonde.probes.policy_journal is deprecated:DeprecationWarning"
)  # the changelog names an older path
@each_page
def test_names_of_sonde_exist(page: Path) -> None:
    """Each `sonde.name` in code or prose. Commands such as `sonde report runs/x` have no dot."""
    text = page.read_text()
    names = set(re.findall(r"(?<![\w/.])sonde(?:\.[A-Za-z_]\w*)+", text))
    if any("sonde.integrations.trl" in name for name in names):
        pytest.importorskip("trl", reason="the integration needs trl")
    assert not [name for name in sorted(names) if not exists(name)]


@each_page
def test_names_imported_in_python_blocks_exist(page: Path) -> None:
    for block in python_blocks(page):
        for module, names in re.findall(r"^from (sonde[\w.]*) import (.+)$", block, flags=re.M):
            assert all(exists(f"{module}.{name.strip()}") for name in names.split(",")), f"{module}: {names}"


def test_a_name_that_does_not_exist_is_found() -> None:
    assert exists("sonde.RunLog")
    assert exists("sonde.policy.log.PolicyLog")
    assert not exists("sonde.RunLogs")
    assert not exists("sonde.measure.partial")


@each_page
def test_links_lead_somewhere(page: Path) -> None:
    for target, heading in re.findall(r"\]\(([^)#]*)(?:#([^)]*))?\)", page.read_text()):
        if target.startswith("http"):
            continue
        linked = page.parent / target if target else page
        assert linked.exists(), f"{page.name} links to {target}"
        assert not heading or heading in headings(linked), f"{page.name} links to {target}#{heading}"


def headings(page: Path) -> set[str]:
    """Anchors as GitHub makes them."""
    titles = re.findall(r"^#+ (.+)$", page.read_text(), flags=re.M)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@each_page
def test_files_named_exist(page: Path) -> None:
    """Paths of files in backticks, from the root of the repository."""
    for path in re.findall(r"`((?:src|tests|docs|benchmarks|examples)/[\w./-]+)`", page.read_text()):
        assert (DOCS.parent / path).exists(), f"{page.name} names {path}"


@each_page
def test_metrics_named_exist(page: Path) -> None:
    """Metric names in backticks: `gns/b_simple`. The page of one's own probe declares its own."""
    own = set(re.findall(r'"(\w+/\w+)": sonde\.Metric', page.read_text()))
    assert metrics_named(page) <= METRICS | own


def test_every_metric_is_on_a_page() -> None:
    tables = ("runs.md", "policy-entropy.md")
    named = {name for page in tables for name in metrics_named(DOCS / page)}
    shortened = {f"entropy/advantage_correlation_{end}" for end in ("low", "high")}  # `…_low`, `…_high` in the table
    assert named | shortened == METRICS


def metrics_named(page: Path) -> set[str]:
    """Metric names in backticks."""
    return set(re.findall(r"`((?:gns|gns_prompts|entropy|length|grad|cost|run)/\w+)`", page.read_text()))


# The page of other tools.


def test_a_moving_window_as_a_horizon() -> None:
    """An average of horizon (n + 1)/2 is worth n windows, and has the mean age (n − 1)/2 of a moving window of n."""
    n = 99
    running = RunningNoiseScale(horizon=(n + 1) / 2)
    for age in range(2000, -1, -1):  # long enough for the oldest weights to vanish: 0.98^2000 is 3e-18
        running.update(sonde.WindowEstimate(trace_cov=float(age), grad_sq=1.0))
    assert running.effective_windows == pytest.approx(n)
    assert running.trace_cov == pytest.approx((n - 1) / 2)


# The page of the batch size.


def test_a_checkpoint_is_measured_as_printed(capsys: pytest.CaptureFixture[str]) -> None:
    (block,) = [block for block in python_blocks(DOCS / "batch-size.md") if "sonde.measure(" in block]
    body = nn.Sequential(nn.Linear(5, 8), nn.Tanh())
    model = nn.Sequential()
    model.add_module("body", body)
    model.add_module("head", nn.Linear(8, 1))
    x = torch.randn(400, 2, 5)
    names: dict[str, Any] = {
        "sonde": sonde,
        "model": model,
        "loss_of": nn.functional.mse_loss,
        "loader": [{"x": one, "y": one[:, :1] + torch.randn(2, 1)} for one in x],
    }
    exec(compile(block, "batch-size.md", "exec"), names)
    assert names["measurement"].reading.units_per_window == 512
    said = capsys.readouterr().out
    assert said.startswith("B_simple")
    assert "GroupReading(status='resolved'" in said


# The reference of the configuration.


def tables() -> dict[str, dict[str, Any]]:
    """What the page says: the default of each key, by probe."""
    sections = re.findall(r"^## `(\w+)`\n(.*?)(?=^## |\Z)", (DOCS / "configuration.md").read_text(), flags=re.S | re.M)
    return {
        probe: {key: yaml.safe_load(default) for key, default in re.findall(r"^\| `(\w+)` \| `(\S+)` \|", text, re.M)}
        for probe, text in sections
    }


def defaults() -> Iterator[tuple[str, dict[str, Any]]]:
    """What the dataclasses say: the default of each option that a file can give, by probe."""
    config = sonde.ProbesConfig()
    for probe in dataclasses.fields(config):
        options = getattr(config, probe.name)
        yield probe.name, {name: value for name, value in vars(options).items() if can_be_given(probe.name, name)}


def can_be_given(probe: str, option: str) -> bool:
    """Whether `probes_from_config` knows the option. A list is a value of no option."""
    with pytest.raises(ValueError, match=r".") as refused:
        sonde.probes_from_config({probe: {option: []}})
    return not any(words in str(refused.value) for words in ("unknown option", "functions or objects of Python"))


def test_every_key_of_the_configuration_is_on_its_page_with_its_default() -> None:
    assert tables() == dict(defaults())


def test_the_yaml_on_the_page_is_read() -> None:
    blocks = re.findall(r"```yaml\n(.*?)```", (DOCS / "configuration.md").read_text(), flags=re.S)
    for block in blocks:
        assert sonde.probes_from_config(yaml.safe_load(block)).gns_probe.enabled


# The page of the log.


def test_the_log_of_the_page_is_read_as_printed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("tensorboard", reason="the page writes TensorBoard too")
    monkeypatch.chdir(tmp_path)
    model = nn.Linear(5, 1)
    names: dict[str, Any] = {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.01)}
    write, read, resume = python_blocks(DOCS / "runs.md")
    exec(compile(write, "runs.md", "exec"), names)
    for step in range(1, 21):
        for _ in range(2):
            with names["probe"].piece(units=4):
                model(torch.randn(4, 5)).square().mean().backward()
        names["probe"].step()
        names["policy_log"].measured(step, {"entropy/per_token": 1.0})
        names["optimizer"].step()
        names["optimizer"].zero_grad()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch: one process saves alone here
        exec(compile(resume, "runs.md", "exec"), names)
    assert names["probe"].reading().windows == 20
    names["probe"].close()
    names["policy_log"].end("training ended")
    exec(compile(read, "runs.md", "exec"), names)
    assert names["run"].header.metadata == {"learning rate": 3e-4}
    assert [reading.window for reading in names["run"].readings] == [10, 20]
    assert len(names["run"].policy) == 20
    assert names["run"].ended == "training ended"
    assert list(tmp_path.glob("runs/my-run/events*"))


# The page of one's own probe.


def test_a_probe_of_ones_own_runs_as_printed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    snippet = "\n".join(textwrap.dedent(block) for block in python_blocks(DOCS / "write-your-own-probe.md")[:2])
    monkeypatch.chdir(tmp_path)
    model = nn.Sequential(nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 1))
    with torch.no_grad():
        model[0].bias[0] = -1e6  # a dead unit: its 5 weights and its bias get no gradient, nor does what it feeds
    names: dict[str, Any] = {
        "model": model,
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.01),
        "loader": [[torch.randn(64, 5) for _ in range(3)] for _ in range(5)],
        "loss_of": lambda model, micro: (model(micro) - 0.3).square().mean(),
    }
    exec(compile(snippet, "write-your-own-probe.md", "exec"), names)
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
