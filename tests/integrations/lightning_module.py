"""A Lightning module on ragged rows, and its trainer; import it only with Lightning."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn

from tests.integrations.plain_loop import optimizer_of

ROWS, WIDTH = (4, 4, 2, 3, 4, 4, 4), 5
"""Rows of the batches of a third of an epoch. The epoch's last window is shorter."""


def batches() -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(n, WIDTH, generator=generator) for n in ROWS * 2]


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, 8), nn.Tanh(), nn.Linear(8, 1))


def loss_of(net: nn.Module, batch: Tensor) -> Tensor:
    return (net(batch) - batch[:, :1] - 0.3).square().mean()


class Module(L.LightningModule):
    def __init__(self, *, is_manual: bool = False) -> None:
        super().__init__()
        self.net = network()
        self.automatic_optimization = not is_manual

    def training_step(self, batch: Tensor, index: int) -> Tensor | None:
        loss = loss_of(self.net, batch)
        if self.automatic_optimization:
            return loss
        self.manual_backward(loss / 3)
        if index % 3 == 2 or index + 1 == len(ROWS) * 2:
            optimizer: Any = self.optimizers()
            self.clip_gradients(optimizer, gradient_clip_val=0.5, gradient_clip_algorithm="norm")
            optimizer.step()
            optimizer.zero_grad()
        return None

    def train_dataloader(self) -> Any:
        return torch.utils.data.DataLoader(batches(), batch_size=None)  # type: ignore[arg-type]

    def configure_optimizers(self) -> Any:
        return optimizer_of(self)


def trainer_of(folder: Path | str, *callbacks: Any, is_manual: bool = False, **options: Any) -> L.Trainer:
    settings: dict[str, Any] = {
        "accelerator": "cpu",
        "devices": 1,
        "default_root_dir": str(folder),
        "max_epochs": 2,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "log_every_n_steps": 4,
        "callbacks": list(callbacks),
    }
    if not is_manual:
        settings |= {"accumulate_grad_batches": 3, "gradient_clip_val": 0.5}
    return L.Trainer(**(settings | options))
