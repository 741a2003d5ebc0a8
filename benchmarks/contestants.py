"""The estimators that are compared, each behind the same two calls of the training loop.

Estimators of other packages run as published: their files are imported unmodified. Only the mapping of their results to
tr Σ and |G|² *per sequence* is written here, from their documented definitions.
"""

from __future__ import annotations

import importlib
import importlib.util
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, Protocol

from torch import Tensor

import sonde
from benchmarks.training import Contestant, Run


@dataclass(frozen=True)
class Estimate:
    """The result of an estimator: tr Σ of one sequence, |G|², and the B_simple that its user would see, if any."""

    trace_cov: float
    grad_sq: float
    b_simple: float | None


class Estimator(Contestant, Protocol):
    """A contestant with a result."""

    def estimate(self) -> Estimate:
        """The result so far."""


class Plain:
    """Training and nothing else. Every cost is measured against it."""

    def __init__(self, run: Run) -> None:
        self.run = run

    def backward(self, loss: Tensor, *, is_last: bool) -> None:
        (loss / self.run.setup.micro_batches).backward()

    def backwards(self, schedule: Callable[[], object]) -> None:
        schedule()

    def step(self) -> None:
        self.run.optimizer.step()
        self.run.optimizer.zero_grad()


class Sonde(Plain):
    """sonde's probe in every window, by hooks on pieces, unless the options say otherwise.

    Args:
        run: that it is attached to.
        report_every: windows from one report to the next; each timed block has two windows.
        **options: of `sonde.attach`.
    """

    def __init__(self, run: Run, *, report_every: int = 2, **options: Any) -> None:
        super().__init__(run)
        options = {"every": 1, "per_example": "never"} | run.meshes | options
        log = sonde.RunLog(every=report_every)
        self.probe = sonde.attach(run.wrapped, run.optimizer, unit="sequences", log=log, verbose=False, **options)

    def backward(self, loss: Tensor, *, is_last: bool) -> None:
        with self.probe.piece(units=self.run.setup.sequences):
            super().backward(loss, is_last=is_last)

    def backwards(self, schedule: Callable[[], object]) -> None:
        with self.probe.pieces(self.run.setup.micro_batches, units=self.run.setup.sequences):
            schedule()

    def step(self) -> None:
        self.probe.step()
        super().step()

    def estimate(self) -> Estimate:
        reading = self.probe.reading()
        assert reading.trace_cov is not None
        assert reading.grad_sq is not None
        return Estimate(reading.trace_cov, reading.grad_sq, reading.b_simple)


class SnapshotAndSubtract(Plain):
    """The usual home-made way: copy `.grad` before each micro-batch, subtract the copy afterwards.

    In the common form, the loss is divided by the number of micro-batches, so that increments are too small by this
    factor beside the whole gradient. Each window's tr Σ is then negative and is clamped to 0.
    """

    decay = 0.99

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self._increments_times, self._clamps = 1.0, True
        self._parameters = list(run.model.parameters())
        self._sq_norms: list[float] = []
        self._trace_cov = self._grad_sq = self._weight = 0.0

    def backward(self, loss: Tensor, *, is_last: bool) -> None:
        before = [None if p.grad is None else p.grad.detach().to("cpu", copy=True) for p in self._parameters]
        super().backward(loss, is_last=is_last)
        sq_norm = 0.0
        for parameter, old in zip(self._parameters, before, strict=True):
            assert parameter.grad is not None
            increment = parameter.grad.detach().cpu()
            if old is not None:
                increment = increment - old
            sq_norm += increment.pow(2).sum().item()
        self._sq_norms.append(sq_norm * self._increments_times**2)

    def step(self) -> None:
        small = sum(self._sq_norms) / len(self._sq_norms)
        big = sum(p.grad.pow(2).sum().item() for p in self._parameters if p.grad is not None)
        n_small, n_big = self.run.setup.sequences, self.run.setup.units
        trace_cov = (small - big) / (1 / n_small - 1 / n_big)
        grad_sq = (n_big * big - n_small * small) / (n_big - n_small)
        if self._clamps:
            trace_cov, grad_sq = max(trace_cov, 0.0), max(grad_sq, 0.0)
        self._trace_cov += (1 - self.decay) * (trace_cov - self._trace_cov)
        self._grad_sq += (1 - self.decay) * (grad_sq - self._grad_sq)
        self._weight += (1 - self.decay) * (1 - self._weight)
        self._sq_norms.clear()
        super().step()

    def estimate(self) -> Estimate:
        trace_cov, grad_sq = self._trace_cov / self._weight, self._grad_sq / self._weight
        return Estimate(trace_cov, grad_sq, trace_cov / grad_sq if grad_sq else None)


class RescaledSnapshot(SnapshotAndSubtract):
    """The corrected form: increments are multiplied by the number of micro-batches, and nothing is clamped."""

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self._increments_times, self._clamps = float(run.setup.micro_batches), False


