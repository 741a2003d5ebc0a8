"""A training script as a user would have it, on one of six small tasks: `bench-advice` trains by it and tries it.

python -m benchmarks.advice_training --task gru --optimizer adamw --batch 16 --steps 500 --log runs/gru

Data never end and nothing is seen twice, so a larger batch costs nothing but time. The held-out loss is printed and
kept along the run.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from evidence.tasks import PIXEL_NOISE, corpus, draw_digits, held_out_digits
from torch import Tensor, nn
from torch.nn import functional as F

import sonde
from sonde.demos.byte_lm.task import ByteTransformer, draw_windows

LOOKS = 120
"""Looks at the held-out loss of a training, evenly in its steps."""
ROUNDS, WARM, TIMED = 5, 3, 15
"""Rounds in which each size is timed, its first steps that are not, and those that are."""
Units = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Task:
    """What is trained.

    Attributes:
        model: makes a model, by torch's own random numbers.
        draw: draws units: inputs and targets.
        loss: mean loss per unit, of the model, inputs and targets.
        held_out: units that no training sees.
        batch: of the reference.
        steps: of the reference: it still learns at its end, or a larger batch would win by its smaller noise alone.
        rates: of the reference, by optimizer: the best of a grid of factors of 2, by the loss at the end of one seed.
    """

    model: Callable[[], nn.Module]
    draw: Callable[[int, torch.Generator], Units]
    loss: Callable[[nn.Module, Tensor, Tensor], Tensor]
    held_out: Callable[[], Units]
    batch: int
    steps: int
    rates: dict[str, float]


class Gru(nn.Module):
    """Reads bytes, and gives logits of each next one."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.gru, self.head = nn.Embedding(256, 32), nn.GRU(32, 64, batch_first=True), nn.Linear(64, 256)

    def forward(self, text: Tensor) -> Tensor:
        """[sequences, bytes] → [sequences, bytes, 256]."""
        logits: Tensor = self.head(self.gru(self.embed(text))[0])
        return logits


