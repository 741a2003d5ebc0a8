"""A GRPO run with a KL term and an entropy bonus: both are causes of their own, and all of the batch is explained."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("trl", reason="needs trl: pip install '.[trl]'")
# Other packages cause various warnings when they are imported and run.
pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.slow]

from sonde.integrations import trl as integration  # noqa: E402
from sonde.policy.entropy_options import EntropyChangeOptions  # noqa: E402
from tests.integrations.grpo_trainer import trainer_of  # noqa: E402


@pytest.mark.parametrize(
    "options",
    [
        {"loss_type": "dr_grpo"},
        {"loss_type": "grpo"},
        {"loss_type": "dapo", "steps_per_generation": 4},
        {"loss_type": "bnpo"},
        {"loss_type": "cispo"},
        {"loss_type": "dr_grpo", "num_iterations": 2},
        {"loss_type": "dapo", "use_bias_correction_kl": False},
        {"loss_type": "grpo", "importance_sampling_level": "sequence", "num_iterations": 2},
    ],
    ids=str,
)
def test_a_kl_term_and_a_bonus_are_explained(tmp_path: Path, options: dict[str, Any]) -> None:
    trainer = trainer_of(tmp_path, steps=4, beta=0.5, entropy_coef=0.05, **options)
    probes = integration.attach(trainer, EntropyChangeOptions(), causes=True, on_error="raise")
    trainer.train()
    assert len(probes.forecasts) == 4
    for _, forecast in probes.forecasts:
        causes = forecast.causes
        assert causes is not None
        assert causes.explained == pytest.approx(1.0, abs=0.02)
        assert causes.cosine == pytest.approx(1.0, abs=1e-3)
    for name in ("KL", "entropy bonus"):  # the terms matter
        sizes = sorted(abs(f.causes.terms[name] / f.causes.batch) for _, f in probes.forecasts)
        assert sizes[2] > 0.05, (name, sizes)
