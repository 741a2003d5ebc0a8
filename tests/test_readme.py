"""The README keeps its word: its snippets run as printed, and what it points to is there."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import sonde

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


SNIPPETS = re.findall(r"```python\n(.*?)```", README, flags=re.S)


@pytest.mark.parametrize("snippet", SNIPPETS, ids=["three lines", "declared pieces"])
def test_a_snippet_runs_as_printed(snippet: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    model = nn.Linear(5, 1)
    loader = [[torch.randn(4, 5) for _ in range(3)] for _ in range(30)]
    names: dict[str, Any] = {
        "model": model,
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.01),
        "loader": loader,
        "loss_of": lambda model, micro: (model(micro) - micro[:, :1] - 0.3).square().mean(),
    }
    exec(compile(snippet, "README.md", "exec"), names)
    names["probe"].close()
    run = sonde.read_run("runs/my-run")
    assert run.readings[-1].window == 30
    assert run.readings[-1].metrics["gns/units_per_window"] == 12
    assert run.header.unit == "sequences"


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md"])
def test_links_lead_somewhere(page: str) -> None:
    file = ROOT / page
    for target in re.findall(r"\]\(([^)#]+)\)", file.read_text()):
        assert target.startswith("http") or (file.parent / target).exists(), f"{page} links to {target}"


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md"])
def test_make_targets_exist(page: str) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), flags=re.M))
    assert set(re.findall(r"make ([a-z-]+)", (ROOT / page).read_text())) <= targets
