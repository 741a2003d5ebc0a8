"""Many trainings at once are the trainings that an ordinary loop with torch's optimizers would do."""

from __future__ import annotations

import pytest
import torch
from evidence.replicas import Replicas, begun, mean_loss
from evidence.tasks import OPTIMIZERS, TASKS, make_optimizers, task

STEPS, BATCH, RATES = 4, 8, (0.01, 0.02)


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("name", TASKS)
def test_each_replica_is_a_plain_training(name: str, kind: str) -> None:
    trained = task(name)
    replicas = Replicas(trained, kind, seeds=[3, 4], rates=RATES)
    for _ in range(STEPS):
        replicas.step(BATCH)
    found = replicas.held_out_losses()
    for s, seed in enumerate((3, 4)):
        for k, rate in enumerate(RATES):
            model, data = begun(trained, seed), torch.Generator().manual_seed(1000 + seed)
            at_first = float(mean_loss(trained, model, trained.held_out).detach())
            optimizers = make_optimizers(kind, model, rate)
            for _ in range(STEPS):
                mean_loss(trained, model, trained.draw(BATCH, data)).backward()
                for optimizer in optimizers:
                    optimizer.step()
                model.zero_grad()
            expected = float(mean_loss(trained, model, trained.held_out).detach())
            # torch's Muon computes its directions with 8 bits, here they have 24.
            part = 0.03 if kind == "muon" else 1e-4
            assert abs(float(found[s, k]) - expected) < part * abs(at_first - expected) + 1e-6


def test_units_go_through_in_parts_of_any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    losses = []
    for at_once in (1600, 12):  # of 4 replicas: all 8 units, or 3, 3 and 2
        monkeypatch.setattr("evidence.replicas.AT_ONCE", at_once)
        replicas = Replicas(task("mlp"), "sgd", seeds=[0, 1], rates=RATES)
        replicas.step(BATCH)
        losses.append(replicas.held_out_losses())
    assert torch.allclose(*losses, rtol=1e-5)


def test_held_out_units_are_never_drawn() -> None:
    """Noise on pixels is 0.1 each, so a drawn image lies about 0.8 from its own and farther from others."""
    trained = task("mlp")
    images, _ = trained.draw(2_000, torch.Generator().manual_seed(0))
    nearest = torch.cdist(images, trained.held_out[0]).min(1).values
    assert nearest.min() > 0.75  # 64 pixels: 0.80 ± 0.07 for an image's own
