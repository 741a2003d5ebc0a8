"""TRL's entropy bonus as the coefficient to hold understands it: its gradient, its coefficient, and the clip."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("trl", reason="needs trl: pip install '.[trl]'")
# Other packages cause various warnings when they are imported and run.
pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.slow]

from transformers import TrainerCallback  # noqa: E402

from sonde.integrations import trl as integration  # noqa: E402
from sonde.parallel.model_state import preserve_training_state  # noqa: E402
from sonde.policy.entropy_options import EntropyChangeOptions  # noqa: E402
from sonde.policy.scoring.scorer import Scorer  # noqa: E402
from sonde.policy.scoring.token_statistics import CausalLMStatistics  # noqa: E402
from sonde.policy.stats.entropy_gradient import on_same_prefixes_coefficients  # noqa: E402
from tests.integrations.grpo_trainer import trainer_of  # noqa: E402


class Gradients(TrainerCallback):  # type: ignore[misc]
    """The gradients of the last step, flat; and ∇H̄ of the responses that it learns from, in the probes' own terms."""

    def __init__(self) -> None:
        self.probes: Any = None
        self.gradient = self.entropy_gradient = torch.zeros(0)

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        model = kwargs["model"]
        self.gradient = flat({p: p.grad for p in model.parameters()})
        if self.probes is not None:
            update = self.probes._rollouts.window()
            own = on_same_prefixes_coefficients(update.responses())
            share = own.on_entropy / update.responses().n_prompts
            scorer = Scorer(model, CausalLMStatistics(), 8, None)
            with preserve_training_state(model):
                self.entropy_gradient = flat(scorer.gradient(update, torch.zeros_like(share), share))


def flat(vectors: dict[Tensor, Tensor | None]) -> Tensor:
    return torch.cat([v.detach().flatten().clone() for v in vectors.values() if v is not None])


def test_the_gradient_of_trls_bonus_is_minus_the_coefficient_times_that_of_the_mean_entropy(tmp_path: Path) -> None:
    """The first step: nearly all responses have full length, so means over micro-batches are means over all tokens."""
    found = []
    for coefficient in (0.0, 0.5):
        watching = Gradients()
        # The seed and the weights are the same, so both learn from the same responses.
        trainer = trainer_of(
            tmp_path / str(coefficient),
            steps=1,
            entropy_coef=coefficient,
            max_grad_norm=0.0,
            learning_rate=0.0,
            callbacks=[watching],
            gradient_accumulation_steps=1,
            per_device_train_batch_size=32,
        )
        watching.probes = integration.attach(trainer, on_error="raise")
        trainer.train()
        found.append(watching)
    plain, with_bonus = found
    assert torch.equal(plain.entropy_gradient, with_bonus.entropy_gradient)
    bonus_gradient = with_bonus.gradient - plain.gradient
    assert float((bonus_gradient + 0.5 * plain.entropy_gradient).norm() / (0.5 * plain.entropy_gradient).norm()) < 1e-3


class Noting(TrainerCallback):  # type: ignore[misc]
    """The coefficients and clips that the probes see, beside the trainer's own."""

    def __init__(self) -> None:
        self.probes: Any = None
        self.seen: list[tuple[float, float, float]] = []

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        norm = float(torch.stack([p.grad.norm() for p in kwargs["model"].parameters()]).norm())
        self.seen.append((self.probes._entropy_coefficient, float(self.probes._clip_coefficient), norm))


def test_the_probes_know_the_clip_and_the_adaptive_coefficient(tmp_path: Path) -> None:
    """TRL's controller applies nothing in the first step, and from the second on what it counted up before."""
    noting = Noting()
    trainer = trainer_of(
        tmp_path,
        steps=4,
        use_adaptive_entropy=True,
        entropy_target=10.0,
        entropy_coef_delta=0.25,
        max_grad_norm=0.01,
        callbacks=[noting],
    )
    noting.probes = integration.attach(
        trainer, EntropyChangeOptions(every=10), coefficient_to_hold=True, on_error="raise"
    )
    trainer.train()
    assert [coefficient for coefficient, _, _ in noting.seen] == [0.0, 0.25, 0.5, 0.75]
    for _, clip, norm in noting.seen:
        assert clip < 1.0
        assert norm == pytest.approx(0.01, rel=1e-3)  # clipped
    norms = [entry["grad_norm"] for entry in trainer.state.log_history if "grad_norm" in entry]
    assert norms == [] or noting.seen[-1][1] == pytest.approx(0.01 / (float(norms[-1]) + 1e-6), rel=1e-4)
    [hold] = [f.coefficient_to_hold for step, f in noting.probes.forecasts if step == 1]
    assert hold.present == 0.0
