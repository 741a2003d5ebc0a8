"""A real GRPO run on two ranks under DDP, with and without probes."""

from __future__ import annotations

import pydoc
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.integrations.as_launched import as_launched, free_port
from tests.ranks import Ranks

pytest.importorskip("trl", reason="needs trl: pip install '.[trl]'")
pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.slow]


def _trained(port: int, folder: str, watched: bool) -> dict[str, Any]:
    with as_launched(port):
        from sonde.integrations import trl as integration
        from sonde.log.sinks import JsonlSink
        from sonde.policy.entropy_options import EntropyChangeOptions
        from sonde.records import RunLog
        from tests.integrations.grpo_trainer import trainer_of, weights

        trainer = trainer_of(Path(tempfile.mkdtemp()), steps=4, per_device_train_batch_size=8)
        probes = None
        if watched:
            probes = integration.attach(
                trainer,
                EntropyChangeOptions(every=2),
                noise_every=2,
                evaluation_prompts=8,
                causes=True,
                rollouts=True,
                log=RunLog(JsonlSink(folder)),
                on_error="raise",
            )
        trainer.train()
        forecasts = [] if probes is None else [forecast for _, forecast in probes.forecasts]
        return {
            "ranks": trainer.accelerator.num_processes,
            "weights": weights(trainer),
            "deltas": [(f.delta, f.se, f.rollouts.delta) for f in forecasts if f.rollouts],
            "n": [(f.n_evaluation, f.causes and len(f.causes.prompts)) for f in forecasts],
            "explained": [f.causes.explained for f in forecasts if f.causes],
        }


PLACES = {
    "fresh": "sonde.integrations.trl_rollouts.TrlRollouts",
    "learned_from": "sonde.integrations.trl_rollouts.TrlRollouts",
    "window": "sonde.integrations.trl_rollouts.TrlRollouts",
    "sample": "sonde.policy.entropy_measurement.EntropyMeasurement",
    "was_skipped": "sonde.policy.policy_step.PolicyStep",
    "forecast": "sonde.policy.entropy_measurement.EntropyMeasurement",
}
"""Methods that are called before, between and after gatherings, by their classes."""


def _fails_on_one_rank(port: int, folder: str) -> dict[str, Any]:
    """In each step, another method fails on rank 1 alone; in the last step, none."""
    with as_launched(port), pytest.MonkeyPatch.context() as patch:
        from sonde.integrations import trl as integration
        from sonde.policy.entropy_options import EntropyChangeOptions
        from tests.integrations.grpo_trainer import trainer_of, weights

        trainer = trainer_of(Path(tempfile.mkdtemp()), steps=len(PLACES) + 1, per_device_train_batch_size=8)
        rank = trainer.accelerator.process_index
        failed: list[str] = []

        def break_in_its_step(step: int, name: str, kind: type) -> None:
            original = getattr(kind, name)

            def method(self: Any, *args: Any, **options: Any) -> Any:
                if trainer.state.global_step == step and name not in failed:
                    failed.append(name)
                    raise MemoryError(f"no memory for {name}")
                return original(self, *args, **options)

            patch.setattr(kind, name, method)

        if rank == 1:
            for step, (name, kind) in enumerate(PLACES.items()):
                break_in_its_step(step, name, pydoc.locate(kind))  # type: ignore[arg-type]
        probes = integration.attach(trainer, EntropyChangeOptions(), evaluation_prompts=8, rollouts=True, log=folder)
        trainer.train()
        return {
            "failed": failed,
            "weights": weights(trainer),
            "forecasts": [(step, forecast.delta) for step, forecast in probes.forecasts],
            "alerts": " ".join(probes.alerts.values()),
        }


def test_an_error_on_one_rank_ends_the_measurement_on_both_and_no_training(ranks2: Ranks, tmp_path: Path) -> None:
    first, second = ranks2(_fails_on_one_rank, free_port(), str(tmp_path))
    assert second["failed"] == list(PLACES)
    assert torch.equal(first["weights"], second["weights"])
    assert first["forecasts"] == second["forecasts"]
    assert [step for step, _ in first["forecasts"]] == [len(PLACES) + 1]
    assert "without this measurement: MemoryError: no memory for fresh" in second["alerts"]
    assert "RuntimeError: rank 1 of the group failed: MemoryError: no memory for fresh" in first["alerts"]


def test_two_ranks_train_as_without_probes_and_agree_on_every_number(ranks2: Ranks, tmp_path: Path) -> None:
    port = free_port()
    plain = ranks2(_trained, port, "", False)
    first, second = ranks2(_trained, port, str(tmp_path), True)
    assert first["ranks"] == 2
    for result in (first, second):
        assert torch.equal(result["weights"], plain[0]["weights"])
    assert first["deltas"] == second["deltas"]
    assert len(first["deltas"]) == 2
    assert first["n"] == [(8, 4), (8, 4)]  # of all ranks: 2 × 16 completions, 8 to a prompt
    assert first["explained"] == pytest.approx([1.0, 1.0], abs=0.1)
    from sonde.runs.reader import read_run

    run = read_run(tmp_path)
    assert run.header.setup["ranks"] == 2
    assert [reading.window for reading in run.policy] == [1, 3]
    assert [len(reading.shares) for reading in run.policy] == [8, 8]
    for reading in run.policy:  # texts of both ranks' prompts
        assert all("+" in part.prompt for part in (*reading.shares, *reading.causes.prompts))
