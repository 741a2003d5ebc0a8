"""Many trainings of one small model at once, with other rates and seeds: parameters are stacked, [replicas, …].

A model that takes microseconds is bound by the calls that torch makes, not by its arithmetic. One call for all replicas
takes hardly longer than one for a single model. Each replica does what `make_optimizers` would do with it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.func import functional_call, stack_module_state, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

from evidence.tasks import BETAS, MUON_MOMENTUM, Task, Units, momentum_of, muon_takes

EPS = 1e-8
AT_ONCE = 1600
"""Units of all replicas together that go through the models at once."""
NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
"""Coefficients of Muon's iteration: K. Jordan et al. 2024, https://kellerjordan.github.io/posts/muon/."""


class Replicas:
    """Trainings of each seed with each rate.

    Args:
        task: what is trained.
        kind: of optimizer.
        seeds: of weights and data.
        rates: learning rates; each replica of a seed sees the same data.
    """

    def __init__(self, task: Task, kind: str, seeds: Sequence[int], rates: Sequence[float]) -> None:
        self._task, self._kind, self._n_rates, self._n_steps = task, kind, len(rates), 0
        self._data = [torch.Generator().manual_seed(1000 + seed) for seed in seeds]
        models = [begun(task, seed) for seed in seeds for _ in rates]
        self._model = models[0]
        self.parameters: dict[str, Tensor] = stack_module_state(models)[0]
        self._rates = torch.tensor(rates).repeat(len(seeds))
        self._first = {name: torch.zeros_like(p) for name, p in self.parameters.items()}
        self._second = {name: torch.zeros_like(p) for name, p in self.parameters.items()}

    def step(self, batch: int, factor: float = 1.0) -> None:
        """One step of all, on the next units of each seed, at their rates times a factor."""
        drawn = [self._task.draw(batch, generator) for generator in self._data]
        inputs, targets = (torch.stack(each).repeat_interleave(self._n_rates, 0) for each in zip(*drawn, strict=True))
        gradients = self._gradients(inputs, targets)
        self._n_steps += 1
        with torch.no_grad():
            for (name, parameter), gradient in zip(self.parameters.items(), gradients, strict=True):
                update = self._update(name, gradient)
                parameter.sub_(update.mul_(factor * self._rates.view(-1, *(1,) * (update.ndim - 1))))

    def _gradients(self, inputs: Tensor, targets: Tensor) -> list[Tensor]:
        """Of each replica's mean loss, some units at a time: what they leave in memory must fit the cache."""
        batch, parameters = inputs.shape[1], [*self.parameters.values()]
        total = [torch.zeros_like(p) for p in parameters]
        size = max(AT_ONCE // len(inputs), 1)
        for some, of_these in zip(inputs.split(size, 1), targets.split(size, 1), strict=True):
            with sdpa_kernel(SDPBackend.MATH):  # the only one that vmap takes without a loop
                losses = vmap(self._loss)(self.parameters, some, of_these)
            gradients = torch.autograd.grad(losses.sum(), parameters)
            torch._foreach_add_(total, gradients, alpha=some.shape[1] / batch)
        return total

    def held_out_losses(self) -> Tensor:
        """Of each seed with each rate: [seeds, rates]."""
        with torch.no_grad(), sdpa_kernel(SDPBackend.MATH):
            losses = vmap(self._loss, (0, None, None))(self.parameters, *self._task.held_out)
        return losses.view(-1, self._n_rates)

    def _loss(self, parameters: dict[str, Tensor], inputs: Tensor, targets: Tensor) -> Tensor:
        return self._task.loss(functional_call(self._model, parameters, (inputs,)), targets)

    def _update(self, name: str, gradient: Tensor) -> Tensor:
        """The step at a rate of 1; gradient: [replicas, …]."""
        first = self._first[name]
        if self._kind.startswith("sgd"):
            beta = momentum_of(self._kind)
            return first.mul_(beta).add_(gradient) * (1 - beta)
        if self._kind == "muon" and muon_takes(name, gradient[0]):
            first.lerp_(gradient, 1 - MUON_MOMENTUM)
            scale = 0.2 * math.sqrt(max(gradient.shape[1:]))  # "match_rms_adamw"
            return scale * orthogonal(gradient.lerp(first, MUON_MOMENTUM))
        first.lerp_(gradient, 1 - BETAS[0])
        second = self._second[name].mul_(BETAS[1]).addcmul_(gradient, gradient, value=1 - BETAS[1])
        size = (second / (1 - BETAS[1] ** self._n_steps)).sqrt_().add_(EPS)
        return first / (1 - BETAS[0] ** self._n_steps) / size


def orthogonal(matrices: Tensor) -> Tensor:
    """Muon's five steps towards the nearest orthogonal matrix, in float32; matrices: [replicas, rows, columns]."""
    a, b, c = NEWTON_SCHULZ
    is_tall = matrices.shape[1] > matrices.shape[2]
    x: Tensor = matrices.mT if is_tall else matrices
    x = x / x.flatten(1).norm(dim=1).clamp(min=1e-7)[:, None, None]
    for _ in range(5):
        gram = x @ x.mT
        x = a * x + torch.baddbmm(gram, gram, gram, beta=b, alpha=c) @ x
    return x.mT if is_tall else x


def begun(task: Task, seed: int) -> nn.Module:
    """A model with the weights of a seed."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return task.model()


def mean_loss(task: Task, model: nn.Module, units: Units) -> Tensor:
    """The loss of one model."""
    return task.loss(model(units[0]), units[1])
