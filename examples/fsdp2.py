"""FSDP2 under torchrun: the noise scale and the clip of a sharded model, with gradient accumulation.

torchrun --nproc-per-node 2 examples/fsdp2.py
"""

from __future__ import annotations

import pydoc_data.topics
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import sonde

CONTEXT, MICRO_BATCH, MICRO_BATCHES = 16, 16, 4

dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
rank = dist.get_rank()
device = torch.device("cuda", rank % torch.cuda.device_count()) if torch.cuda.is_available() else torch.device("cpu")
if device.type == "cuda":
    torch.cuda.set_device(device)

text = torch.frombuffer(bytearray(Path(pydoc_data.topics.__file__).read_bytes()), dtype=torch.uint8).long()
generator = torch.Generator().manual_seed(rank)  # every rank draws its own data

torch.manual_seed(0)
layers = [nn.Embedding(256, 32), nn.Flatten(), nn.Linear(32 * CONTEXT, 256), nn.GELU(), nn.Linear(256, 256)]
model = nn.Sequential(*layers).to(device)
mesh = init_device_mesh(device.type, (dist.get_world_size(),))
for layer in (model[2], model[4], model):
    fully_shard(layer, mesh=mesh)
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
log = sonde.RunLog(sonde.JsonlSink("runs/fsdp2"))
probe = sonde.attach(model, optimizer, unit="contexts", every=1, log=log)  # measures every window

for _ in range(100):
    for micro in range(MICRO_BATCHES):
        model.set_requires_gradient_sync(micro == MICRO_BATCHES - 1)  # only the last micro-batch reduces
        starts = torch.randint(len(text) - CONTEXT, (MICRO_BATCH,), generator=generator)
        batch = torch.stack([text[s : s + CONTEXT + 1] for s in starts]).to(device)
        with probe.piece(units=len(batch)):
            loss = nn.functional.cross_entropy(model(batch[:, :-1]), batch[:, -1])
            (loss / MICRO_BATCHES).backward()
    probe.log(loss=loss)
    probe.clip_grad_norm_(1.0)  # the norm of the whole model; the same collective carries the noise scale
    optimizer.step()
    optimizer.zero_grad()

reading = probe.reading()  # the same on every rank
if rank == 0:
    print(reading)
probe.close()
dist.barrier()  # gloo may abort a rank whose peer has left already
dist.destroy_process_group()
