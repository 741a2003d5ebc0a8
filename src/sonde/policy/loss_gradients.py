"""The gradients of several losses, as one step of the training would have them, with the training left as it was."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from sonde.parallel.model_state import preserve_buffers, preserve_gradients, preserve_modes_and_randomness
from sonde.parallel.placements import is_fully_sharded, local_tensor
from sonde.parallel.process_groups import digest, gather_from_all_ranks, start_reduce
from sonde.parallel.unwrap import parameters_of, unwrap_optimizer
from sonde.policy.policy_step import PolicyStep
from sonde.policy.scoring.optimizer_step import Direction
from sonde.policy.scoring.summed_gradient import (
    check_no_other_hook,
    check_nothing_waits,
    reduces_every_backward,
)

Loss = Callable[[], Tensor]
"""Returns the loss of a whole update batch, with a graph of its own."""


def check_losses(losses: object, baseline: str | None, group: dist.ProcessGroup | None) -> str:
    """Refuse losses that cannot be compared, on all ranks.

    Returns:
        The name of the baseline, which is the first loss by default.
    """
    if not isinstance(losses, Mapping):
        raise ValueError(
            f"losses must map names to functions that return a loss, got a {type(losses).__name__}: pass "
            '{"clip 0.2": lambda: loss(0.2), "clip 0.3": lambda: loss(0.3)}, say'
        )
    for name, loss in losses.items():
        if not isinstance(name, str) or not name.strip():
            raise ValueError(f"the name of each loss must be a text, got {name!r:.60}: name the option, as 'clip 0.2'")
        if not callable(loss):
            raise ValueError(
                f"the loss {name!r} must be a function without arguments, got a "
                f"{type(loss).__name__}: pass lambda: loss(0.2), say"
            )
    if len(losses) < 2:
        raise ValueError(f"a comparison needs at least 2 losses, got {len(losses)}: use forecast() for one")
    if baseline is not None and baseline not in losses:
        raise ValueError(f"baseline must be one of {', '.join(map(repr, losses))}, got {baseline!r:.60}")
    baseline = next(iter(losses)) if baseline is None else baseline
    names = torch.tensor([digest((*losses, baseline))])
    if len(gather_from_all_ranks(group, lambda: {"names": names})["names"].unique()) > 1:
        raise ValueError("the ranks compare different losses: pass the same names in the same order on all ranks")
    return baseline


class LossGradients:
    """Takes one backward of each loss. Make it before the model is put into evaluation mode.

    Args:
        step: of the policy's optimizer; the policy is plain, in DDP or FSDP2.
        group: the ranks, over which gradients are averaged.
    """

    def __init__(self, step: PolicyStep, group: dist.ProcessGroup | None) -> None:
        model = step.model
        self._model, self._parameters, self._optimizer = model, step.parameters, step.optimizer
        self._group, self._loss_scale = group, step.loss_scale
        self._all = list(dict.fromkeys([*step.parameters, *parameters_of(step.optimizer)]))
        self._modes = [(module, module.training) for module in model.modules()]
        self._is_sharded = any(map(is_fully_sharded, model.modules()))
        if any(isinstance(m, DistributedDataParallel) and m.static_graph for m in model.modules()):
            raise ValueError(
                "DDP with static_graph=True must reduce its first backward, so no loss can be compared beside the "
                "training: leave static_graph out"
            )
        check_no_other_hook(self._all)
        check_nothing_waits(model)

    def take(self, name: str, loss: Loss) -> Direction:
        """The gradient of a loss, averaged over ranks; parameters that it does not reach are left out.

        While the loss runs, a copy of the parameters is held, to find out whether it changes them.

        Raises:
            ValueError: for what is no loss of this model, on all ranks alike.
        """
        self._agree()  # a rank that failed before says so here, and not in the middle of a backward
        with self._as_in_training(), preserve_gradients(self._all), _unmoved(self._all) as have_moved:
            value = self._value(name, loss)
            self._agree()
            with preserve_gradients(_leaves(value)):
                _backward(name, self._loss_scale * value)
                found: Direction = {p: p.grad for p in self._parameters if p.grad is not None}
            del value  # and its graph
            is_moved = have_moved()
        has = torch.tensor([[is_moved, any(bool(local_tensor(g).any()) for g in found.values())]])
        reached = torch.tensor([[p in found for p in self._parameters]])
        said = gather_from_all_ranks(self._group, lambda: {"has": has, "reached": reached})
        if bool(said["has"][:, 0].any()):
            raise ValueError(
                f"the loss {name!r} changed parameters, which have their values again: it must compute a loss alone, "
                "without a step of an optimizer"
            )
        if not bool(said["has"][:, 1].any()):
            raise ValueError(
                f"the loss {name!r} has no gradient on any of the model's trainable parameters, or only zeros: run "
                "the model that the probe has, outside no_grad(), on a batch whose advantages are not all 0"
            )
        return self._over_ranks(found, said["reached"].any(0).tolist())

    def _agree(self) -> None:
        gather_from_all_ranks(self._group, dict)

    @contextlib.contextmanager
    def as_gradients(self, gradient: Direction) -> Iterator[None]:
        """`.grad` holds a gradient inside."""
        with preserve_gradients(self._all):
            for parameter, own in gradient.items():
                parameter.grad = own
            yield

    @contextlib.contextmanager
    def _as_in_training(self) -> Iterator[None]:
        """Modules have the modes of training, each loss has the same random numbers, and DDP does not reduce."""
        refused = getattr(unwrap_optimizer(self._optimizer), "register_step_pre_hook", None)
        with contextlib.ExitStack() as stack:
            stack.enter_context(preserve_modes_and_randomness(self._model))
            stack.enter_context(preserve_buffers(self._model))
            stack.enter_context(reduces_every_backward(self._model))
            for module, mode in self._modes:
                module.training = mode
                if isinstance(module, DistributedDataParallel):
                    stack.enter_context(module.no_sync())
            if refused is not None:
                stack.callback(refused(_refuse_step).remove)
            stack.enter_context(torch.enable_grad())
            yield

    def _value(self, name: str, loss: Loss) -> Tensor:
        value: Any = loss()
        if not isinstance(value, Tensor) or value.numel() != 1:
            got = f"shape {list(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
            raise ValueError(f"the loss {name!r} must be a tensor of one element, got {got}: take its mean or sum")
        if value.grad_fn is None:
            raise ValueError(
                f"the loss {name!r} has no graph, so it reaches no parameter: compute it outside no_grad(), without "
                "detach() or item()"
            )
        if not bool(value.isfinite()):
            raise ValueError(f"the loss {name!r} is {float(value.detach())}: only finite losses can be compared")
        return value.reshape(())

    @torch.no_grad()
    def _over_ranks(self, found: Direction, is_reached: Sequence[bool]) -> Direction:
        """The mean over ranks, which FSDP2 has taken already."""
        if self._group is None or self._group.size() == 1 or self._is_sharded:
            return found
        pairs = zip(self._parameters, is_reached, strict=True)
        mean: Direction = {p: found[p] if p in found else torch.zeros_like(p) for p, reached in pairs if reached}
        for gradient in mean.values():
            part = local_tensor(gradient)
            if work := start_reduce(part, self._group):
                work.wait()
            part.div_(self._group.size())
        return mean


def _refuse_step(*_: Any) -> None:
    raise ValueError("a loss must not take a step of the optimizer: return the loss alone, without step()")


def _backward(name: str, loss: Tensor) -> None:
    try:
        loss.backward()
    except RuntimeError as error:
        if "second time" not in str(error) and "inplace operation" not in str(error):
            raise
        raise ValueError(
            f"the graph of the loss {name!r} was used already, perhaps by the loss before it: pass functions that run "
            "the model's forward anew"
        ) from error


@contextlib.contextmanager
def _unmoved(parameters: Sequence[Tensor]) -> Iterator[Callable[[], bool]]:
    """Yields what tells whether parameters were changed. On exit they have their former bits."""
    before = [(local, local.clone()) for p in parameters if not p.is_meta for local in [local_tensor(p.detach())]]

    def have_moved() -> bool:
        return any(not _is_same(now, then) for now, then in before)

    try:
        yield have_moved
    finally:
        with torch.no_grad():
            for now, then in before:
                if not _is_same(now, then):
                    now.copy_(then)


def _is_same(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a, b) or bool(((a == b) | (a.isnan() & b.isnan())).all())


def _leaves(loss: Tensor) -> list[Tensor]:
    """Whatever a backward would accumulate a gradient in: perhaps also a critic of another optimizer."""
    nodes: list[Any] = [loss.grad_fn]
    seen, leaves = set(nodes), list[Tensor]()
    while nodes:
        node = nodes.pop()
        if (leaf := getattr(node, "variable", None)) is not None:
            leaves.append(leaf)
        new = {n for n, _ in node.next_functions if n is not None} - seen
        seen |= new
        nodes += new
    return leaves
