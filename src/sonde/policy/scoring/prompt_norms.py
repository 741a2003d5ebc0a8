"""Squared gradient norms of every prompt, of the halves of its group, and of the sum over all ranks.

Where every rank holds what its gradients need, each half takes one backward, and buffers hold the sums. Under FSDP2 a
buffer would be as large as the whole model. There a prompt takes a backward of its own besides those of its halves, and
FSDP2 itself adds the prompts up, in shards.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from sonde.batch_size.taps.metric import norms_of_rows
from sonde.batch_size.taps.shared_pieces import CutGradients
from sonde.gradient_norm.clip import measure_and_clip
from sonde.gradient_norm.plan import NormPlan
from sonde.parallel.data_ranks import DataRanks
from sonde.parallel.model_state import preserve_gradients
from sonde.parallel.placements import gathered_parameters, is_dtensor, is_fully_sharded, local_tensor, stage_ranks
from sonde.parallel.process_groups import gather_from_all_ranks, group_over, start_reduce
from sonde.parallel.wrappers import find_wrapper
from sonde.policy.scoring.summed_gradient import (
    check_no_other_hook,
    check_nothing_waits,
    divisors_of,
    gradients_taken,
    reduces_every_backward,
)

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

Objective = Callable[[Tensor], Tensor]
"""Makes a 0-dim tensor of rows, [rows]; additive over rows."""
Watched = Callable[[Callable[[int, Tensor], None]], contextlib.AbstractContextManager[None]]
"""Backwards inside give the gradient of each leaf, with the leaf's index, to a function."""


class NestedNorms(Protocol):
    """Squares the gradients of prompts and of their halves, and of the sum of all prompts of all ranks."""

    def add(self, objective: Objective, prompts: Sequence[Tensor]) -> Tensor:
        """Add the gradients of this rank's prompts.

        Args:
            objective: what is differentiated.
            prompts: the rows of each prompt.

        Returns:
            |h|², |h₁|² and |h₂|² of each prompt, as far as this rank counts them: they add up over the ranks that share
            the prompt. Of a single row, the first half is the prompt, and the second is 0. [prompts, 3], fp64.
        """

    def sq_norm_of_sum(self) -> float:
        """The squared norm of the sum over all prompts of all ranks, on every rank."""


@contextlib.contextmanager
def nested_norms(model: nn.Module, ranks: PromptRanks) -> Iterator[NestedNorms]:
    """Norms of a model, in the way that fits it. On exit, each parameter has its former `.grad` back.

    Args:
        model: plain, in DDP, or cut by FSDP2 or tensor parallelism. Under FSDP2, all ranks have to call this.
        ranks: that take part.

    Raises:
        ValueError: for parameters whose gradient another hook consumes after accumulation; under FSDP2, when gradients
            of a backward before still wait to be reduced.
    """
    gathered = gathered_parameters(model)
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    leaves: list[Tensor] = [gathered.get(id(p), p) for p in named.values()]
    if not any(map(is_fully_sharded, model.modules())):
        with preserve_gradients(leaves):
            yield BufferedNorms(model, leaves, ranks)
        return
    check_no_other_hook(list(named.values()))
    check_nothing_waits(model)
    with preserve_gradients([*named.values(), *leaves]), reduces_every_backward(model):
        yield FullyShardedNorms(model, named, leaves, ranks)


