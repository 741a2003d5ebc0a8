"""A GRPO run that samples by top-p and min-p: forecasts of the truncated policy, beside fresh rollouts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("trl", reason="needs trl: pip install '.[trl]'")
# Other packages cause various warnings when they are imported and run.
pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.slow]

from sonde.integrations import trl as integration  # noqa: E402
from sonde.policy.entropy_options import EntropyChangeOptions  # noqa: E402
from tests.integrations.grpo_trainer import trainer_of, weights  # noqa: E402

OPTIONS = EntropyChangeOptions(every=2)


@pytest.mark.parametrize("evaluation", ["fresh", "same"])
def test_forecasts_are_of_the_truncated_policy(tmp_path: Path, evaluation: Any) -> None:
    how = {"top_p": 0.9, "min_p": 0.02, "temperature": 0.9}
    plain = trainer_of(tmp_path / "plain", steps=7, **how)
    plain.train()
    trainer = trainer_of(tmp_path / "watched", steps=7, **how)
    probes = integration.attach(
        trainer, OPTIONS, evaluation=evaluation, evaluation_prompts=32, rollouts=True, on_error="raise"
    )
    trainer.train()
    assert torch.equal(weights(plain), weights(trainer))
    assert len(probes.forecasts) == 4
    for _, forecast in probes.forecasts:
        assert forecast.own_policy is not None
        assert abs(forecast.own_policy.z) < 4.0  # −10 by the untruncated policy
        assert forecast.is_valid, forecast.reason
        assert forecast.rollouts is not None
        assert forecast.importance is None
        if evaluation == "fresh":  # its own prompts change more
            room = 3.0 * (forecast.se**2 + forecast.rollouts.se**2) ** 0.5
            assert forecast.delta == pytest.approx(forecast.rollouts.delta, abs=room)
    # Both measure the same policy before the last measured step, on other responses.
    logged = probes._metrics["entropy/update_token_weighted"]
    assert logged == pytest.approx(probes.forecasts[-1][1].entropy, abs=0.3)
