"""The model of a measurement: what of it is run, how its ranks work together, and that it is left as it is."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from sonde.batch_size.setup import n_sync_batch_norms
from sonde.parallel.devices import to_device
from sonde.parallel.model_state import preserve_buffers, preserve_gradients, preserve_modes_and_randomness
from sonde.parallel.placements import is_fully_sharded
from sonde.parallel.process_groups import holds_on_all, start_reduce
from sonde.parallel.unwrap import unwrap_model
from sonde.parallel.wrappers import Wrapper


class MeasuredModel:
    """What is measured, and how its ranks work together.

    DDP's reduction is left out: it would need as many batches on every rank, run the user's communication hook, and
    rebuild DDP's buckets. The module inside is run, and its gradients are added up afterwards. So ranks may have
    different numbers of batches, unless every pass communicates.

    Args:
        model: as the user passes it.
        wrapper: of the model.

    Raises:
        ValueError: for a model whose gradients cannot be added up over ranks.
    """

    def __init__(self, model: nn.Module, wrapper: Wrapper) -> None:
        self._model, self._ddp = model, None
        self.module = model
        self.parameters = list(wrapper.parameters.values())
        if wrapper.ddp is not None and unwrap_model(model) is unwrap_model(wrapper.ddp):
            self._ddp, self.module = wrapper.ddp, wrapper.ddp.module
            _check_ddp(wrapper.ddp)
        elif wrapper.ddp is not None:
            raise ValueError(
                "a module with DDP inside it cannot be measured: measure the module without DDP, with process_group="
            )
        self._is_cut = wrapper.mesh is not None
        _refuse_unreduced_gradients(wrapper)
        self._ranks, self._device = wrapper.group, self.parameters[0].device
        self.n_ranks = 1 if wrapper.group is None else wrapper.group.size()
        reduces_itself = self._is_cut or any(is_fully_sharded(m) for m in self.module.modules())
        self._reduces = self.n_ranks > 1 and not reduces_itself
        if self._reduces and any(vars(m).get("sparse") is True for m in self.module.modules()):
            raise ValueError("sparse gradients cannot be added up over ranks: use Embedding(sparse=False), or one rank")
        self.counts_pieces = wrapper.data.counts_pieces
        """Whether this rank counts its micro-batches; of ranks that share them, one does."""
        self.n_data_ranks = wrapper.n_ranks
        """Ranks that have data of their own."""
        self.group = None if self._is_cut else wrapper.group
        """The ranks over which a plain model's gradients are added up; a cut model knows its own."""
        self.communicates = reduces_itself or n_sync_batch_norms(self.module, self.n_ranks) > 0
        """Whether every pass communicates, so that all ranks must take as many batches."""

    @contextlib.contextmanager
    def left_as_it_is(self) -> Iterator[None]:
        """Gradients may be taken inside. On exit, the model and random generators are as before."""
        with (
            torch.inference_mode(False),  # which also turns gradients on, where torch.no_grad() has turned them off
            _without_collectives(self._ddp),
            preserve_modes_and_randomness(self._model),
            preserve_buffers(self._model),
            preserve_gradients(self._model.parameters()),
        ):
            yield

    def on_all_ranks(self, *, here: bool) -> bool:
        """Whether something holds on all ranks."""
        return holds_on_all(self._ranks, self._device, here=here)

    def in_step(self, *, here: bool) -> bool:
        """Whether something holds on this rank or, where every pass communicates, on all of them."""
        return self.on_all_ranks(here=here) if self.communicates else here

    def summed(self, numbers: list[float]) -> list[float]:
        """Numbers added up over ranks, as many on each. Waits."""
        vector = to_device(torch.tensor(numbers, dtype=torch.float64, device="cpu"), self._device)
        if (work := start_reduce(vector, self._ranks)) is not None:
            work.wait()
        return vector.tolist()

    @torch.no_grad()
    def reduce_gradients(self) -> None:
        """Make `.grad` what an optimizer would get: the sum over ranks, unless backward has added it up.

        Raises:
            ValueError: for a cut model whose backwards leave no gradient, with what to turn on again.
        """
        if self._is_cut and all(p.grad is None for p in self.parameters):
            raise ValueError(
                "no backward has left a gradient: call model.set_requires_gradient_sync(True) before measuring, so "
                "that FSDP2 reduces gradients"
            )
        if not self._reduces:
            return
        started = []
        for p in self.parameters:  # a rank without a gradient adds zero
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad.contiguous()
            started.append(start_reduce(p.grad, self._ranks))
        for work in started:
            if work is not None:
                work.wait()

    def zero_grad(self) -> None:
        """Begin anew in `.grad`."""
        for p in (*self.parameters, *self._model.parameters()):
            p.grad = None

    def written(self) -> int:
        """How often the weights were written to."""
        return sum(p._version for p in self.parameters)

    def check_unwritten(self, before: int) -> None:
        """Refuse weights that were written to since `written` was `before`. A cut model's passes write to them too.

        Raises:
            RuntimeError: with what to leave out.
        """
        if not self.communicates and self.written() != before:
            raise RuntimeError(
                "the weights changed while they were measured: leave optimizer steps and other updates out of "
                "loss() and of hooks"
            )


def _refuse_unreduced_gradients(wrapper: Wrapper) -> None:
    """FSDP2 keeps gradients that it has not reduced yet in the gathered parameters, and would add others to them."""
    if wrapper.mesh is None:
        return
    own = {id(p) for p in wrapper.parameters.values()}
    if any(leaf.grad is not None for leaf in wrapper.leaves if id(leaf) not in own):
        raise ValueError(
            "FSDP2 holds gradients of micro-batches that were not reduced yet, which a measurement would change: "
            "measure after a backward with set_requires_gradient_sync(True)"
        )


@contextlib.contextmanager
def _without_collectives(ddp: DistributedDataParallel | None) -> Iterator[None]:
    """A loss may call DDP itself: inside, DDP neither reduces gradients nor sends buffers."""
    if ddp is None:
        yield
        return
    sends_buffers = ddp.require_forward_param_sync
    ddp.require_forward_param_sync = False
    try:
        with ddp.no_sync():
            yield
    finally:
        ddp.require_forward_param_sync = sends_buffers


def _check_ddp(ddp: DistributedDataParallel) -> None:
    if ddp.mixed_precision is not None:
        raise ValueError(
            "DDP(mixed_precision=...) casts inside DDP, which is left out of a measurement: measure ddp.module with "
            "process_group=, and cast in the loss, as torch.autocast does"
        )
    # DDP counts every backward, and learns a static graph from the first: one without DDP's forward breaks it. The
    # attribute is private; a test guards it.
    if ddp.static_graph and not getattr(ddp, "_static_graph_delay_allreduce_enqueued", True):
        raise ValueError(
            "DDP(static_graph=True) learns its graph from the first backward: measure after the first step of "
            "training, or before the model is wrapped in DDP, with process_group="
        )
