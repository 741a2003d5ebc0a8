"""Scripts for `sonde branch`. `PRINTS` needs no torch, so that many branches take little time."""

from __future__ import annotations

PRINTS = """
import argparse, random, sys, time

parser = argparse.ArgumentParser()
for name, kind in (("batch", float), ("seed", int), ("steps", int), ("lr", float), ("wrong", str), ("from", int)):
    parser.add_argument("--" + name, type=kind, default=kind(0))
args = parser.parse_args()
if args.wrong == "raises":
    raise RuntimeError("no such data")
draw = random.Random(args.seed + 1000 * args.batch + 7 * args.lr)
batch = args.batch
every = max(1, int(160 / args.batch))
for step in range(0, (args.steps or 10**9) + 1, every):
    # A power law of the units, of which a batch needs 1 + B/50 times as many.
    learnt = min(args.lr or 1, 1) * step * args.batch
    loss = (learnt / (1 + batch / 50) + 500) ** -0.5 * (1 + 0.002 * draw.gauss(0, 1) * (step > 0))
    if args.wrong == "diverges" and batch > 60 and step * batch > 1000:
        loss = float("nan")
    if args.wrong == "decays":  # while the rate is high, the loss is: by a tenth before the end
        loss *= 1.1 if step + every <= args.steps else 1.0
    print(f"step {step + getattr(args, 'from')}: val loss {loss:.6f}")
    if args.wrong == "short" and batch > 60 and step * batch > 1000:
        break
    if args.wrong == "slow":
        time.sleep(0.005)
"""
"""Prints a loss that falls by a known law, with noise."""

PATTERN = r"step (?P<step>\d+): val loss (?P<loss>\S+)"

TRAINS = """
import argparse
import torch
from torch import nn
import sonde

parser = argparse.ArgumentParser()
parser.add_argument("--resume")
parser.add_argument("--batch", type=int)
parser.add_argument("--lr", type=float)
parser.add_argument("--seed", type=int)
args = parser.parse_args()
draw = torch.Generator().manual_seed(args.seed)
held_out = torch.randn(256, 8, generator=torch.Generator().manual_seed(99))
truth = torch.linspace(-1, 1, 8)
model = nn.Linear(8, 1, bias=False)
model.load_state_dict(torch.load(args.resume))
probe = sonde.attach(model, unit="rows", log="runs/mine", verbose=False)
step = 0
while True:
    if step * args.batch % 64 == 0:
        with torch.no_grad():
            probe.log(eval_loss=(model(held_out).squeeze(1) - held_out @ truth).square().mean())
    for _ in range(2):
        x = torch.randn(args.batch // 2, 8, generator=draw)
        (model(x).squeeze(1) - x @ truth - torch.randn(args.batch // 2, generator=draw)).square().mean().backward()
    probe.step()
    with torch.no_grad():  # torch.optim would import for seconds
        model.weight -= args.lr * model.weight.grad
    model.zero_grad()
    step += 1
"""
"""Trains for ever: sonde ends it. Its log has a folder of its own, which would be the same for all branches."""

