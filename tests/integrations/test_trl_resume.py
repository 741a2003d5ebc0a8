"""A GRPO run that resumes from a checkpoint goes on with the averages of its noise scale in prompts."""

from __future__ import annotations

import json
import logging
import re
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("trl", reason="needs trl: pip install '.[trl]'")
# Other packages cause various warnings when they are imported and run.
pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.slow]

from sonde.integrations import trl as integration  # noqa: E402
from sonde.stats.sealed_state import unsealed  # noqa: E402
from tests.integrations.grpo_trainer import trainer_of, weights  # noqa: E402

STEPS, SAVED_AT = 4, 2


def trained(folder: Path, *, resume: Path | None = None, **options: Any) -> torch.Tensor:
    """Train with a measurement in every step, and save checkpoints; returns the weights."""
    trainer = trainer_of(folder, steps=STEPS, save_strategy="steps", save_steps=SAVED_AT, **options)
    integration.attach(trainer, None, noise_every=1)
    trainer.train(resume_from_checkpoint=None if resume is None else str(resume))
    return weights(trainer)


def saved(folder: Path, step: int) -> dict[str, Any]:
    """The averages in a checkpoint."""
    text = (folder / f"checkpoint-{step}" / "trainer_state.json").read_text()
    state = json.loads(text)["stateful_callbacks"][integration.SAVED_AS]
    averages: dict[str, Any] = unsealed("state", state)["averages"]
    return averages


def test_a_resumed_run_has_the_averages_of_the_whole_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    whole = trained(tmp_path / "whole")
    assert saved(tmp_path / "whole", SAVED_AT)["windows"]["blocks"]["n_windows"] == SAVED_AT
    expected = saved(tmp_path / "whole", STEPS)
    checkpoint = tmp_path / "whole" / f"checkpoint-{SAVED_AT}"

    # transformers ignores the entry, also where it restores the states of callbacks.
    options = {"restore_callback_states_from_checkpoint": True}
    resumed = trained(tmp_path / "resumed", resume=checkpoint, **options)
    assert torch.equal(resumed, whole)
    assert saved(tmp_path / "resumed", STEPS) == expected

    file = checkpoint / "trainer_state.json"
    state = json.loads(file.read_text())
    state["stateful_callbacks"][integration.SAVED_AS]["version"] = 1
    file.write_text(json.dumps(state))
    with caplog.at_level(logging.WARNING, logger="sonde"):
        other = trained(tmp_path / "other", resume=checkpoint)
    assert torch.equal(other, whole)
    assert saved(tmp_path / "other", STEPS)["windows"]["blocks"]["n_windows"] == STEPS - SAVED_AT
    assert re.search(r"begin anew: .* of version 1, is damaged or is not of version", caplog.text)
