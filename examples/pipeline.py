"""Pipeline parallelism under torchrun: two stages, whose micro-batches are the pieces of the noise scale.

torchrun --nproc-per-node 2 examples/pipeline.py
"""

from __future__ import annotations

import pydoc_data.topics
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

import sonde

CONTEXT, MICRO_BATCH, MICRO_BATCHES = 16, 16, 8

dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
if dist.get_world_size() != 2:
    raise SystemExit("this pipeline has 2 stages, one on each rank: run it with torchrun --nproc-per-node 2")
rank = dist.get_rank()
device = torch.device("cuda", rank % torch.cuda.device_count()) if torch.cuda.is_available() else torch.device("cpu")
if device.type == "cuda":
    torch.cuda.set_device(device)

text = torch.frombuffer(bytearray(Path(pydoc_data.topics.__file__).read_bytes()), dtype=torch.uint8).long()
generator = torch.Generator().manual_seed(0)  # both stages work on the same data

torch.manual_seed(0)
parts = [
    nn.Sequential(nn.Embedding(256, 32), nn.Flatten(), nn.Linear(32 * CONTEXT, 256)),
    nn.Sequential(nn.GELU(), nn.Linear(256, 256)),
]
mesh = init_device_mesh(device.type, (2,), mesh_dim_names=("pp",))
model = parts[rank].to(device)
stage = PipelineStage(model, rank, 2, device, group=mesh.get_group("pp"))
schedule = Schedule1F1B(stage, MICRO_BATCHES, loss_fn=nn.functional.cross_entropy)
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
log = sonde.RunLog(sonde.JsonlSink("runs/pipeline"))
probe = sonde.attach(model, optimizer, unit="contexts", every=1, mesh=mesh, pp_mesh=mesh["pp"], log=log)

for _ in range(150):
    starts = torch.randint(len(text) - CONTEXT, (MICRO_BATCHES * MICRO_BATCH,), generator=generator)
    batch = torch.stack([text[s : s + CONTEXT + 1] for s in starts]).to(device)
    with probe.pieces(MICRO_BATCHES, units=MICRO_BATCH):
        if rank == 0:
            schedule.step(batch[:, :-1])
        else:
            schedule.step(target=batch[:, -1])
    probe.clip_grad_norm_(1.0)  # the norm over both stages; the same collective carries the noise scale
    optimizer.step()
    optimizer.zero_grad()

reading = probe.reading()  # the same on every rank
if rank == 0:
    print(reading)
probe.close()
dist.barrier()  # gloo may abort a rank whose peer has left already
dist.destroy_process_group()
