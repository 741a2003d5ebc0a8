"""Accelerate on one process or several: one line of sonde, after `prepare`.

torchrun --nproc-per-node 2 examples/accelerate_ddp.py
"""

from __future__ import annotations

import pydoc_data.topics
from pathlib import Path

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from sonde.integrations.accelerate import attach

CONTEXT, MICRO_BATCH, STEPS = 16, 16, 150

accelerator = Accelerator(gradient_accumulation_steps=4, cpu=not torch.cuda.is_available())

text = torch.frombuffer(bytearray(Path(pydoc_data.topics.__file__).read_bytes()), dtype=torch.uint8).long()
stretches = text.unfold(0, CONTEXT + 1, 5)  # [stretches, CONTEXT + 1]
loader = DataLoader(TensorDataset(stretches[:, :-1], stretches[:, -1]), batch_size=MICRO_BATCH, shuffle=True)

torch.manual_seed(0)
model = nn.Sequential(nn.Embedding(256, 32), nn.Flatten(), nn.Linear(32 * CONTEXT, 256), nn.GELU(), nn.Linear(256, 256))
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

# Attach after prepare, so that the probe sees the DDP wrapper. A run this short measures every window.
probe = attach(accelerator, model, optimizer, unit="contexts", every=1, log="runs/accelerate")

steps = 0
for inputs, targets in loader:
    with accelerator.accumulate(model):
        loss = nn.functional.cross_entropy(model(inputs), targets)
        accelerator.backward(loss)
        if accelerator.sync_gradients:
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            steps += 1
        optimizer.step()
        optimizer.zero_grad()
    if steps == STEPS:
        break

accelerator.end_training()  # ends the log, and prints the last reading
