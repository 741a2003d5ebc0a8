"""Training scripts in styles that few use, and that must go on untouched all the same."""

from __future__ import annotations

from tests.commands.scripts import DDP, PLAIN, START

THREADS = """
import threading
together, trained = threading.Barrier(3), {}

def train(number):
    model = nn.Linear(6, 1)
    nn.init.constant_(model.weight, number)
    nn.init.zeros_(model.bias)
    together.wait()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    for step in range(8):
        for micro in range(2):
            nn.functional.mse_loss(model(torch.full((4, 6), step + micro / 2)), torch.ones(4, 1)).backward()
        optimizer.step()
        optimizer.zero_grad()
    trained[number] = model

threads = [threading.Thread(target=train, args=(number,)) for number in range(3)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
model = nn.ModuleList([trained[number] for number in range(3)])
"""

_SHOWS = "if dist.get_rank() == 0:\n    print(tuple(model{}(torch.ones(2, 6)).shape), flush=True)\n"
SHOWS_BEFORE_IT_WRAPS = DDP.replace(
    "model = DistributedDataParallel(model)\n", _SHOWS.format("") + "model = DistributedDataParallel(model)\n"
)
SHOWS_WHAT_DDP_HOLDS = DDP.replace("# (attach here)\n", _SHOWS.format(".module"))

PICKLES = (
    PLAIN
    + """
import copy, io, pickle
whole = pickle.dumps(model)
x, y = batch()
with torch.serialization.safe_globals({type(m) for m in model.modules()}):
    torch.save(model, saved := io.BytesIO())
    print(torch.equal(torch.load(io.BytesIO(saved.getvalue()), weights_only=True)(x), model(x)))
print(b"sonde" in whole, torch.equal(pickle.loads(whole)(x), model(x)), torch.equal(copy.deepcopy(model)(x), model(x)))
print(torch.equal(torch.jit.trace(model, x)(x), model(x)))
for each in (model, copy.deepcopy(model)):
    print(torch.equal(torch.jit.script(each)(x), model(x)))

def helper(x: torch.Tensor):
    return x + 1

@torch.jit.script
class Scripted:
    def __init__(self, x: torch.Tensor):
        self.x = helper(x)

print(Scripted(torch.ones(1)).x.item())
"""
)

LEARNS_FROM_ITS_ANSWERS = """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.head = nn.Linear(6, 32), nn.Linear(32, 1)
        self.layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)

    def forward(self, x):
        is_padding = torch.arange(12) >= torch.arange(5, 13)[:, None]
        return self.head(self.layer(self.first(x), src_key_padding_mask=is_padding))

model = Model()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
for step in range(20):
    for micro in range(1 + step % 2):
        x = torch.randn(8, 12, 6, generator=generator)
        model.eval()
        with torch.no_grad():
            answer = model(x)
        model.train()
        nn.functional.mse_loss(model(x), x[..., :1] + answer).backward()
    optimizer.step()
    optimizer.zero_grad()
"""

LOGS_TO_STDOUT = START.replace(
    "import torch\n",
    """import logging
import torch

logging.basicConfig(stream=sys.stdout, level=logging.INFO)

class Tee:
    def write(self, text):
        sys.__stdout__.write(text)
    def flush(self):
        sys.__stdout__.flush()

sys.stderr = Tee()
""",
    1,
) + PLAIN.replace(
    "optimizer.step()\n",
    "nn.utils.clip_grad_value_(model.parameters(), 1.0 if step % 2 else 1e-4)\n    optimizer.step()\n",
)

STOPS_ITSELF = (
    PLAIN.replace("model = network()\n", "import os, signal\nmodel = network()\n", 1)
    .replace(
        "    optimizer.step()\n",
        """    optimizer.step()
    if step == 6:
        os.kill(os.getpid(), signal.SIGTERM)
    if asked:
        print("saved", flush=True)
        break
""",
    )
    .replace("for step", "asked = []\nsignal.signal(signal.SIGTERM, lambda *_: asked.append(True))\nfor step", 1)
)

STARTS_CHILDREN = """
import multiprocessing, sys

def train(weights):
    sys.argv = ["train", weights, "of a child"]
    exec(SCRIPT, {"__name__": "child"})

if __name__ == "__main__":
    child = multiprocessing.get_context("fork").Process(target=train, args=(sys.argv[1],))
    child.start()
    child.join()
    print(child.exitcode)
"""

READS_IN_WORKERS = """
class Rows(torch.utils.data.Dataset):
    turned = nn.Linear(6, 6)
    def __len__(self):
        return 48
    def __getitem__(self, number):
        return self.turned(torch.full((6,), float(number))).detach()

if __name__ == "__main__":
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    for x in torch.utils.data.DataLoader(Rows(), batch_size=8, num_workers=2, multiprocessing_context="fork"):
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
"""

RAGGED_SUMS = """
model = network()
optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
# (attach here)
for step in range(12):
    for rows in (8, 8, 2):
        x, y = batch(rows)
        (nn.functional.mse_loss(model(x), y, reduction="sum") / 18).backward()
    # (a window ends here)
    optimizer.step()
    optimizer.zero_grad()
"""

POINTS_OF_ALL_ROWS = """
class Field(nn.Module):
    "The values of each row's function at the points that all rows share."
    def __init__(self):
        super().__init__()
        self.points, self.functions = nn.Linear(2, 4), nn.Linear(6, 4)
    def forward(self, points, functions):
        return (self.functions(functions)[:, None] * self.points(points)).sum(2, keepdim=True)

model = Field()
optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
for step in range(12):
    for micro in range(2):
        model(torch.rand(64, 2), batch(8)[0]).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""

GRADIENTS_BY_HAND = PLAIN.replace(
    "loss.backward()",
    """gradients = torch.autograd.grad(loss, list(model.parameters()))
        for p, gradient in zip(model.parameters(), gradients):
            p.grad = gradient if p.grad is None else p.grad + gradient""",
)

COMPILED = """
import os, torch
from torch import nn


class Whole(nn.Module):
    def __init__(self):
        super().__init__()
        self.line, self.act = nn.Linear(8, 8), nn.GELU()

    def forward(self, x):
        return self.act(self.line(x))


class Broken(Whole):
    def forward(self, x):
        y = self.line(x)
        torch._dynamo.graph_break()
        return self.act(y)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.out = nn.Linear(8, 1)
        self.parts = nn.ModuleList([Broken() if n % 4 == 0 else Whole() for n in range(12)])

    def forward(self, x):
        for part in self.parts:
            x = part(x)
        return self.out(x)


def graphs():
    found = []

    def backend(graph, inputs):
        found.append(len(graph.graph.nodes))
        return graph.forward

    torch.compiler.reset()
    whole, model = nn.Linear(8, 1), Model()
    optimizer = torch.optim.SGD([*whole.parameters(), *model.parameters()], lr=0.1)
    loss, compiled = torch.compile(lambda x: whole(x).mean(), backend=backend), torch.compile(model, backend=backend)
    for rows in (8, 4, 8):
        for _ in range(3):
            x = torch.randn(rows, 8)
            (loss(x) + compiled(x).mean()).backward()
        optimizer.step()
    return found


print(graphs())
if "SONDE_TRIAL" not in os.environ:
    os.environ["SONDE_TRIAL"] = "late"
    from sonde.commands.trial.in_script import StepTimes

    StepTimes()
    print(graphs())
"""
"""Prints how many graphs are compiled; the second time, with the steps timed."""