class BufferedNorms:
    """Sums the gradients of halves to those of prompts, and these to the gradient of all, in two buffers.

    Each buffer is as large as what this rank holds of the parameters.

    Args:
        model: plain, in DDP, or cut by tensor parallelism.
        parameters: its trainable parameters.
        ranks: that take part.
    """

    def __init__(self, model: nn.Module, parameters: Sequence[Tensor], ranks: PromptRanks) -> None:
        self._model, self._parameters, self._ranks = model, list(parameters), ranks
        self._counted = _CountedParts(parameters, ranks)
        locals_ = [local_tensor(p) for p in parameters]
        sizes = [p.numel() for p in locals_]
        self._all = torch.zeros(sum(sizes), device=locals_[0].device)
        self._whole = torch.zeros_like(self._all)
        self._parts_of_all, self._parts_of_whole = self._all.split(sizes), self._whole.split(sizes)

    def add(self, objective: Objective, prompts: Sequence[Tensor]) -> Tensor:
        """One backward for each half."""
        squares = torch.zeros(len(prompts), 3, dtype=torch.float64, device=self._all.device)
        for of_prompt, rows in zip(squares, prompts, strict=True):
            self._whole.zero_()
            for column, half in ((1, rows[::2]), (2, rows[1::2])):
                if len(half):
                    of_prompt[column] = self._half(objective, half)
            self._all.add_(self._whole)
            of_prompt[0] = self._square(self._parts_of_whole)
        return squares

    def _half(self, objective: Objective, rows: Tensor) -> Tensor:
        """Add a half's gradient to the prompt's; returns its square, 0-dim."""
        square = self._all.new_zeros((), dtype=torch.float64)

        def add(index: int, part: Tensor) -> None:
            # A half's square is known parameter by parameter; the prompt's needs the sum over its halves first.
            square.add_(_square(part))
            self._parts_of_whole[index].add_(part.reshape(-1))

        watched = functools.partial(gradients_taken, self._model, self._parameters)
        self._counted.of_backward(lambda: objective(rows), watched, add)
        return square

    def _square(self, parts: Sequence[Tensor]) -> Tensor:
        """What this rank counts of the squared norm of a buffer, which is 0 where another rank counts; 0-dim, fp64."""
        return torch.stack([_square(part) for part in parts]).sum()

    def sq_norm_of_sum(self) -> float:
        """By one all-reduce of the buffer, and a small one if ranks share it."""
        if work := start_reduce(self._all, self._ranks.same_part):
            work.wait()
        square = self._square(self._parts_of_all)
        if self._ranks.data.n_sharing > 1:
            # Every set of ranks that share the parameters now has the same sum.
            square = square / self._ranks.data.n_ranks
            if work := start_reduce(square, self._ranks.everyone):
                work.wait()
        return float(square)


class FullyShardedNorms:
    """Squares gradients as backward makes them, and lets FSDP2 add up those of whole prompts, in shards.

    All ranks run as many backwards, in the same order, since FSDP2 gathers parameters in each of them: a rank with
    fewer prompts repeats its last one with weight 0.

    Args:
        model: cut by FSDP2, perhaps over tensor parallelism. It reduces every backward, and no `.grad` is set.
        parameters: its trainable parameters by name, as FSDP2 shards them.
        leaves: the tensors that backward makes their gradients for, [parameters].
        ranks: that take part.
    """

    def __init__(
        self, model: nn.Module, parameters: dict[str, nn.Parameter], leaves: Sequence[Tensor], ranks: PromptRanks
    ) -> None:
        self._model, self._parameters, self._leaves, self._ranks = model, parameters, list(leaves), ranks
        self._counted = _CountedParts(leaves, ranks)

    def add(self, objective: Objective, prompts: Sequence[Tensor]) -> Tensor:
        """A backward for each prompt, and one for each half unless every prompt has a single row."""
        sizes = torch.tensor([[len(prompts), max(map(len, prompts))]])
        most, longest = gather_from_all_ranks(self._ranks.everyone, lambda: {"n": sizes})["n"].amax(0).tolist()
        device = local_tensor(self._leaves[0]).device
        squares = torch.zeros(len(prompts), 3, dtype=torch.float64, device=device)
        for k in range(most):
            # Every pass needs all ranks: one without a prompt or a half left takes another, which weighs 0.
            is_own, rows = k < len(prompts), prompts[min(k, len(prompts) - 1)]
            for column, part in enumerate((rows, rows[::2], rows[1::2]) if longest > 1 else (rows,)):
                counts = is_own and len(part) > 0
                watched = self._taken if column else self._watched
                square = self._square(objective, part if counts else rows, float(counts), watched)
                if counts:
                    squares[k, column] = square
        return squares

    def _square(self, objective: Objective, rows: Tensor, weight: float, watched: Watched) -> Tensor:
        """The square of a gradient; 0-dim."""
        square = torch.zeros((), dtype=torch.float64, device=local_tensor(self._leaves[0]).device)
        self._counted.of_backward(lambda: weight * objective(rows), watched, lambda _, part: square.add_(_square(part)))
        return square

    def _taken(self, take: Callable[[int, Tensor], None]) -> contextlib.AbstractContextManager[None]:
        """Gradients are taken before FSDP2 sees them."""
        return gradients_taken(self._model, self._leaves, take)

    @contextlib.contextmanager
    def _watched(self, take: Callable[[int, Tensor], None]) -> Iterator[None]:
        """Gradients are seen, and FSDP2 then adds them to `.grad`."""
        with contextlib.ExitStack() as stack:
            for index, leaf in enumerate(self._leaves):
                stack.callback(leaf.register_hook(functools.partial(take, index)).remove)
            yield

    def sq_norm_of_sum(self) -> float:
        """By one collective, and an all-reduce of the parameters that FSDP2 does not shard."""
        divisors = divisors_of(self._model, self._ranks.data.n_ranks)
        for p in self._parameters.values():
            # FSDP2 divides the reduced sum, since training averages over ranks: multiplying makes it a sum again.
            if p.grad is not None:
                p.grad.mul_(divisors.get(p, 1.0))
        self._reduce_unsharded([p for p in self._parameters.values() if p not in divisors])
        plan = NormPlan(list(self._parameters.values()), list(self._parameters), mesh=self._ranks.mesh)
        return float(measure_and_clip(plan, None, 2.0, None, "ignore")[0].norm.square())

    def _reduce_unsharded(self, parameters: Sequence[nn.Parameter]) -> None:
        """Add up the gradients of parameters that FSDP2 leaves alone; a rank without one adds 0."""
        if not parameters or self._ranks.same_part is None:
            return
        for p in parameters:
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
        parts = [local_tensor(cast(Tensor, p.grad)) for p in parameters]
        flat = torch.cat([part.reshape(-1).float() for part in parts])
        dist.all_reduce(flat, group=self._ranks.same_part)
        for part, total in zip(parts, flat.split([part.numel() for part in parts]), strict=True):
            part.copy_(total.view_as(part))


