"""What is trained: tasks with data that never end, one held-out set each, and their optimizers.

A unit is an image, a sequence of 16 bytes, or a row. Digits are drawn with fresh noise on pixels and labels, text is
far longer than any training, rows are Gaussian: so nothing is seen twice, and training does not overfit.

Data:
    Optical recognition of handwritten digits, E. Alpaydin and C. Kaynak, UCI Machine Learning Repository,
    https://doi.org/10.24432/C50P49 (CC BY 4.0), in the file that scikit-learn distributes.
"""

from __future__ import annotations

import csv
import functools
import gzip
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sonde.demos.byte_lm.task import ByteTransformer, draw_windows, find_sources, read_corpus

Units = tuple[Tensor, Tensor]
"""Inputs and what they should give, of several units: the first dim."""
CONTEXT = 16
WRONG = 0.1
"""Part of the digits whose label is any of the 10."""
PIXEL_NOISE = 0.1
N_HELD_OUT = 360
DIMS, OUTPUTS, ROW_NOISE = 32, 8, 0.5
"""Of the regression."""
BETAS = (0.9, 0.99)
MUON_MOMENTUM = 0.95


@dataclass(frozen=True)
class Rate:
    """The rate of an optimizer that was found best in the sweep: peak/(1 + turn/batch)^power.

    Attributes:
        peak: of large batches.
        turn: batch size at which the rate begins to fall; a power of 1/2 halves it at three times as small a batch.
        power: 1 for SGD, 1/2 for the others.
    """

    peak: float
    turn: float
    power: float

    def at(self, batch: float) -> float:
        """The rate of a batch."""
        return float(self.peak / (1 + self.turn / batch) ** self.power)


@dataclass(frozen=True)
class Task:
    """A model, and units without end.

    Attributes:
        name: of the task.
        unit: plural name of its unit.
        model: makes a model, by torch's own random numbers.
        draw: draws units, given their number and a generator.
        loss: mean loss of what the model gives, in nats, or half the squared error.
        held_out: units that no training sees. Where labels are noisy, their expected values.
        targets: held-out losses that whole trainings are compared at, from easy to hard.
        rates: by optimizer; those it is trained with.
        length: units that the smallest batch needs for the last target, about.
    """

    name: str
    unit: str
    model: Callable[[], nn.Module]
    draw: Callable[[int, torch.Generator], Units]
    loss: Callable[[Tensor, Tensor], Tensor]
    held_out: Units
    targets: tuple[float, ...]
    rates: Mapping[str, Rate]
    length: int

    def length_at(self, batch: float) -> float:
        """Units that a batch may need, about: twice as many at a batch of 64."""
        return self.length * (1 + batch / 64)


class Patches(nn.Module):
    """The 3 × 3 surroundings of each pixel, so that a linear layer that follows is a convolution.

    Its weight is then a matrix, which Muon takes.
    """

    def forward(self, images: Tensor) -> Tensor:
        """[images, channels, height, width] → [images, height, width, 9 channels]."""
        patches: Tensor = F.unfold(images, 3, padding=1).transpose(1, 2).unflatten(1, images.shape[-2:])
        return patches


class Pooled(nn.Module):
    """Half the height and width."""

    def forward(self, pixels: Tensor) -> Tensor:
        """[images, height, width, channels] → [images, channels, height/2, width/2]."""
        return F.max_pool2d(pixels.permute(0, 3, 1, 2), 2)


@functools.cache
def digits() -> tuple[Tensor, Tensor]:
    """All 1,797 images, [images, 64] from 0 to 1, and their labels, [images], in a fixed random order."""
    with gzip.open(Path(__file__).parent / "data" / "digits.csv.gz", "rt") as file:
        table = torch.tensor([[float(cell) for cell in row] for row in csv.reader(file)])
    table = table[torch.randperm(len(table), generator=torch.Generator().manual_seed(0))]
    return table[:, :-1] / 16, table[:, -1].long()


def draw_digits(n: int, generator: torch.Generator) -> Units:
    """Images with noise on their pixels, some with another label."""
    images, labels = (each[N_HELD_OUT:] for each in digits())
    chosen = torch.randint(len(images), (n,), generator=generator)
    noise = PIXEL_NOISE * torch.randn(n, 64, generator=generator)
    is_wrong = torch.rand(n, generator=generator) < WRONG
    wrong = torch.randint(10, (n,), generator=generator)
    return images[chosen] + noise, torch.where(is_wrong, wrong, labels[chosen])


def held_out_digits() -> Units:
    """Images that are never drawn, and the odds of each label."""
    images, labels = (each[:N_HELD_OUT] for each in digits())
    return images, (1 - WRONG) * F.one_hot(labels, 10).float() + WRONG / 10


@functools.cache
def corpus() -> Tensor:
    """Python's standard library."""
    return read_corpus(find_sources())


def draw_text(n: int, generator: torch.Generator) -> Units:
    """Windows of text: bytes, and those that follow."""
    windows = draw_windows(corpus(), n, CONTEXT, generator)
    return windows[:, :-1], windows[:, 1:]


def spectrum() -> Tensor:
    """Variances of the regression's inputs, which are the eigenvalues of its Hessian: i^−1.5; [dims]."""
    return torch.arange(1, DIMS + 1).float() ** -1.5


@functools.cache
def true_weights() -> Tensor:
    """Of the regression: [outputs, dims]."""
    return torch.randn(OUTPUTS, DIMS, generator=torch.Generator().manual_seed(1)) / math.sqrt(OUTPUTS)


