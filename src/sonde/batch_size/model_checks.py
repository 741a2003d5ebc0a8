"""What a model and its optimizer bring along that bears on a noise scale: looked up at attach."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from sonde.parallel.optimizers import Optimizers, given_optimizers
from sonde.parallel.wrappers import Wrapper
from sonde.wording import plural, some_of

_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)

BATCH_NORM = (
    "batch normalisation in train mode couples the samples of a piece, so B_simple depends on the piece's size: "
    "compare runs at the same piece size only"
)

SYNC_BATCH_NORM = (
    "synchronised batch normalisation couples the samples of all pieces of a window: the noise between ranks is no "
    "longer that of independent data, however large the pieces are"
)
"""What also follows from synchronised batch normalisation."""

STEPS_IN_BACKWARD = "if these step an optimizer inside backward, no window can be measured"
"""What follows from post-accumulate-grad hooks."""


def n_batch_norms(model: nn.Module, kinds: tuple[type[nn.Module], ...] = _BATCH_NORMS) -> int:
    """Batch-normalisation layers that use the statistics of their batch now."""
    return sum(m.training or not m.track_running_stats for m in model.modules() if isinstance(m, kinds))


def n_sync_batch_norms(model: nn.Module, n_ranks: int) -> int:
    """Those of them that share their statistics over ranks."""
    return n_batch_norms(model, (nn.SyncBatchNorm,)) if n_ranks > 1 else 0


def refuse_steps_in_backward(model: nn.Module) -> None:
    """Refuse a model with trainable parameters that an optimizer steps inside backward.

    Raises:
        ValueError: when `torch.distributed.optim._apply_optimizer_in_backward` was called on one of them.
    """
    trainable = ((name, p) for name, p in model.named_parameters() if p.requires_grad)
    stepped = [name for name, p in trainable if getattr(p, "_in_backward_optimizers", None)]
    if stepped:
        raise ValueError(
            f"an optimizer steps {plural(len(stepped), 'parameter')} ({some_of(stepped)}) inside backward, so a "
            "window's gradient is gone before its pieces can be compared with it: step after backward while you measure"
        )


def refuse_lbfgs(optimizer: Optimizers) -> None:
    """Refuse an optimizer that no probe can follow.

    Raises:
        ValueError: with the way out.
    """
    if any(isinstance(each, torch.optim.LBFGS) for each in given_optimizers(optimizer)):
        raise ValueError(
            "LBFGS evaluates its closure several times a step, so that a step has no single gradient: measure a run "
            "with another optimizer"
        )


def n_post_accumulate_hooks(parameters: Iterable[Tensor]) -> int:
    """Parameters with a hook that runs once their gradient is accumulated. Such a hook may step an optimizer."""
    return sum(bool(p._post_accumulate_grad_hooks) for p in parameters)


def optimizer_in_words(optimizer: Optimizers, wrapper: Wrapper) -> str:
    """The optimizers whose steps are watched, and what they say of the parameters that are measured; for people."""
    if not (given := given_optimizers(optimizer)):
        return "none given: whichever is seen to step these parameters is watched"
    names = " and ".join(sorted(type(each).__name__ for each in wrapper.optimizers or given))
    if not wrapper.optimizers:
        are = "holds none" if len(given) == 1 else "hold none"
        return f"{names}, which {are} of these parameters: is it another model's?"
    n_left_out = sum(p.requires_grad for p in wrapper.frozen.values())
    if not n_left_out:
        return names
    n, others = len(wrapper.parameters), some_of([name for name, p in wrapper.frozen.items() if p.requires_grad])
    return (
        f"{names}, with {n} of {n + n_left_out} trainable parameters: only these are measured. If another optimizer "
        f"steps the others ({others}), pass it too: optimizer=(first, second)"
    )
