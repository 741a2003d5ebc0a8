"""Lightning's Trainer: sonde is one callback.

python examples/lightning_trainer.py
"""

from __future__ import annotations

import pydoc_data.topics
from pathlib import Path

import lightning as L
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from sonde.integrations.lightning import NoiseScale

CONTEXT, MICRO_BATCH, MICRO_BATCHES, STEPS = 16, 16, 4, 150

text = torch.frombuffer(bytearray(Path(pydoc_data.topics.__file__).read_bytes()), dtype=torch.uint8).long()
stretches = text.unfold(0, CONTEXT + 1, 5)  # [stretches, CONTEXT + 1]


class ByteModel(L.LightningModule):
    """Predicts the byte that follows a context."""

    def __init__(self) -> None:
        super().__init__()
        hidden = nn.Linear(32 * CONTEXT, 256)
        self.net = nn.Sequential(nn.Embedding(256, 32), nn.Flatten(), hidden, nn.GELU(), nn.Linear(256, 256))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        """The loss of a micro-batch."""
        inputs, targets = batch
        return nn.functional.cross_entropy(self.net(inputs), targets)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """AdamW."""
        return torch.optim.AdamW(self.parameters(), lr=2e-3)


L.seed_everything(1)
trainer = L.Trainer(
    max_steps=STEPS,
    accumulate_grad_batches=MICRO_BATCHES,
    gradient_clip_val=1.0,
    accelerator="auto",
    devices=1,
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    # Without `every=1`, measuring takes 1 % of the run's time, or 10 seconds.
    callbacks=[NoiseScale(unit="contexts", every=1, log="runs/lightning-trainer")],
)
loader = DataLoader(TensorDataset(stretches[:, :-1], stretches[:, -1]), batch_size=MICRO_BATCH, shuffle=True)
trainer.fit(ByteModel(), loader)
