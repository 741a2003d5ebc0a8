"""Real trainings with the unbiased tr Σ and |G|² of every window, and far more exact values beside them.

    python -m benchmarks.recorded_runs TASK OPTIMIZER SCHEDULE STEPS SEED [--out FOLDER]

Four tasks: a byte-level language model on the sources of Python's standard library, a convolutional network and a
perceptron on scikit-learn's digits (the latter with wrong labels on a tenth of them), and a policy that learns to add
two digits by GRPO, whose units are prompts. Or the demo, as `make demo` trains it. Examples are drawn with replacement.
Every few steps, training stops for the exact values: of all 1,797 digits, or of 16 times a batch of fresh units.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal, get_args

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn import functional as F

from sonde.batch_size.stats.noise_scale import noise_scale
from sonde.demos.byte_lm.task import ByteTransformer, draw_windows, find_sources, read_corpus
from sonde.demos.byte_lm.train import MAX_GRAD_NORM, next_byte_loss, rate_at

TaskName = Literal["lm", "digits", "mlp", "grpo", "demo"]
Optimizer = Literal["adamw", "sgd"]
Schedule = Literal["constant", "warmup", "decay", "jump", "still"]
N_PIECES = 4
DENSE = 30
"""The first steps, all of which have exact values."""
FOLDER = Path("build/recorded-runs")


@dataclass(frozen=True)
class Recorded:
    """One training.

    Attributes:
        task: what was trained.
        optimizer: "adamw" or "sgd", which has a momentum of 0.9.
        schedule: of the rate: constant; a warm-up over a tenth of the run; a cosine to a tenth; a fall to a tenth after
            0.6 of the run; or 0 after step 200, so that weights are still.
        seed: of weights and data.
        batch: units of a window.
        windows: tr Σ and |G|² of each window, from its 4 pieces.
        exact: [step, tr Σ, |G|²] where training stopped, before the step.
    """

    task: TaskName
    optimizer: Optimizer
    schedule: Schedule
    seed: int
    batch: int
    windows: list[list[float]]
    exact: list[list[float]]

    @property
    def name(self) -> str:
        """Of its file."""
        return f"{self.task}-{self.optimizer}-{self.schedule}-{len(self.windows)}-{self.seed}"

    @property
    def jumps(self) -> list[int]:
        """Steps after which the rate is another at once."""
        n = len(self.windows)
        return [int(0.6 * n)] if self.schedule == "jump" else [200] if self.schedule == "still" else []

    def rate_at(self, step: int) -> float:
        """The learning rate of a step over its peak."""
        return rate(self.task, self.schedule, step - 1, len(self.windows))


@dataclass(frozen=True)
class Task:
    """What is trained.

    Attributes:
        model: to be trained.
        draw: draws units, given their number and a generator.
        loss: the mean loss of units.
        batch: units of a window.
        rates: by optimizer.
        exact: tr Σ and |G|² of the present weights.
        max_norm: of the gradient, which is clipped.
        stride: steps between exact values.
    """

    model: nn.Module
    draw: Callable[[int, torch.Generator], Tensor]
    loss: Callable[[Tensor], Tensor]
    batch: int
    rates: dict[str, float]
    exact: Callable[[], tuple[float, float]] | None = None
    max_norm: float = math.inf
    stride: int = 8


def language_model(context: int, width: int, depth: int, batch: int, *, stride: int) -> Task:
    """Bytes of Python's standard library."""
    corpus, model = read_corpus(find_sources()), ByteTransformer(context=context, width=width, depth=depth)
    return Task(
        model,
        lambda n, generator: draw_windows(corpus, n, context, generator),
        lambda windows: next_byte_loss(model, windows),
        batch,
        {"adamw": 1e-3, "sgd": 0.3},
        max_norm=MAX_GRAD_NORM,
        stride=stride,
    )