def draw_rows(n: int, generator: torch.Generator) -> Units:
    """Gaussian inputs, and outputs with noise."""
    inputs = torch.randn(n, DIMS, generator=generator) * spectrum().sqrt()
    noise = ROW_NOISE / math.sqrt(OUTPUTS) * torch.randn(n, OUTPUTS, generator=generator)
    return inputs, inputs @ true_weights().T + noise


def held_out_rows() -> Units:
    """As many rows as dims, without noise, whose covariance is exactly that of all: the loss above its least value."""
    inputs = torch.diag((DIMS * spectrum()).sqrt())
    return inputs, inputs @ true_weights().T


def linear_model() -> nn.Module:
    """Weights that begin at 0."""
    model = nn.Linear(DIMS, OUTPUTS, bias=False)
    nn.init.zeros_(model.weight)
    return model


def perceptron() -> nn.Module:
    """For digits: two hidden layers."""
    return nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 10))


def convnet() -> nn.Module:
    """For digits: two convolutions."""
    first = [nn.Unflatten(1, (1, 8, 8)), Patches(), nn.Linear(9, 8), nn.ReLU(), Pooled()]
    second = [Patches(), nn.Linear(72, 16), nn.ReLU(), Pooled(), nn.Flatten()]
    return nn.Sequential(*first, *second, nn.Linear(64, 10))


def cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    """The mean over units and positions."""
    return F.cross_entropy(outputs.flatten(0, -2), targets.flatten() if targets.dtype == torch.long else targets)


def half_squared_error(outputs: Tensor, targets: Tensor) -> Tensor:
    """Summed over outputs, the mean over rows."""
    return (outputs - targets).square().sum(-1).mean() / 2


def _rates(*rates: Rate) -> dict[str, Rate]:
    """Of each kind; with momentum β, the effective rate η/(1 − β)."""
    return dict(zip(OPTIMIZERS, rates, strict=True))


def _of_digits(name: str, model: Callable[[], nn.Module], rates: Mapping[str, Rate]) -> Task:
    return Task(name, "images", model, draw_digits, cross_entropy, held_out_digits(), (1.0, 0.85, 0.78), rates, 4_000)


@functools.cache
def task(name: str) -> Task:
    """A task by its name.

    Raises:
        ValueError: if there is none of that name.
    """
    if name == "regression":
        rates = _rates(Rate(1.6, 16, 1), Rate(8.0, 64, 1), Rate(0.045, 32, 0.5), Rate(0.2, 256, 0.5))
        targets, held_out = (0.3, 0.1, 0.03), held_out_rows()
        return Task(name, "rows", linear_model, draw_rows, half_squared_error, held_out, targets, rates, 4_000)
    if name == "mlp":
        rates = _rates(Rate(0.7, 32, 1), Rate(6.0, 200, 1), Rate(0.02, 100, 0.5), Rate(0.1, 256, 0.5))
        return _of_digits(name, perceptron, rates)
    if name == "convnet":
        rates = _rates(Rate(0.7, 32, 1), Rate(4.5, 200, 1), Rate(0.033, 140, 0.5), Rate(0.11, 500, 0.5))
        return _of_digits(name, convnet, rates)
    if name == "lm":
        rates = _rates(Rate(0.38, 6, 1), Rate(1.8, 16, 1), Rate(0.006, 28, 0.5), Rate(0.05, 200, 0.5))
        model, targets = partial(ByteTransformer, context=CONTEXT, width=32, depth=1, n_heads=2), (3.0, 2.7, 2.5)
        held_out = draw_text(96, torch.Generator().manual_seed(123_456))
        return Task(name, "sequences", model, draw_text, cross_entropy, held_out, targets, rates, 4_000)
    raise ValueError(f"there is no task {name!r}: choose of {', '.join(TASKS)}")


TASKS = ("regression", "mlp", "convnet", "lm")
OPTIMIZERS = ("sgd", "sgd-0.9", "adamw", "muon")


def muon_takes(name: str, parameter: Tensor) -> bool:
    """Whether Muon steps a parameter: hidden matrices; AdamW steps embeddings, the last layer and vectors."""
    return parameter.ndim == 2 and not any(part in name for part in ("embed", "head")) and parameter.shape[0] != 10


def make_optimizers(kind: str, model: nn.Module, rate: float) -> list[torch.optim.Optimizer]:
    """The optimizers of torch that train a model together, without weight decay.

    Args:
        kind: of `OPTIMIZERS`.
        model: whose parameters they step.
        rate: learning rate; for SGD with momentum β the effective one, η/(1 − β).
    """
    if kind.startswith("sgd"):
        beta = momentum_of(kind)
        return [torch.optim.SGD(model.parameters(), rate * (1 - beta), momentum=beta)]
    if kind == "adamw":
        return [torch.optim.AdamW(model.parameters(), rate, BETAS, weight_decay=0.0)]
    named = dict(model.named_parameters())
    hidden = [p for name, p in named.items() if muon_takes(name, p)]
    others = [p for name, p in named.items() if not muon_takes(name, p)]
    muon = torch.optim.Muon(hidden, rate, weight_decay=0.0, momentum=MUON_MOMENTUM, adjust_lr_fn="match_rms_adamw")
    return [muon, torch.optim.AdamW(others, rate, BETAS, weight_decay=0.0)] if others else [muon]


def momentum_of(kind: str) -> float:
    """β of a kind of SGD."""
    return float(kind.partition("-")[2] or 0)
