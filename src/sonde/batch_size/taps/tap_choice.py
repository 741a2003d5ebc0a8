"""The choice of the tap that reads a model's gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from torch.nn.parallel import DistributedDataParallel

from sonde.batch_size.taps.ddp_buckets import CommHook, DDPBucketTap
from sonde.batch_size.taps.leaf_hooks import LeafHookTap
from sonde.batch_size.taps.metric import Metrics
from sonde.batch_size.taps.shared_pieces import ContextPieces, CutGradients
from sonde.batch_size.taps.tap import Tap
from sonde.batch_size.taps.witness import Witness
from sonde.batch_size.window_clock import OwnTime
from sonde.parallel.wrappers import Wrapper

TapName = Literal["leaf", "comm_hook"]


def choose_tap(
    wrapper: Wrapper,
    witness: Witness,
    metrics: Metrics,
    *,
    name: TapName,
    comm_hook: CommHook | None,
    comm_state: object,
    staging_bytes: int,
    on_backward: Callable[[], None],
    own: OwnTime,
) -> Tap:
    """The tap of this name, with its hooks in place.

    Args:
        wrapper: the model.
        witness: elements to copy besides the norms.
        metrics: in which gradients are measured.
        name: "leaf" or "comm_hook".
        comm_hook: the user's DDP communication hook, for "comm_hook" to wrap.
        comm_state: the state that the hook is called with.
        staging_bytes: bound of the memory for gradients that wait.
        on_backward: called when a backward outside a declared piece has ended: that backward was a piece.
        own: the probe's time.

    Raises:
        ValueError: when the tap does not fit the model.
    """
    leaves, data = wrapper.leaves, wrapper.data
    if name == "comm_hook":
        return DDPBucketTap(
            _ddp_of(wrapper),
            leaves,
            witness,
            metrics,
            comm_hook=comm_hook,
            comm_state=comm_state,
            on_backward_end=on_backward,
            own=own,
        )
    context = None
    if (group := wrapper.sequence_group) is not None:
        context = ContextPieces(leaves, group, witness, metrics, staging_bytes=staging_bytes)
    cut = None
    if data.n_sharing > 1 or wrapper.experts or wrapper.has_cut_leaves:
        cut = CutGradients(leaves, data.first_sharing)
    return LeafHookTap(
        leaves,
        witness,
        metrics,
        parameters=list(wrapper.parameters.values()),
        cut=cut,
        context=context,
        on_backward_end=on_backward,
        own=own,
        staging_bytes=staging_bytes,
    )


def _ddp_of(wrapper: Wrapper) -> DistributedDataParallel:
    """The DDP module whose buckets hold each rank's whole gradient.

    Raises:
        ValueError: when there is none.
    """
    if wrapper.ddp is None or wrapper.mesh is not None:
        raise ValueError(f"tap='comm_hook' reads DDP's buckets, got a model of kind {wrapper.name}: use tap='leaf'")
    if not wrapper.ddp_holds_all:
        raise ValueError(
            "tap='comm_hook' reads the buckets of one DDP module, got a model with trainable parameters outside: "
            "use tap='leaf'"
        )
    if wrapper.n_ranks < 2:
        raise ValueError(
            "tap='comm_hook' takes each rank's whole window for one piece, got 1 rank, whose one piece shows no "
            "noise: use tap='leaf', which reads each micro-batch, or train on 2 or more ranks"
        )
    return wrapper.ddp