def digits(*, convolutions: bool) -> Task:
    """scikit-learn's digits, by a convolutional network or a perceptron."""
    from sklearn.datasets import load_digits

    data = load_digits()
    images, labels = torch.tensor(data.data, dtype=torch.float32) / 16, torch.tensor(data.target)
    if convolutions:
        layers = [
            nn.Conv2d(1, 16, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(16, 32, 3, padding=1),
            nn.ReLU(),
        ]
        model = nn.Sequential(nn.Unflatten(1, (1, 8, 8)), *layers, nn.Flatten(), nn.Linear(512, 10))
    else:
        model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 10))
        other = torch.Generator().manual_seed(3)  # so that the loss does not fall to 0
        is_wrong = torch.rand(len(labels), generator=other) < 0.1
        labels = torch.where(is_wrong, torch.randint(10, labels.shape, generator=other), labels)

    def loss_of_one(parameters: dict[str, Tensor], image: Tensor, label: Tensor) -> Tensor:
        return F.cross_entropy(functional_call(model, parameters, (image[None],)), label[None])

    def exact() -> tuple[float, float]:
        parameters = {name: p.detach() for name, p in model.named_parameters()}
        squares, total = 0.0, torch.zeros(sum(p.numel() for p in model.parameters()), dtype=torch.float64)
        for some, of_these in zip(images.split(300), labels.split(300), strict=True):
            each = vmap(grad(loss_of_one), (None, 0, 0))(parameters, some, of_these)
            table = torch.cat([g.flatten(1) for g in each.values()], 1).double()
            squares, total = squares + float(table.square().sum()), total + table.sum(0)
        signal = float((total / len(images)).square().sum())
        return squares / len(images) - signal, signal

    return Task(
        model,
        lambda n, generator: torch.randint(len(images), (n,), generator=generator),
        lambda chosen: F.cross_entropy(model(images[chosen]), labels[chosen]),
        64 if convolutions else 32,
        {"adamw": 1e-3, "sgd": 0.02 if convolutions else 0.05},
        exact,
    )