class FairscaleAdaScale(Plain):
    """fairscale's AdaScale around the optimizer, at its defaults.

    Its variance is that of one piece's gradient, so tr Σ = sequences in a piece × variance. It shows a gain
    r = (var + sqr)/(var/S + sqr), where S is the number of pieces. So var/sqr = (r − 1)/(1 − r/S).
    """

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        optim = importlib.import_module("fairscale.optim")
        self.optimizer: Any = optim.AdaScale(run.optimizer, num_gradients_to_accumulate=run.setup.micro_batches)

    def step(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def estimate(self) -> Estimate:
        state, units = self.optimizer.state["adascale"], self.run.setup.sequences
        gain, pieces = self.optimizer.gain(), self.optimizer.scale
        variance_over_signal = (gain - 1) / (1 - gain / pieces) if gain < pieces else None
        return Estimate(
            trace_cov=units * float(state["grad_var_avg"].sum()),
            grad_sq=float(state["grad_sqr_avg"].sum()),
            b_simple=None if variance_over_signal is None else units * variance_over_signal,
        )


class AdaptdlNoiseScale(Plain):
    """adaptdl's GradientNoiseScale without its data loader and checkpoints: its cheapest form.

    Only its file is imported, since the package needs `pkg_resources`, which setuptools 81 dropped, and more.
    Micro-losses are not divided, since it divides the accumulated gradient. Its variance is that of a piece.
    """

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        module = _load_file("adaptdl", "torch/gradient_noise_scale.py")
        # Its wrapper must only answer whether this backward is the window's last. DDP knows; without DDP, this answers.
        self._accumulation = run.wrapped if run.setup.ranks > 1 else SimpleNamespace(require_backward_grad_sync=True)
        self._gns: Any = module.GradientNoiseScale(self._accumulation, run.optimizer, num_replicas=run.setup.ranks)

    def backward(self, loss: Tensor, *, is_last: bool) -> None:
        if isinstance(self._accumulation, SimpleNamespace):
            self._accumulation.require_backward_grad_sync = is_last
        loss.backward()

    def step(self) -> None:
        self.run.optimizer.step()
        self._gns.reset_accumulation()  # zeroes the gradients too

    def estimate(self) -> Estimate:
        # At its default `accum_scale` = replicas, its variance is that of a mean over `sequences` of each piece.
        trace_cov = self._gns.var_avg() * self.run.setup.sequences
        grad_sq = self._gns.sqr_avg()
        return Estimate(trace_cov, grad_sq, trace_cov / grad_sq if grad_sq else None)


class KDiffusionHook(Plain):
    """k-diffusion's DDP communication hook and its GradientNoiseScale, as its training script uses them.

    Only its file is imported, since the package needs torchvision, scikit-image, wandb and more. It sees the gradient
    that a rank has accumulated, so it needs two ranks, and the micro-batches of one rank count as one piece.
    """

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        module = _load_file("k_diffusion", "gns.py")
        self._hook: Any = module.DDPGradientStatsHook(run.wrapped)
        self._gns: Any = module.GradientNoiseScale()

    def step(self) -> None:
        per_rank = self.run.setup.micro_batches * self.run.setup.sequences
        self._gns.update(*self._hook.get_stats(), per_rank, self.run.setup.units)
        super().step()

    def estimate(self) -> Estimate:
        grad_sq, trace_cov = self._gns.get_stats()
        return Estimate(trace_cov, grad_sq, self._gns.get_gns())


@dataclass(frozen=True)
class Entry:
    """One row of the results.

    Attributes:
        title: for tables.
        make: attaches the contestant to a run.
        package: the package that it needs; None for none.
        alone: whether it runs without DDP.
        ddp: whether it runs under DDP.
        timed: whether its cost is measured; False where another row has the same cost.
        has_goal: whether its cost has a goal; such a cost is measured longer.
    """

    title: str
    make: Callable[[Run], Plain]
    package: str | None = None
    alone: bool = True
    ddp: bool = True
    timed: bool = True
    has_goal: bool = False

    @property
    def missing(self) -> bool:
        """Whether its package is not installed."""
        return self.package is not None and importlib.util.find_spec(_FOLDERS[self.package]) is None


_FOLDERS = {"adaptdl": "adaptdl", "fairscale": "fairscale", "k-diffusion": "k_diffusion"}


def _load_file(folder: str, file: str) -> ModuleType:
    """One file of an installed package, unmodified, without the package's `__init__` and its imports."""
    package = importlib.util.find_spec(folder)
    assert package is not None
    assert package.submodule_search_locations
    path = Path(package.submodule_search_locations[0]) / file
    spec = importlib.util.spec_from_file_location(f"benchmarked_{folder}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def import_packages() -> None:
    """Import the installed packages among those that are compared."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if importlib.util.find_spec("fairscale") is not None:
            importlib.import_module("fairscale.optim")
        if importlib.util.find_spec("adaptdl") is not None:
            importlib.import_module("adaptdl.utils")


PLAIN = Entry("no probe", Plain)
ENTRIES = {
    "control": Entry("no probe again (control)", Plain),
    "sonde": Entry("sonde", Sonde, has_goal=True),
    "sonde-examples": Entry("sonde, single examples", partial(Sonde, per_example="always")),
    "snapshot": Entry("snapshot and subtract, as commonly found", SnapshotAndSubtract, ddp=False),
    "rescaled_snapshot": Entry("snapshot and subtract, corrected", RescaledSnapshot, ddp=False, timed=False),
    "fairscale": Entry("fairscale AdaScale", FairscaleAdaScale, package="fairscale"),
    "adaptdl": Entry("adaptdl GradientNoiseScale", AdaptdlNoiseScale, package="adaptdl"),
    "k-diffusion": Entry("k-diffusion DDPGradientStatsHook", KDiffusionHook, package="k-diffusion", alone=False),
}
