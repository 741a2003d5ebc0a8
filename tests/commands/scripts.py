"""Training scripts in the common styles, as users write them. Each saves its weights to its first argument.

They know nothing of sonde. The two comments show where a script that attaches a probe by itself would do so.
"""

from __future__ import annotations

ATTACH, STEP = "# (attach here)", "# (a window ends here)"

START = """
import sys
import torch
import torch.distributed as dist
from torch import nn

torch.manual_seed(0)
generator = torch.Generator().manual_seed(7)

def batch(rows=8):
    x = torch.randn(rows, 6, generator=generator)
    return x, x[:, :1] + 0.5 * torch.randn(rows, 1, generator=generator)

def network():
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1))
"""

END = """
print(sys.argv[2:], torch.rand(1).item(), flush=True)
torch.save(model.state_dict(), sys.argv[1])
"""


def whole(script: str) -> str:
    """A script as a file: with `START` if it imports no torch, and with `END` if it does not save by itself."""
    start = "" if "import torch\n" in script else START
    return start + script + ("" if "sys.argv[1]" in script else END)


PLAIN = """
model = network()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
model.eval()
with torch.no_grad():
    print(model(batch(32)[0]).sum().item())
model.train()
# (attach here)
for step in range(12):
    for micro in range(4):
        x, y = batch()
        loss = nn.functional.mse_loss(model(x), y) / 4
        loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    # (a window ends here)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
"""

COMPILED = """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(6, 16), nn.Linear(16, 1)
    def forward(self, x):
        return self.head(torch.tanh(self.body(x)))

model = Model()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
model = torch.compile(model, backend="aot_eager")
with torch.no_grad():
    print(model(batch()[0]).sum().item())
# (attach here)
for step in range(12):
    for micro in range(3):
        x, y = batch()
        nn.functional.mse_loss(model(x), y).backward()
    # (a window ends here)
    optimizer.step()
    optimizer.zero_grad()
"""

AMP = """
model = network()
optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**20, growth_interval=3)
# (attach here)
for step in range(14):
    for micro in range(2):
        x, y = batch()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = nn.functional.mse_loss(model(x).float(), y)
        if step == 5 and micro:
            loss = loss * 1e38  # an overflow: this step is left out
        scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    # (a window ends here)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
"""

GAN = """
class Gan(nn.Module):
    def __init__(self):
        super().__init__()
        self.g, self.d = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 6)), network()

model = Gan()
of_g = torch.optim.Adam(model.g.parameters(), lr=1e-3)
of_d = torch.optim.Adam(model.d.parameters(), lr=1e-3)
bce = nn.functional.binary_cross_entropy_with_logits
for step in range(12):
    real, fake = batch()[0], model.g(torch.randn(8, 3, generator=generator))
    of_d.zero_grad()
    both = torch.cat([real, fake.detach()])
    of_d_loss = bce(model.d(both), torch.cat([torch.ones(8, 1), torch.zeros(8, 1)]))
    of_d_loss.backward()
    of_d.step()
    of_g.zero_grad()
    bce(model.d(fake), torch.ones(8, 1)).backward()
    of_g.step()
"""

GAN_OF_TWO_LOSSES = GAN.replace(
    "bce(model.d(both), torch.cat([torch.ones(8, 1), torch.zeros(8, 1)]))", "bce(model.d(real), torch.ones(8, 1))"
).replace(
    "of_d_loss.backward()",
    "of_d_loss.backward()\n    bce(model.d(fake.detach()), torch.zeros(8, 1)).backward()",
)

CLOSURE = """
model = network()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
def closure():
    optimizer.zero_grad()
    x, y = batch(16)
    loss = nn.functional.mse_loss(model(x), y)
    loss.backward()
    return loss
optimizer.step(closure)  # the model is called in closures alone, so it is not known before the first of them
# (attach here)
for step in range(12):
    print(optimizer.step(closure).item())
"""

DDP = """
import contextlib
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
generator.manual_seed(dist.get_rank())
model = network()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
model = DistributedDataParallel(model)
# (attach here)
for step in range(12):
    for micro in range(2):
        x, y = batch()
        with model.no_sync() if micro == 0 else contextlib.nullcontext():
            (nn.functional.mse_loss(model(x), y) / 2).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    # (a window ends here)
    optimizer.step()
    optimizer.zero_grad()
if dist.get_rank() == 0:
    print(sys.argv[2:], torch.rand(1).item(), flush=True)
    torch.save(model.module.state_dict(), sys.argv[1])
dist.destroy_process_group()
"""

FSDP2 = """
from torch.distributed.fsdp import fully_shard

dist.init_process_group("gloo")
generator.manual_seed(dist.get_rank())
model = network()
fully_shard(model[0])
fully_shard(model)  # after a forward without gradients, it shows its own parameters gathered
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
with torch.no_grad():
    model(batch()[0])
# (attach here)
for step in range(12):
    for micro in range(2):
        x, y = batch()
        nn.functional.mse_loss(model(x), y).backward()
    # (a window ends here)
    optimizer.step()
    optimizer.zero_grad()
weights = {name: p.full_tensor() for name, p in model.state_dict().items()}
if dist.get_rank() == 0:
    print(sys.argv[2:], torch.rand(1).item(), flush=True)
    torch.save(weights, sys.argv[1])
dist.destroy_process_group()
"""

BY_HAND = """
dist.init_process_group("gloo")
generator.manual_seed(dist.get_rank())
model = network()
optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
# (attach here)
for step in range(12):
    x, y = batch()
    nn.functional.mse_loss(model(x), y).backward()
    for p in model.parameters():
        dist.all_reduce(p.grad)
        p.grad /= dist.get_world_size()
    # (a window ends here)
    optimizer.step()
    optimizer.zero_grad()
if dist.get_rank() == 0:
    print(sys.argv[2:], torch.rand(1).item(), flush=True)
    torch.save(model.state_dict(), sys.argv[1])
dist.destroy_process_group()
"""

ENDINGS = {
    "crash": "raise ValueError('the script has a mistake')",
    "exit 3": "sys.exit(3)",
    "interrupted": "import os, signal\nos.kill(os.getpid(), signal.SIGINT)",
    "terminated": "import os, signal\nos.kill(os.getpid(), signal.SIGTERM)",
}
"""What a script may do after its steps, in place of ending."""

NEVER_TRAINS = """
import argparse, sys
import torch
parser = argparse.ArgumentParser()
parser.add_argument("weights")
parser.add_argument("--lr", type=int)
print(parser.parse_args().lr, sys.argv[2:], [path for path in sys.path if "on_start" in path])
torch.save({}, sys.argv[1])
"""
