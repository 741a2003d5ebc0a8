"""FSDP2 under torchrun: clip by the norm of the whole model's gradient, planned once.

torchrun --nproc-per-node 2 examples/fsdp2_clip.py
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

CONTEXT, BATCH = 16, 64

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
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, fused=True)
plan = sonde.group_parameters_for_norm(model, mesh=mesh)

for step in range(60):
    starts = torch.randint(len(text) - CONTEXT, (BATCH,), generator=generator)
    batch = torch.stack([text[s : s + CONTEXT + 1] for s in starts]).to(device)
    loss = nn.functional.cross_entropy(model(batch[:, :-1]), batch[:, -1])
    loss.backward()
    norm = sonde.clip_grad_norm_distributed_(plan, 1.0)
    optimizer.step()
    optimizer.zero_grad()
    if step % 20 == 19 and rank == 0:
        print(f"step {step + 1}: loss {loss:.3f}, gradient norm {norm:.3f}")  # the same norm on every rank

dist.barrier()  # gloo may abort a rank whose peer has left already
dist.destroy_process_group()
