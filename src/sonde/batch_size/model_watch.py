"""Watches what becomes of the model after attach: its parameters, layers, dtypes, and which of them are trained.

Every measured window's sum over ranks carries two numbers of each rank: how many of its parameters are frozen, and a
hash of which. Where the sums change, on whatever rank, the noise scale begins anew on all. Groups without gradients
leave a reading by themselves.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from sonde.batch_size.setup import BATCH_NORM, n_batch_norms
from sonde.batch_size.stats.window_row import RoundingTolerance
from sonde.batch_size.step_watch import Alert
from sonde.batch_size.taps.problems import Problem
from sonde.batch_size.units import as_vector
from sonde.parallel.devices import exact_bits
from sonde.parallel.placements import shown_after_forward
from sonde.parallel.unwrap import Inventory, parameters_of
from sonde.parallel.wrappers import Wrapper, clean_name, comm_hook_name, lowest_precision
from sonde.wording import plural, some_of

_FOR = 3
"""Windows in a row after which `requires_grad` counts as changed. A loop that alternates is left alone."""
_MOST_BITS = 32
"""Of the hash."""


class FrozenWatch:
    """Looks at the end of each measured window which parameters are trained.

    Where `requires_grad` seems to have changed, it looks at the windows that follow too, measured or not: in a loop
    that alternates, several measured windows in a row may lack the same parameters by chance.

    Args:
        parameters: measured parameters of this rank, by name.
        n_ranks: ranks that windows are summed over.
        n_stages: ranks of the pipeline, or 1. As many ranks hold each stage's parameters, or a part of each.
        device: where the sums live.
    """

    def __init__(self, parameters: Mapping[str, Tensor], *, n_ranks: int, n_stages: int, device: torch.device) -> None:
        self._parameters, self._device = dict(parameters), device
        self._n_holding = max(1, n_ranks // n_stages)
        """Ranks that hold each parameter, or a part of it."""
        self._n_hashes = 2 ** min(exact_bits(device, n_ranks), _MOST_BITS)
        self._frozen: tuple[str, ...] | None = None
        """What this rank holds and does not train; None before the first window."""
        self._sent: tuple[tuple[str, ...], Tensor] | None = None
        self._told: tuple[str, ...] = ()
        """What of it was frozen in the first window that arrived, or at the last alert about it."""
        self._seen: tuple[str, ...] = ()
        self._n_seen = 0
        """What was frozen when this looked last, where that is something else; and how often in a row."""
        self.of_all: list[float] | None = None
        """The numbers of all ranks in the last window that has arrived, over the ranks that hold each parameter."""

    @property
    def is_undecided(self) -> bool:
        """Whether `requires_grad` may have changed, so that the next window is looked at even if it is not measured."""
        return self._n_seen > 0

    def look(self) -> None:
        """Look at a window that ends."""
        now = tuple(name for name, p in self._parameters.items() if not p.requires_grad)
        if self._frozen in (None, now):
            self._frozen, self._n_seen = now, 0
            return
        self._n_seen = self._n_seen + 1 if now == self._seen else 1
        self._seen = now
        if self._n_seen == _FOR:
            self._frozen, self._n_seen = now, 0

    def numbers(self) -> Tensor:
        """What this rank adds to the sum of a measured window; [2]."""
        frozen = self._frozen or ()
        if self._sent is None or self._sent[0] != frozen:  # made once, since each costs a copy to the device
            which = zlib.crc32(" ".join(frozen).encode()) % self._n_hashes
            self._sent = frozen, as_vector([float(len(frozen)), float(which)], self._device)
        return self._sent[1]

    def arrived(self, numbers: Tensor) -> tuple[str, str] | None:
        """Take the sum over ranks of a window; windows in order.

        Returns:
            The name of an alert and its message, if other parameters are trained than in the window before.
        """
        before, self.of_all = self.of_all, (numbers.double() / self._n_holding).tolist()
        now = self._frozen or ()
        if before is None:
            self._told = now
        if before in (None, self.of_all):
            return None
        changed = [name for name in self._parameters if (name in now) != (name in self._told)]
        self._told = now
        who = some_of(changed, 2) or "of other ranks"
        return "trained", f"requires_grad of measured parameters has changed ({who}): the noise scale begins anew"

    def restore(self, of_all: Sequence[float] | None) -> None:
        """Go on from the `of_all` of a saved state."""
        self._frozen, self._n_seen = None, 0
        self.of_all = None if of_all is None else list(of_all)


class ModelWatch:
    """Looks at the model when windows end.

    A model that is cut after attach has other parameters, which every measured window shows. One that DDP wraps has the
    same ones: its gradients turn out changed, and that reason says to wrap it first.

    Args:
        model: as the user calls it.
        wrapper: what it was wrapped in at attach.
        frozen: looks which parameters are trained.
        alert: called with an alert's name and message: "batch_norm" and "not_watched".
    """

    def __init__(self, model: nn.Module, wrapper: Wrapper, frozen: FrozenWatch, *, alert: Alert) -> None:
        self._model, self._alert, self._frozen = model, alert, frozen
        parameters = list(wrapper.parameters.values())
        self._n_batch_norms: int | None = n_batch_norms(model)
        """Batch-normalisation layers in train mode at attach; None once the first window has ended."""
        self._inventory, self._optimizers = Inventory(model), wrapper.optimizers
        self._measured = {id(p) for p in (*parameters, *wrapper.stand_ins)}
        self._left_out = {id(p) for p in wrapper.frozen.values() if p.requires_grad}
        self._shown_as = [{id(p), id(leaf)} for p, leaf in zip(parameters, wrapper.leaves, strict=True)]
        self._looked_at: tuple[dict[str, nn.Parameter], int] | None = None
        self._of_model: dict[str, nn.Parameter] = {}
        self._of_optimizers: dict[str, Tensor] = {}
        """Parameters that are not measured: of the model and, without these, of its optimizers."""
        self._is_replaced = False
        """Whether the model has lost a measured parameter, and trains one that is not measured instead."""

    def window_passes(self) -> None:
        """Note that a window is being ended that was not measured."""
        if self._frozen.is_undecided:
            self._frozen.look()

    def window_ends(self) -> tuple[set[Problem], Tensor]:
        """Look at the model while a measured window is being ended.

        Returns:
            Why the window's pieces cannot be used; and what tells which parameters are frozen on this rank, to be
            summed over ranks.
        """
        if self._n_batch_norms is not None:  # a model may be attached in evaluation mode, as pretrained ones often come
            n_before, self._n_batch_norms = self._n_batch_norms, None
            if (n := n_batch_norms(self._model)) > n_before:
                self._alert("batch_norm", f"{plural(n, 'layer')}, {n_before} of them so at attach: {BATCH_NORM}")
        self._look()
        self._alert_not_measured()
        self._frozen.look()
        return {Problem.REPLACED} if self._is_replaced else set(), self._frozen.numbers()

    def _look(self) -> None:
        """Look again if the model has other parameters, or its optimizers have more after `add_param_group`."""
        shown = self._inventory.parameters()
        n_stepped = sum(len(group["params"]) for optimizer in self._optimizers for group in optimizer.param_groups)
        if self._looked_at is not None and self._looked_at[0] is shown and self._looked_at[1] == n_stepped:
            return
        self._looked_at = shown, n_stepped
        own = shown_after_forward(self._model)
        named = {name: own.get(id(p), p) for name, p in shown.items()}
        stepped = {id(p): p for p in parameters_of(*self._optimizers)}
        known = self._measured | (self._left_out - stepped.keys())  # what no optimizer steps is left out for good
        self._of_model = {name: p for name, p in named.items() if id(p) not in known}
        known = self._measured.union(map(id, self._of_model.values()))
        others = [p for key, p in stepped.items() if key not in known]
        self._of_optimizers = {f"parameter {i} that only the optimizer holds": p for i, p in enumerate(others)}
        present = {id(p) for p in named.values()}
        has_lost = any(present.isdisjoint(shown_as) for shown_as in self._shown_as)
        self._is_replaced = has_lost and any(p.requires_grad for p in self._of_model.values())

    def not_measured(self) -> dict[str, Tensor]:
        """What a clip takes besides, by name: parameters of the model and of its optimizers that are not measured."""
        self._look()
        return self._of_model | self._of_optimizers

    def _alert_not_measured(self) -> None:
        """Say which trainable parameters came after attach, and cannot be measured."""
        trainable = {clean_name(name): p for name, p in self._of_model.items() if p.requires_grad}
        if not trainable:
            return
        n, some = plural(len(trainable), "parameter"), some_of(list(trainable))
        message = f"{n} came or became trainable after attach and cannot be measured ({some}): attach again"
        if any(id(p) in self._left_out for p in trainable.values()):
            message = (
                f"an optimizer steps {n} that no given one held at attach, and that cannot be measured ({some}): "
                "attach again, with all optimizers that step the model: optimizer=(first, second)"
            )
        self._alert("not_watched", message)


def rounding_tolerance(wrapper: Wrapper) -> RoundingTolerance:
    """How far rounding may move gradients of a model as it is now: in the dtypes and with the hook that it has by now.

    Args:
        wrapper: the model.
    """
    comm_hook = comm_hook_name(wrapper.ddp)
    dtype = lowest_precision([*(leaf.dtype for leaf in wrapper.leaves), *wrapper.reduced_in])
    is_16_bit = torch.finfo(dtype).bits <= 16
    # The smallest number of fp16 is 6e-8. A communication hook may send fp16, unless its name says bf16.
    sends_fp16 = comm_hook is not None and "bf16" not in comm_hook
    return RoundingTolerance(
        # Gradients in 16 bits, and communication hooks that send 16 bits, round each element by up to 2⁻⁸ of its
        # size; sums of 16 pieces in bf16 are off by 5e-3. Even if a residual of 1e-2 were noise, it would move
        # B_simple by less than (1 + B_simple/B)·1e-4 of itself.
        tolerance=1e-2 if is_16_bit or comm_hook is not None else 1e-4,
        floor=1e-7 if dtype == torch.float16 or sends_fp16 else 0.0,
        likely_cause=_likely_cause(wrapper, comm_hook, is_16_bit=is_16_bit),
    )


def _likely_cause(wrapper: Wrapper, comm_hook: str | None, *, is_16_bit: bool) -> str:
    """What else may have changed a gradient by more."""
    if comm_hook is not None:
        return f"DDP's communication hook {comm_hook!r} is lossy, noise was added, or another hook changed it"
    if wrapper.group is None and dist.is_initialized() and dist.get_world_size() > 1:
        return (
            "were gradients averaged over ranks? Wrap the model in DDP before attach and pass the wrapped one, or "
            "pass process_group= if you average them yourself"
        )
    lost = "16-bit gradients lost small parts while many were added up (accumulate in fp32), or "
    other = "noise was added, a hook changed it, or a backward outside this window wrote to it"
    if wrapper.n_ranks > 1 and wrapper.ddp is not None:
        other = f"ranks did not average their gradients (local SGD, model.no_sync()), {other}"
    return lost + other if is_16_bit else other