def policy(group: int = 8) -> Task:
    """Sums of two digits, of which each prompt is answered 8 times; the reward is the share of right digits."""
    model = ByteTransformer(context=5, width=32, depth=2, n_heads=2)
    prompts = torch.tensor([[48 + a, 43, 48 + b, 61] for a in range(10) for b in range(10)])
    right = torch.tensor([[48 + (a + b) // 10, 48 + (a + b) % 10] for a in range(10) for b in range(10)])
    sampling = torch.Generator().manual_seed(11)

    def loss(chosen: Tensor) -> Tensor:
        texts = prompts[chosen].repeat_interleave(group, 0)
        with torch.no_grad():
            for _ in range(2):
                odds = model(texts)[:, -1, 48:58].softmax(-1)
                texts = torch.cat([texts, 48 + torch.multinomial(odds, 1, generator=sampling)], 1)
        rewards = (texts[:, 4:] == right[chosen].repeat_interleave(group, 0)).double().mean(1).view(-1, group)
        advantages = (rewards - rewards.mean(1, keepdim=True)).flatten().float()
        logs = model(texts[:, :-1])[:, 3:, 48:58].log_softmax(-1)
        taken = logs.gather(2, texts[:, 4:, None] - 48).sum((1, 2))
        return -(advantages * taken).mean()

    draw = lambda n, generator: torch.randint(100, (n,), generator=generator)  # noqa: E731
    return Task(model, draw, loss, 16, {"adamw": 1e-3, "sgd": 0.3})


TASKS: dict[str, Callable[[], Task]] = {
    "lm": lambda: language_model(64, 64, 4, 32, stride=8),
    "demo": lambda: language_model(96, 128, 5, 32, stride=3),
    "digits": lambda: digits(convolutions=True),
    "mlp": lambda: digits(convolutions=False),
    "grpo": policy,
}


def rate(task: TaskName, schedule: Schedule, step: int, n_steps: int) -> float:
    """The learning rate over its peak, from step 0."""
    if task == "demo":
        return rate_at(step, n_steps)
    warm = min(1.0, (step + 1) / 20)
    return {
        "constant": 1.0,
        "warmup": min(1.0, (step + 1) / (0.1 * n_steps)),
        "decay": warm * (0.1 + 0.9 * (1 + math.cos(math.pi * step / n_steps)) / 2),
        "jump": warm * (1.0 if step < 0.6 * n_steps else 0.1),
        "still": 1.0 if step < 200 else 0.0,
    }[schedule]


def record(task_name: TaskName, optimizer_name: Optimizer, schedule: Schedule, n_steps: int, seed: int) -> Recorded:
    """Train, and record all windows."""
    torch.manual_seed(seed)
    task = TASKS[task_name]()
    parameters, peak = list(task.model.parameters()), task.rates[optimizer_name]
    betas = (0.9, 0.99 if task_name in ("lm", "demo") else 0.999)
    optimizer = (
        torch.optim.AdamW(parameters, peak, betas)
        if optimizer_name == "adamw"
        else torch.optim.SGD(parameters, peak, momentum=0.9)
    )
    data, fresh = (torch.Generator().manual_seed(s) for s in (1000 + seed, 7))
    windows, exact = [], []
    for step in range(n_steps):
        for options in optimizer.param_groups:
            options["lr"] = peak * rate(task_name, schedule, step, n_steps)
        estimate, gradient = estimated(task, parameters, task.draw(task.batch, data).chunk(N_PIECES))
        windows.append(list(estimate))
        if step < DENSE or step % task.stride == 0:
            many = task.draw(16 * task.batch, fresh).split(task.batch)
            exact.append([step + 1, *(task.exact() if task.exact else estimated(task, parameters, many)[0])])
        for parameter, each in zip(parameters, gradient, strict=True):
            parameter.grad = each
        nn.utils.clip_grad_norm_(parameters, task.max_norm)
        optimizer.step()
    return Recorded(task_name, optimizer_name, schedule, seed, task.batch, windows, exact)


def estimated(
    task: Task, parameters: Sequence[Tensor], pieces: Sequence[Tensor]
) -> tuple[tuple[float, float], list[Tensor]]:
    """tr Σ and |G|² from pieces of equally many units, and the mean gradient."""
    squares, total = 0.0, [torch.zeros_like(p) for p in parameters]
    for piece in pieces:
        gradients = torch.autograd.grad(task.loss(piece), parameters)
        squares += sq_norm(gradients)
        for into, each in zip(total, gradients, strict=True):
            into.add_(each, alpha=1 / len(pieces))
    n_small, n_pieces = len(pieces[0]), len(pieces)
    found = noise_scale(squares / n_pieces, sq_norm(total), n_small=n_small, n_big=n_small * n_pieces)
    return (found.trace_cov, found.grad_sq), total


def sq_norm(gradients: Sequence[Tensor]) -> float:
    """The squared norm, in float64."""
    return sum(float(g.double().square().sum()) for g in gradients)


def load(path: Path) -> Recorded:
    """A training that was recorded before."""
    return Recorded(**json.loads(path.read_text()))


def main() -> None:
    """Record one training, unless its file is there."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("task", choices=get_args(TaskName))
    parser.add_argument("optimizer", choices=get_args(Optimizer))
    parser.add_argument("schedule", choices=get_args(Schedule))
    parser.add_argument("steps", type=int)
    parser.add_argument("seed", type=int)
    parser.add_argument("--out", type=Path, default=FOLDER)
    options = parser.parse_args()
    torch.set_num_threads(1)
    path = options.out / f"{options.task}-{options.optimizer}-{options.schedule}-{options.steps}-{options.seed}.json"
    if path.exists():
        return
    options.out.mkdir(parents=True, exist_ok=True)
    made = record(options.task, options.optimizer, options.schedule, options.steps, options.seed)
    path.write_text(json.dumps(asdict(made)))
    print(path, flush=True)


if __name__ == "__main__":
    main()
