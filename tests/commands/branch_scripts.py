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
draw = random.Random(0 if args.wrong == "ignores seed" else args.seed + 1000 * args.batch)
batch = 16 if args.wrong == "ignores batch" else args.batch
every = max(1, int(160 / args.batch))
for step in range(0, (args.steps or 10**9) + 1, every):
    # A power law of the units, of which a batch needs 1 + B/50 times as many.
    loss = (step * args.batch / (1 + batch / 50) + 500) ** -0.5 * (1 + 0.002 * draw.gauss(0, 1) * (step > 0))
    if args.wrong == "ignores batch":
        draw = random.Random(args.seed + step // every)
        loss = 5.0 / (1 + step // every) + draw.random() / 1000
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
