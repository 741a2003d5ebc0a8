"""A plain loop on one process with gradient accumulation: the README's ten lines, around a small byte model.

python examples/plain_loop.py
"""

from __future__ import annotations

import pydoc_data.topics
from pathlib import Path

import torch
from torch import nn

import sonde

CONTEXT, MICRO_BATCH, MICRO_BATCHES = 16, 16, 4

text = torch.frombuffer(bytearray(Path(pydoc_data.topics.__file__).read_bytes()), dtype=torch.uint8).long()
generator = torch.Generator().manual_seed(0)


def windows_of_text(n: int) -> torch.Tensor:
    """n random stretches of CONTEXT + 1 bytes: [n, CONTEXT + 1]."""
    starts = torch.randint(len(text) - CONTEXT, (n,), generator=generator)
    return torch.stack([text[s : s + CONTEXT + 1] for s in starts])


torch.manual_seed(0)
model = nn.Sequential(nn.Embedding(256, 32), nn.Flatten(), nn.Linear(32 * CONTEXT, 256), nn.GELU(), nn.Linear(256, 256))
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
log = sonde.RunLog(sonde.JsonlSink("runs/plain-loop"))
probe = sonde.attach(model, optimizer, unit="contexts", log=log, every=1)  # measures every window

for step in range(150):
    for _ in range(MICRO_BATCHES):
        batch = windows_of_text(MICRO_BATCH)
        with probe.piece(units=len(batch)):
            loss = nn.functional.cross_entropy(model(batch[:, :-1]), batch[:, -1])
            (loss / MICRO_BATCHES).backward()
    probe.log(loss=loss)
    probe.clip_grad_norm_(1.0)
    optimizer.step()
    optimizer.zero_grad()
    if step % 50 == 49:
        print(f"step {step + 1}: loss {loss.item():.2f}, {probe.reading()}")

probe.close()
