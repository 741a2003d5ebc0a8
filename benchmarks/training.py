"""One training run, the same for every contestant: model, data, optimizer, micro-batches, ranks."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from benchmarks.gpt import Gpt, GptShape, Stage, build

Cut = Literal["DDP", "FSDP2", "HSDP", "TP", "CP", "PP"]


@dataclass(frozen=True)
class Setup:
    """How a window (all pieces of one optimizer step) is cut.

    Attributes:
        ranks: processes; 1 trains the plain model, but for "FSDP2", whose shards a single rank may hold.
        threads: of each process.
        micro_batches: accumulated by each rank.
        sequences: sequences in a micro-batch.
        shape: the shape of the model.
        lr: learning rate of AdamW; 0 freezes the weights.
        device: "cpu", or the type of an accelerator, with a device for each rank.
        cut: of the model over several ranks. "HSDP" has two copies of it. "TP" cuts the matrices of each block's MLP,
            "CP" the sequences, below DDP, and "PP" the blocks into two stages, which run 1F1B: there, all ranks have
            one batch.
        compiled: whether the model is compiled.
    """

    ranks: int
    threads: int
    micro_batches: int
    sequences: int
    shape: GptShape
    lr: float = 3e-4
    device: str = "cpu"
    cut: Cut = "DDP"
    compiled: bool = False

    @property
    def has_group(self) -> bool:
        """Whether it needs a process group."""
        return self.ranks > 1 or self.cut == "FSDP2"

    @property
    def data_ranks(self) -> int:
        """Ranks with data of their own."""
        return 1 if self.cut in ("TP", "CP", "PP") else self.ranks

    @property
    def units(self) -> int:
        """Sequences in a window."""
        return self.data_ranks * self.micro_batches * self.sequences

    def frozen(self, shape: GptShape) -> Setup:
        """The same windows of another model, whose weights never change."""
        return replace(self, shape=shape, lr=0.0)

    @property
    def pieces(self) -> str:
        """How a window is cut, in words."""
        if self.ranks > 1:
            return f"{self.ranks} {self.cut} ranks with {self.micro_batches} × {self.sequences} sequences each"
        return f"1 process with {self.micro_batches} × {self.sequences} sequences"

    def __str__(self) -> str:
        threads = f", {self.threads} thread{'s' * (self.threads > 1)}" if self.device == "cpu" else ""
        return f"{self.pieces} of {self.shape.context} tokens{threads}{' each' * bool(threads and self.ranks > 1)}"


class Contestant(Protocol):
    """An estimator, or no estimator, as the training loop sees it."""

    def backward(self, loss: Tensor, *, is_last: bool) -> None:
        """Differentiate the mean loss of one micro-batch; `is_last`: whether it is the last of its window."""

    def backwards(self, schedule: Callable[[], object]) -> None:
        """Run a pipeline's schedule, which differentiates the mean loss of all micro-batches of a window."""

    def step(self) -> None:
        """End the window: measure, step the optimizer, zero the gradients."""


class Run:
    """The model of one contestant, the same on every rank.

    Attributes:
        setup: how windows are cut.
        model: the plain model.
        wrapped: the module that the loop calls: the model, cut in place, or DDP around it, or its stage.
        meshes: for `sonde.attach`, by argument.
        optimizer: AdamW.
    """

    def __init__(self, setup: Setup, weights: dict[str, Tensor] | None = None) -> None:
        self.setup = setup
        self.device = device_of(setup)
        self.model = build(setup.shape, self.device)
        if weights is not None:
            self.model.load_state_dict(weights)
        self.meshes: dict[str, Any] = {}
        self.wrapped: nn.Module = self.model
        if setup.cut in ("CP", "PP"):
            name = setup.cut.lower()
            self.meshes[f"{name}_mesh"] = init_device_mesh(setup.device, (setup.ranks,), mesh_dim_names=(name,))
        if setup.cut == "PP":
            self.wrapped = Stage(self.model, is_first=rank_of(setup) == 0)
        elif setup.has_group:
            self.wrapped = _wrapped(self.model, setup)
        if setup.compiled:
            # On a CPU without inductor, which needs a compiler of C++.
            backend = "aot_eager" if setup.device == "cpu" else "inductor"
            self.wrapped = torch.compile(self.wrapped, backend=backend)  # type: ignore[assignment]
        self.optimizer = torch.optim.AdamW(
            self.wrapped.parameters(), lr=setup.lr, weight_decay=0.0, fused=setup.device != "cpu"
        )

    def train_window(self, contestant: Contestant, window: Tensor) -> None:
        """One optimizer step on this rank's part of a window, [micro-batches, sequences, tokens]."""
        if self.setup.cut == "PP":
            contestant.backwards(lambda: self._schedule(window.flatten(0, 1)))
            contestant.step()
            return
        for k, tokens in enumerate(window):
            is_last = k == len(window) - 1
            accumulates = isinstance(self.wrapped, DistributedDataParallel) and not is_last
            with self.wrapped.no_sync() if accumulates else nullcontext():  # type: ignore[operator]
                with torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type != "cpu"):
                    loss = self.wrapped(tokens)
                contestant.backward(loss, is_last=is_last)
        contestant.step()

    @functools.cached_property
    def _pipeline(self) -> Schedule1F1B:
        mesh = self.meshes["pp_mesh"]
        stage = PipelineStage(self.wrapped, mesh.get_local_rank(), mesh.size(), self.device, group=mesh.get_group())
        return Schedule1F1B(stage, self.setup.micro_batches, loss_fn=_loss)

    def _schedule(self, tokens: Tensor) -> None:
        if rank_of(self.setup) == 0:
            self._pipeline.step(tokens[:, :-1])
        else:
            self._pipeline.step(target=tokens[:, 1:])


def _loss(logits: Tensor, expected: Tensor) -> Tensor:
    return cross_entropy(logits.flatten(0, 1).float(), expected.flatten())


def _wrapped(model: Gpt, setup: Setup) -> nn.Module:
    if setup.cut == "CP":
        assert dist.group.WORLD is not None
        model.share(dist.group.WORLD)
    if setup.cut in ("DDP", "CP"):
        return DistributedDataParallel(model)
    if setup.cut in ("FSDP2", "HSDP"):
        over = (2, setup.ranks // 2) if setup.cut == "HSDP" else (setup.ranks,)
        mesh = init_device_mesh(setup.device, over, mesh_dim_names=("copies", "shards")[-len(over) :])
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        return fully_shard(model, mesh=mesh)
    mesh = init_device_mesh(setup.device, (setup.ranks,), mesh_dim_names=("tp",))
    for block in model.blocks:
        parallelize_module(block, mesh, {"mlp.0": ColwiseParallel(), "mlp.2": RowwiseParallel()})
    return model


def device_of(setup: Setup) -> torch.device:
    """The device that this rank trains on."""
    return torch.device("cpu") if setup.device == "cpu" else torch.device(setup.device, rank_of(setup))


def rank_of(setup: Setup) -> int:
    """This process's rank."""
    return dist.get_rank() if setup.has_group else 0


def draw_windows(setup: Setup, tokens: Tensor, n_windows: int, *, seed: int) -> Tensor:
    """This rank's part of windows drawn with replacement: [windows, micro-batches, sequences, tokens].

    Set-ups with equally many sequences a window draw the same windows from the same seed.
    """
    generator = torch.Generator().manual_seed(seed)
    cut = (n_windows, setup.data_ranks, setup.micro_batches, setup.sequences)
    chosen = torch.randint(len(tokens), cut, generator=generator)
    return tokens[chosen[:, rank_of(setup) % setup.data_ranks]].to(device_of(setup))