class _CountedParts:
    """What this rank counts of the gradients of one backward, as the noise scale counts pieces that ranks share.

    Every element counts on one of the ranks that share it. Partial gradients, as those of norm weights under sequence
    parallelism, wait until the backward has ended, and are summed by one all-reduce.

    Args:
        leaves: the tensors that backward makes gradients for.
        ranks: that take part.
    """

    def __init__(self, leaves: Sequence[Tensor], ranks: PromptRanks) -> None:
        is_cut = ranks.data.n_sharing > 1 or any(map(is_dtensor, leaves))
        self._cut = CutGradients(leaves, ranks.data.first_sharing) if is_cut else None

    def of_backward(
        self, objective: Callable[[], Tensor], watched: Watched, use: Callable[[int, Tensor], object]
    ) -> None:
        """Give `use` this rank's parts of the gradients of one backward. All ranks that share them call this."""
        partial: dict[int, Tensor] = {}

        def take(index: int, grad: Tensor) -> None:
            part = grad if self._cut is None else self._cut.part(index, grad, partial)
            if part is not None:  # it does not wait, and counts on this rank
                use(index, part)

        with watched(take), torch.enable_grad():
            objective().backward()
        for index, part in ({} if self._cut is None else self._cut.sum_partial(partial)).items():
            use(index, part)


def _square(part: Tensor) -> Tensor:
    """The squared norm of what a rank counts of one gradient; 0-dim, fp64."""
    return norms_of_rows(part).double().square().sum()


@dataclass(frozen=True)
class PromptRanks:
    """The ranks that take part in a measurement of a policy.

    Attributes:
        everyone: all of them; None for this process alone.
        same_part: those that hold the same part of every gradient as this rank, each for responses of its own.
        data: which of the ranks have responses of their own. Ranks of tensor parallelism share theirs.
        mesh: all of them, if parameters are cut over ranks; otherwise None.
    """

    everyone: dist.ProcessGroup | None
    same_part: dist.ProcessGroup | None
    data: DataRanks
    mesh: DeviceMesh | None


def prompt_ranks(
    model: nn.Module, process_group: dist.ProcessGroup | None = None, mesh: DeviceMesh | None = None
) -> PromptRanks:
    """Find the ranks of a policy. Under FSDP2 and tensor parallelism, all ranks have to call this.

    Args:
        model: plain, in DDP, or cut by FSDP2 or tensor parallelism.
        process_group: the ranks with responses of their own, for a model that is not cut; by default those of DDP.
        mesh: all ranks that hold any of a cut model, where no parameter is on all of them.

    Raises:
        ValueError: when the ranks of a cut model cannot be found, or DDP wraps the model.
    """
    found = find_wrapper(model, process_group, mesh)
    if found.experts is not None:
        raise ValueError(
            "gradients of single prompts cannot be read of experts that several ranks feed: measure the model without "
            "expert parallelism"
        )
    same_part = found.group
    if found.mesh is not None and found.data.n_sharing > 1:
        cut: list[DeviceMesh] = [leaf.device_mesh for leaf in found.leaves if is_dtensor(leaf)]  # type: ignore[attr-defined]
        peers = stage_ranks(found.mesh, max(cut, key=lambda m: m.size()))
        same_part = group_over(peers) if len(peers) > 1 else None
    return PromptRanks(found.group, same_part, found.data, found.mesh)