RESUMES = """
import argparse, json, math, random

parser = argparse.ArgumentParser()
settings = {"lr": 0.05, "beta1": 0.9, "beta2": 0.99, "eps": 1e-8, "weight_decay": 0.1}
for name, kind, default in (("batch", int, 8), ("seed", int, 0), ("steps", int, 40), ("units", int, 0)):
    parser.add_argument("--" + name, type=kind, default=default)
for name, value in settings.items():
    parser.add_argument("--" + name, type=float, default=value)
for name in ("wrong", "resume", "save"):
    parser.add_argument("--" + name, default="")
args = parser.parse_args()
wrong = args.wrong.split("+")

truth = [1.0, -2.0, 0.5, 3.0]
weights, moments, batch, draw = [0.0] * 4, [[0.0, 0.0] for _ in truth], args.batch, random.Random(args.seed)
group = {name: getattr(args, name) for name in settings}  # as torch's optimizers have it
if args.resume:
    saved = json.load(open(args.resume))
    weights, moments = saved["weights"], saved["moments"]
    group |= {name: saved["group"][name] for name in group if name in wrong}  # load_state_dict brings those saved
    if "schedule" in wrong:  # its first rate is that of the loaded state
        group["lr"] = saved["group"]["initial_lr"] * 0.5 * (1 + math.cos(0.0))
    if "batch" in wrong:  # of the data loader that the checkpoint holds
        batch = saved["batch"]
    if "seed" in wrong:  # the random state of the checkpoint replaces it
        draw.setstate((saved["draw"][0], tuple(saved["draw"][1]), saved["draw"][2]))
    if "chance" in wrong:
        draw = random.Random()
if "limits" in wrong:  # "fits" by what a machine's memory takes, "least" by its micro-batch
    group["lr"] = min(group["lr"], 0.03)
if "lighter" in wrong:
    group["weight_decay"] = min(group["weight_decay"], 0.12)
batch = min(batch, 16) if "fits" in wrong else max(batch, 16) if "least" in wrong else batch
batch = batch // 8 * 8 if "rounds" in wrong else batch

def row(of):
    x = [of.gauss(0, 1) for _ in truth]
    return x, sum(a * b for a, b in zip(x, truth)) + of.gauss(0, 1)

def error(x, y):
    return sum(a * b for a, b in zip(x, weights)) - y

held_out = [row(random.Random(k)) for k in range(100)]
EPOCH = 24
steps = args.units // args.batch if args.units else args.steps
if "epochs" in wrong:
    steps = math.ceil(steps / EPOCH) * EPOCH
if {"steps", "units"} & {*wrong}:  # a number of its own
    steps = 200
for step in range(steps + 1):
    if step % 4 == 0 or step == steps:
        loss = sum(error(x, y) ** 2 for x, y in held_out) / len(held_out)
        loss += 6e-5 * random.random() * ("noise" in wrong)
        print(f"step {step}: val loss {loss:.6f}", flush=True)
    if step == steps:
        break
    rows = [row(draw) for _ in range(batch)]
    gradients = [sum(2 * error(x, y) * x[k] for x, y in rows) / len(rows) for k in range(4)]
    for k, gradient in enumerate(gradients):  # AdamW
        betas = (group["beta1"], group["beta2"])
        moments[k] = [b * m + (1 - b) * gradient**p for b, m, p in zip(betas, moments[k], (1, 2))]
        weights[k] *= 1 - group["lr"] * group["weight_decay"]
        weights[k] -= group["lr"] * moments[k][0] / (math.sqrt(moments[k][1]) + group["eps"])
    if "later" in wrong:  # a scheduler sets the rate after each step
        group["lr"] = settings["lr"]
if args.save:
    saved = {"weights": weights, "moments": moments, "batch": batch, "draw": draw.getstate()}
    json.dump(saved | {"group": group | {"initial_lr": group["lr"]}}, open(args.save, "w"))
"""
"""Trains four weights by AdamW, from a checkpoint; `--wrong` names what it ignores, as scripts do."""

LOGS = """
import argparse
import torch
from torch import nn
import sonde

parser = argparse.ArgumentParser()
for name, kind in (("batch", int), ("lr", float), ("weight_decay", float), ("steps", int), ("wrong", str)):
    parser.add_argument("--" + name, type=kind, default=kind(1))
args = parser.parse_args()
if args.wrong != "chance":
    torch.manual_seed(1)
weights = torch.linspace(-1, 1, 8)
held_out = torch.randn(64, 8)
model = nn.Linear(8, 1, bias=False)
rate = args.lr * args.batch**0.5 if args.wrong == "scales" else args.lr
batch = args.batch // 16 * 16 if args.wrong == "rounds" else args.batch
decay = min(args.weight_decay, 0.12) if args.wrong == "limits" else 0.0
optimizer = torch.optim.SGD(model.parameters(), lr=rate, weight_decay=decay)
probe = sonde.attach(model, optimizer, unit="rows", verbose=False)
if args.wrong == "late":  # as a checkpoint does that is loaded now
    optimizer.param_groups[0]["lr"] = 0.02
for step in range(args.steps + 1):
    if step % 4 == 0:
        with torch.no_grad():
            probe.log(eval_loss=(model(held_out).squeeze(1) - held_out @ weights).square().mean())
    for _ in range(2 if step < args.steps else 0):
        x = torch.randn(batch // 2, 8)
        (model(x).squeeze(1) - x @ weights).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""
"""Trains with a log of its own, which shows the rate and the batch."""
