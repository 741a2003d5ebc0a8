"""A training in an ordinary loop, with torch's own optimizers."""

from __future__ import annotations

import contextlib
import copy

import torch

from evidence.replicas import begun, mean_loss
from evidence.tasks import make_optimizers, task
from sonde.batch_size.probe import NoiseScaleProbe

N_PIECES = 4
"""Micro-batches of a step that is measured."""


class Training:
    """One model that is trained.

    Args:
        task_name: what is trained.
        kind: of optimizer.
        batch: units of a step whose best rate is taken.
        seed: of weights and data.
        offset: power of 2 by which the rate differs from the best.
    """

    def __init__(self, task_name: str, kind: str, batch: int, seed: int, offset: float = 0.0) -> None:
        self.task, self.batch, self.n_steps = task(task_name), batch, 0
        self.model = begun(self.task, seed)
        self.optimizers = make_optimizers(kind, self.model, self.task.rates[kind].at(batch) * 2.0**offset)
        self.data = torch.Generator().manual_seed(1000 + seed)

    @property
    def n_units(self) -> int:
        """Trained on so far."""
        return self.n_steps * self.batch

    def step(self, batch: int | None = None, probe: NoiseScaleProbe | None = None, n_pieces: int = N_PIECES) -> float:
        """One step, in one piece or in several that a probe sees.

        Returns:
            The loss of its units.
        """
        inputs, targets = self.task.draw(batch or self.batch, self.data)
        n_pieces = 1 if probe is None else n_pieces
        total = 0.0
        for units in zip(inputs.chunk(n_pieces), targets.chunk(n_pieces), strict=True):
            with contextlib.nullcontext() if probe is None else probe.piece(units=len(units[0])):
                loss = mean_loss(self.task, self.model, units) / n_pieces
                loss.backward()
            total += loss.item()
        for optimizer in self.optimizers:
            optimizer.step()
        self.model.zero_grad()
        self.n_steps += 1
        return total

    def held_out(self) -> float:
        """The held-out loss."""
        with torch.no_grad():
            return mean_loss(self.task, self.model, self.task.held_out).item()

    def kept(self) -> Training:
        """A copy, from which branches may start."""
        twin = copy.copy(self)
        twin.model, twin.optimizers = copy.deepcopy((self.model, self.optimizers))
        twin.data = torch.Generator()
        twin.data.set_state(self.data.get_state())
        return twin
