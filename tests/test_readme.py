"""The README keeps its word: its snippet runs as printed, and what it points to is there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from torch import nn

import sonde

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def test_the_snippet_runs_as_printed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (snippet,) = re.findall(r"```python\n(.*?)```", README, flags=re.S)
    monkeypatch.chdir(tmp_path)
    model = nn.Linear(5, 1)
    loader = [[torch.randn(4, 5) for _ in range(3)] for _ in range(30)]
    names = {
        "model": model,
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.01),
        "loader": loader,
        "loss_of": lambda model, micro: (model(micro) - micro[:, :1] - 0.3).square().mean(),
    }
    exec(compile(snippet, "README.md", "exec"), names)
    run = sonde.read_run("runs/my-run")
    assert run.readings[-1].window == 30
    assert run.header.unit == "sequences"


def test_a_probe_of_ones_own_runs_as_printed() -> None:
    (snippet,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "write-your-own-probe.md").read_text(), flags=re.S)
    model = nn.Sequential(nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 1))
    with torch.no_grad():
        model[0].bias[0] = -1e6  # a dead unit: its 5 weights and its bias get no gradient, nor does what it feeds
    names = {
        "model": model,
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.01),
        "loader": [[torch.randn(64, 5) for _ in range(3)] for _ in range(5)],
        "loss_of": lambda model, micro: (model(micro) - 0.3).square().mean(),
    }
    exec(compile(snippet, "write-your-own-probe.md", "exec"), names)
    assert names["metrics"]["grad/zero_fraction"] == pytest.approx(7 / 29)  # type: ignore[index]
    assert "gns/b_simple" in names["metrics"]  # type: ignore[operator]
    assert isinstance(names["probes"][0], sonde.Probe)  # type: ignore[index]


@pytest.mark.parametrize(
    "page", ["README.md", "CONTRIBUTING.md", *(f"docs/{p.name}" for p in (ROOT / "docs").glob("*.md"))]
)
def test_links_lead_somewhere(page: str) -> None:
    file = ROOT / page
    for target in re.findall(r"\]\(([^)#]+)\)", file.read_text()):
        assert target.startswith("http") or (file.parent / target).exists(), f"{page} links to {target}"


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md"])
def test_make_targets_exist(page: str) -> None:
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), flags=re.M))
    assert set(re.findall(r"make ([a-z]+)", (ROOT / page).read_text())) <= targets
