"""A small training with every kind of state that a loop may have, and all of that state as it is now."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional


class Sampler:
    """Deals the rows of a data set in random order, with a position, as a stateful DataLoader does.

    Like many such classes, it shares a list with the state that it saves and loads.
    """

    def __init__(self, n: int) -> None:
        self._taken: list[int] = []
        self._n, self._generator = n, torch.Generator().manual_seed(0)
        self.reseed(0)

    def reseed(self, seed: int) -> None:
        self._generator.manual_seed(seed)
        self._order, self._at = torch.randperm(self._n, generator=self._generator), 0

    def take(self, n: int) -> Tensor:
        if self._at + n > self._n:
            self._order, self._at = torch.randperm(self._n, generator=self._generator), 0
        self._at += n
        self._taken.append(n)
        return self._order[self._at - n : self._at]

    def state_dict(self) -> dict[str, Any]:
        return {"order": self._order, "at": self._at, "generator": self._generator.get_state(), "taken": self._taken}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._order, self._at, self._taken = state["order"], state["at"], state["taken"]
        self._generator.set_state(state["generator"])


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.05),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9, nesterov=True),
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
    "rate in a tensor": lambda parameters: torch.optim.AdamW(parameters, lr=torch.tensor(0.01)),
    "LBFGS": lambda parameters: torch.optim.LBFGS(parameters, lr=0.1, max_iter=2, history_size=3),
}


@dataclass
class Training:
    """A training of a small network; see `training`."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    schedule: torch.optim.lr_scheduler.LRScheduler
    sampler: Sampler
    dice: random.Random

    def step(self, batch: int) -> None:
        """One optimizer step, with random draws of all kinds."""
        rows = self.sampler.take(batch)
        noise = random.random() + np.random.rand() + self.dice.random()

        def closure() -> Tensor:
            self.optimizer.zero_grad()
            loss = functional.cross_entropy(self.model(X[rows] + 0.01 * noise), Y[rows])
            loss.backward()
            return loss

        self.optimizer.step(closure)  # type: ignore[arg-type]
        self.schedule.step()

    def loss(self) -> Tensor:
        """Held-out loss."""
        self.model.eval()
        with torch.no_grad():
            return functional.cross_entropy(self.model(HELD_OUT), OF_HELD_OUT)

    def state(self) -> dict[str, Any]:
        """For `sonde.branch`."""
        dice = (self.dice.getstate, self.dice.setstate)
        of_loop = {"schedule": self.schedule, "sampler": self.sampler, "dice": dice}
        return {"model": self.model, "optimizer": self.optimizer, **of_loop}

    def everything(self) -> list[Any]:
        """All that the training depends on, in copies."""
        parameters = list(self.model.parameters())
        tensors = [*parameters, *self.model.buffers(), *(p.grad for p in parameters), torch.get_rng_state()]
        rest = [self.optimizer.state_dict(), self.schedule.state_dict(), self.sampler.state_dict()]
        numpy_state: Any = np.random.get_state()
        draws = [random.getstate(), numpy_state[1].tolist(), self.dice.getstate()]
        modes = [m.training for m in self.model.modules()] + [p.requires_grad for p in parameters]
        hooks = len(self.optimizer._optimizer_step_pre_hooks)
        return [_plain(each) for each in (*tensors, *rest, *draws, modes, hooks)]


def _plain(value: Any) -> Any:
    """Tensors as their bytes, which are compared bit for bit."""
    if isinstance(value, Tensor):
        return value.dtype, tuple(value.shape), value.detach().numpy().tobytes()
    if isinstance(value, dict):
        return {name: _plain(each) for name, each in value.items() if not callable(each)}
    return [_plain(each) for each in value] if isinstance(value, list | tuple) else value


_generator = torch.Generator().manual_seed(1)
X, HELD_OUT = torch.randn(512, 6, generator=_generator), torch.randn(64, 6, generator=_generator)
Y, OF_HELD_OUT = (each[:, :3].argmax(1) for each in (X + torch.randn(512, 6, generator=_generator), HELD_OUT))


def training(optimizer: str = "momentum", n_steps: int = 3) -> Training:
    """A training with dropout, batch normalisation, a frozen layer and a schedule, after some steps."""
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)
    model = nn.Sequential(
        nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Dropout(0.1), nn.ReLU(), nn.Linear(16, 8), nn.Linear(8, 3)
    )
    model[4].requires_grad_(False)
    stepped = OPTIMIZERS[optimizer](p for p in model.parameters() if p.requires_grad)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(stepped, 40)
    made = Training(model, stepped, schedule, Sampler(512), random.Random(0))
    for _ in range(n_steps):
        made.step(8)
    return made