class Vae(nn.Module):
    """A variational autoencoder of digits with 8 latent numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.encode = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 16))
        self.decode = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 64))

    def forward(self, images: Tensor) -> Tensor:
        """The evidence lower bound of each image, negative, in nats up to a constant: [images]."""
        mean, log_var = self.encode(images).chunk(2, dim=-1)
        noise = torch.randn_like(mean) if self.training else torch.zeros_like(mean)
        error = (self.decode(mean + noise * (log_var / 2).exp()) - images).square().sum(-1) / (2 * 0.1)
        divergence: Tensor = error + (mean.square() + log_var.exp() - 1 - log_var).sum(-1) / 2
        return divergence


def convnet() -> nn.Module:
    """For digits: two convolutions."""
    first = [nn.Unflatten(1, (1, 8, 8)), nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
    second = [nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()]
    return nn.Sequential(*first, *second, nn.Linear(128, 10))


def table() -> nn.Module:
    """Of the tabular task."""
    return nn.Sequential(nn.Linear(24, 128), nn.GELU(), nn.Linear(128, 128), nn.GELU(), nn.Linear(128, 2))


def draw_table(n: int, generator: torch.Generator) -> Units:
    """Rows of 24 numbers, and a label that a random network of them makes likely."""
    rows, teacher = torch.randn(n, 24, generator=generator), torch.Generator().manual_seed(5)
    hidden = torch.tanh(rows @ torch.randn(24, 16, generator=teacher) / 3)
    odds = torch.sigmoid(2 * hidden @ torch.randn(16, generator=teacher))
    return rows, (torch.rand(n, generator=generator) < odds).long()


def draw_text(n: int, generator: torch.Generator) -> Units:
    """32 bytes, and those that follow each."""
    windows = draw_windows(corpus(), n, 32, generator)
    return windows[:, :-1], windows[:, 1:]


def draw_images(n: int, generator: torch.Generator) -> Units:
    """Digits with noise on their pixels, which are to be made again."""
    images, _ = draw_digits(n, generator)
    return images, images


def _held_out(draw: Callable[[int, torch.Generator], Units], n: int) -> Callable[[], Units]:
    return lambda: draw(n, torch.Generator().manual_seed(987_654))


def _held_out_images() -> Units:
    images, _ = held_out_digits()
    noisy = images + PIXEL_NOISE * torch.randn(images.shape, generator=torch.Generator().manual_seed(3))
    return noisy, noisy


def classified(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    """Cross entropy, the mean over units and positions."""
    outputs = model(inputs)
    return F.cross_entropy(outputs.flatten(0, -2), targets.flatten() if targets.dtype == torch.long else targets)


def reproduced(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    """Half the squared error."""
    error: Tensor = (model(inputs) - targets).square().sum(-1).mean() / 2
    return error


def bound(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    """The mean of what the model gives."""
    mean: Tensor = model(inputs).mean()
    return mean


def autoencoder() -> nn.Module:
    """8 numbers for an image of 64 pixels."""
    encode = [nn.Linear(64, 96), nn.Tanh(), nn.Linear(96, 8)]
    return nn.Sequential(*encode, nn.Linear(8, 96), nn.Tanh(), nn.Linear(96, 64))


def _rates(adamw: float, sgd: float, muon: float) -> dict[str, float]:
    return {"adamw": adamw, "sgd": sgd, "muon": muon}


TASKS = {
    "lm": Task(
        lambda: ByteTransformer(context=32, width=64, depth=2, n_heads=4),
        draw_text, classified, _held_out(draw_text, 256), 8, 500, _rates(1e-3, 0.025, 0.005),
    ),
    "gru": Task(Gru, draw_text, classified, _held_out(draw_text, 256), 16, 400, _rates(0.012, 0.6, 0.01)),
    "convnet": Task(convnet, draw_digits, classified, held_out_digits, 16, 250, _rates(0.008, 0.03, 0.01)),
    "table": Task(table, draw_table, classified, _held_out(draw_table, 4096), 16, 500, _rates(0.002, 0.03, 0.0025)),
    "vae": Task(Vae, draw_images, bound, _held_out_images, 16, 500, _rates(0.002, 0.0015, 0.005)),
    "autoencoder": Task(autoencoder, draw_images, reproduced, _held_out_images, 16, 500, _rates(0.002, 0.01, 0.005)),
}  # fmt: skip
OPTIMIZERS = ("adamw", "sgd", "muon")


def optimizers_of(options: argparse.Namespace, model: nn.Module) -> list[torch.optim.Optimizer]:
    """As a user would make them."""
    rate, betas = options.lr, (options.beta1, options.beta2)
    if options.optimizer == "adamw":
        return [torch.optim.AdamW(model.parameters(), rate, betas, options.eps, weight_decay=options.weight_decay)]
    if options.optimizer == "sgd":
        return [torch.optim.SGD(model.parameters(), rate, momentum=0.9)]
    named = dict(model.named_parameters())
    hidden = {n: p for n, p in named.items() if p.ndim == 2 and not any(part in n for part in ("embed", "head"))}
    others = [p for n, p in named.items() if n not in hidden]
    muon = torch.optim.Muon(hidden.values(), rate, weight_decay=0.0, adjust_lr_fn="match_rms_adamw")
    return [muon, torch.optim.AdamW(others, options.other_lr, betas, weight_decay=0.0)]


def parsed() -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--task", choices=TASKS, required=True)
    parser.add_argument("--optimizer", choices=OPTIMIZERS, required=True)
    for name in ("batch", "steps", "seed"):
        parser.add_argument(f"--{name}", type=int, default=0)
    defaults = {"lr": 0.0, "other_lr": 2e-3, "beta1": 0.9, "beta2": 0.99, "eps": 1e-8, "weight_decay": 0.0}
    for name, value in {**defaults, "until": 0.0}.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=float, default=value)
    parser.add_argument("--log", help="a folder for sonde's log")
    parser.add_argument("--losses", help="a file for the held-out losses")
    parser.add_argument("--time", type=int, nargs="*", help="time steps of these batches, and train no further")
    options = parser.parse_args()
    task = TASKS[options.task]
    options.batch, options.steps = options.batch or task.batch, options.steps or task.steps
    options.lr = options.lr or task.rates[options.optimizer]
    return options


def timed(step: Callable[[int], object], sizes: Sequence[int]) -> dict[int, float]:
    """Seconds of a step at each size: the least of medians. Sizes take turns, since a machine is busy for a while."""
    found = dict.fromkeys(sizes, math.inf)
    for _, size in itertools.product(range(ROUNDS), sizes):
        times = []
        for _ in range(WARM + TIMED):
            begun = time.perf_counter()
            step(size)
            times.append(time.perf_counter() - begun)
        found[size] = min(found[size], statistics.median(times[WARM:]))
    return found


def main() -> None:
    """Train, and keep steps and held-out losses; or time steps."""
    options = parsed()
    torch.set_num_threads(1)
    torch.manual_seed(options.seed)
    task = TASKS[options.task]
    model, data, held_out = task.model(), torch.Generator().manual_seed(1000 + options.seed), task.held_out()
    optimizers = optimizers_of(options, model)
    unit, probe = "sequences" if options.task in ("lm", "gru") else "rows", None

    def step(batch: int) -> None:
        task.loss(model, *task.draw(batch, data)).backward()
        for optimizer in optimizers:
            optimizer.step()
        for optimizer in optimizers:
            optimizer.zero_grad()

    if options.time:
        print(json.dumps(timed(step, options.time)))
        return
    if options.log:
        probe = sonde.attach(model, optimizers, unit=unit, log=options.log)
    losses, every = [], max(options.steps // LOOKS, 1)
    for n in range(options.steps + 1):
        if n % every == 0 or n == options.steps:
            model.eval()
            with torch.no_grad():
                losses.append((n, task.loss(model, *held_out).item()))
            model.train()
            if probe is not None:
                probe.log(eval_loss=losses[-1][1])
            if len(losses) >= 3 and all(loss <= options.until for _, loss in losses[-3:]):
                break
        if n < options.steps:
            step(options.batch)
    if probe is not None:
        probe.close()
    print(f"held-out loss {losses[-1][1]:.4f} after {losses[-1][0]} steps of {options.batch}")
    if options.losses:
        Path(options.losses).write_text(json.dumps(losses))


if __name__ == "__main__":
    main()
