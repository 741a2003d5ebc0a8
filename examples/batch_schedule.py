"""A batch that grows with the noise scale: a byte model, from 2 to 32 micro-batches a window.

python examples/batch_schedule.py
"""

from __future__ import annotations

import pydoc_data.topics
from pathlib import Path

import torch
from torch import nn

import sonde

CONTEXT, MICRO_BATCH, SMALLEST, LARGEST, MICRO_BATCHES = 16, 8, 2, 32, 1600

text = torch.frombuffer(bytearray(Path(pydoc_data.topics.__file__).read_bytes()), dtype=torch.uint8).long()
generator = torch.Generator().manual_seed(0)


def contexts(n: int) -> torch.Tensor:
    """n random stretches of CONTEXT + 1 bytes: [n, CONTEXT + 1]."""
    starts = torch.randint(len(text) - CONTEXT, (n,), generator=generator)
    return torch.stack([text[s : s + CONTEXT + 1] for s in starts])


torch.manual_seed(0)
model = nn.Sequential(nn.Embedding(256, 32), nn.Flatten(), nn.Linear(32 * CONTEXT, 128), nn.GELU(), nn.Linear(128, 256))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
lr_scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, MICRO_BATCHES // SMALLEST)
probe = sonde.attach(model, optimizer, unit="contexts", log="runs/batch-schedule")

schedule = sonde.BatchSchedule(probe, smallest=SMALLEST, largest=LARGEST)
schedule.scale_lr(optimizer, lr_scheduler)

n_seen = n_steps = 0
while n_seen < MICRO_BATCHES:
    n = schedule.micro_batches
    for _ in range(n):
        batch = contexts(MICRO_BATCH)
        loss = nn.functional.cross_entropy(model(batch[:, :-1]), batch[:, -1])
        (loss / n).backward()
    optimizer.step()
    optimizer.zero_grad()
    schedule.step_lr(lr_scheduler)
    n_seen, n_steps = n_seen + n, n_steps + 1

probe.close()
print(f"{n_seen * MICRO_BATCH:,} contexts in {n_steps} steps, {MICRO_BATCHES // SMALLEST} at the smallest batch")
