"""A real GRPO run on two ranks under DDP, with and without probes."""

from __future__ import annotations

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
        from sonde.records import RunLog
        from sonde.runs.sinks import JsonlSink
        from tests.integrations.grpo_trainer import trainer_of, weights

        trainer = trainer_of(Path(tempfile.mkdtemp()), steps=4, per_device_train_batch_size=8)
        probes = None
        if watched:
            config = {
                "gns_probe": {"enabled": True, "log_every": 2},
                "entropy_probe": {"enabled": True, "every": 2},
                "policy_entropy_probe": {"enabled": True},
            }
            log = RunLog(JsonlSink(folder))
            probes = integration.attach(
                trainer, config, evaluation_prompts=8, causes=True, rollouts=True, log=log, on_error="raise"
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
        assert reading.causes is not None
        assert all("+" in part.prompt for part in (*reading.shares, *reading.causes.prompts))
