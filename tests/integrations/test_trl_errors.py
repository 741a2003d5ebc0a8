"""A probe that fails in the middle of a GRPO run: training goes on, and the log says what happened."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("trl", reason="needs trl: pip install '.[trl]'")
# Other packages cause various warnings when they are imported and run.
pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.slow]

from sonde.integrations import trl as integration  # noqa: E402
from sonde.integrations.trl_rollouts import TrlRollouts  # noqa: E402
from sonde.policy.entropy_options import EntropyChangeOptions  # noqa: E402
from sonde.policy.scoring.scorer import Scorer  # noqa: E402
from tests.integrations.grpo_trainer import trainer_of, weights  # noqa: E402

OPTIONS = EntropyChangeOptions(every=2)


def failing(monkeypatch: pytest.MonkeyPatch, kind: type, name: str, first: int) -> None:
    """From its n-th call on, a method fails."""
    original, n_calls = getattr(kind, name), 0

    def method(*args: Any, **options: Any) -> Any:
        nonlocal n_calls
        n_calls += 1
        if n_calls >= first:
            raise MemoryError("no memory left, say")
        return original(*args, **options)

    monkeypatch.setattr(kind, name, method)


@pytest.fixture(scope="module")
def without_probes(tmp_path_factory: pytest.TempPathFactory) -> torch.Tensor:
    plain = trainer_of(tmp_path_factory.mktemp("plain"), steps=5)
    plain.train()
    return weights(plain)


@pytest.mark.parametrize(
    ("kind", "name", "first", "n_forecasts"),
    [(TrlRollouts, "fresh", 2, 1), (TrlRollouts, "learned_from", 3, 1), (Scorer, "scored", 4, 1)],
    ids=["before a step", "in a micro-batch", "after a step"],
)
def test_training_goes_on_without_the_measurement(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    without_probes: torch.Tensor,
    kind: type,
    name: str,
    first: int,
    n_forecasts: int,
) -> None:
    watched = trainer_of(tmp_path / "watched", steps=5)
    failing(monkeypatch, kind, name, first)
    probes = integration.attach(watched, OPTIONS, log=tmp_path / "log", on_error="warn")
    watched.train()
    assert torch.equal(without_probes, weights(watched))
    assert watched.state.global_step == 5
    assert len(probes.forecasts) >= n_forecasts
    records = [
        json.loads(line) for path in (tmp_path / "log").glob("*.jsonl") for line in path.read_text().splitlines()
    ]
    alerts = [r for r in records if r["kind"] == "alert" and r["name"].startswith("failed_")]
    assert len(alerts) == 1  # though it failed again and again
    assert "training goes on without this measurement: MemoryError: no memory left, say" in alerts[0]["message"]
    assert "Traceback (most recent call last)" in alerts[0]["details"]
    assert alerts[0]["message"] in probes.alerts.values()


def test_errors_are_raised_where_they_should_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = trainer_of(tmp_path, steps=3)
    failing(monkeypatch, TrlRollouts, "fresh", 1)
    integration.attach(trainer, OPTIONS, on_error="raise")
    with pytest.raises(MemoryError, match="no memory left"):
        trainer.train()
    with pytest.raises(ValueError, match="on_error must be 'warn' or 'raise', got 'log'"):
        integration.attach(trainer_of(tmp_path), OPTIONS, on_error="log")  # type: ignore[arg-type]
