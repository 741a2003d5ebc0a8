"""DDP under torchrun, with gradient accumulation and no_sync.

torchrun --nproc-per-node 2 examples/ddp_torchrun.py
"""

from __future__ import annotations

import contextlib
import pydoc_data.topics
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import sonde

CONTEXT, MICRO_BATCH, MICRO_BATCHES = 16, 16, 4

dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
rank = dist.get_rank()
device = torch.device("cuda", rank % torch.cuda.device_count()) if torch.cuda.is_available() else torch.device("cpu")

text = torch.frombuffer(bytearray(Path(pydoc_data.topics.__file__).read_bytes()), dtype=torch.uint8).long()
generator = torch.Generator().manual_seed(rank)  # every rank draws its own data


def windows_of_text(n: int) -> torch.Tensor:
    """n random stretches of CONTEXT + 1 bytes: [n, CONTEXT + 1]."""
    starts = torch.randint(len(text) - CONTEXT, (n,), generator=generator)
    return torch.stack([text[s : s + CONTEXT + 1] for s in starts]).to(device)


torch.manual_seed(0)
layers = [nn.Embedding(256, 32), nn.Flatten(), nn.Linear(32 * CONTEXT, 256), nn.GELU(), nn.Linear(256, 256)]
model = DistributedDataParallel(nn.Sequential(*layers).to(device))
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
log = sonde.RunLog(sonde.JsonlSink("runs/ddp"))
probe = sonde.attach(model, optimizer, unit="contexts", log=log, every=1)  # measures every window

for _ in range(150):
    for micro in range(MICRO_BATCHES):
        batch = windows_of_text(MICRO_BATCH)
        last = micro == MICRO_BATCHES - 1
        with probe.piece(units=len(batch)), contextlib.nullcontext() if last else model.no_sync():
            loss = nn.functional.cross_entropy(model(batch[:, :-1]), batch[:, -1])
            (loss / MICRO_BATCHES).backward()
    probe.log(loss=loss)
    probe.clip_grad_norm_(1.0)
    optimizer.step()
    optimizer.zero_grad()

reading = probe.reading()  # the same on every rank
if rank == 0:
    print(reading)
probe.close()
dist.destroy_process_group()
