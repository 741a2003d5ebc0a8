"""How far rounding may move this model's gradients, and what else may have changed them."""

from __future__ import annotations

import torch
import torch.distributed as dist

from sonde.batch_size.stats.scale_witness import RoundingTolerance
from sonde.batch_size.taps.ddp_buckets import comm_hook_name
from sonde.parallel.wrappers import Wrapper, lowest_precision


class RoundingWatch:
    """Notices changes of the rounding after attach: a communication hook that DDP gets, a model in another dtype.

    Args:
        wrapper: the model.
        comm_hook: name of the user's communication hook, looked up before a tap wraps that hook; None without a hook.
    """

    def __init__(self, wrapper: Wrapper, comm_hook: str | None) -> None:
        self._wrapper, self._comm_hook = wrapper, comm_hook
        self._first = wrapper.leaves[0]
        self._dtype = self._first.dtype

    def now(self) -> RoundingTolerance:
        """The tolerance for the model as it is now."""
        dtypes = [leaf.dtype for leaf in self._wrapper.leaves]
        dtype, comm_hook = lowest_precision([*dtypes, *self._wrapper.reduced_in]), self._comm_hook
        is_16_bit = torch.finfo(dtype).bits <= 16
        # The smallest number of fp16 is 6e-8. A communication hook may send fp16, unless its name says bf16.
        sends_fp16 = comm_hook is not None and "bf16" not in comm_hook
        return RoundingTolerance(
            # Gradients in 16 bits, and communication hooks that send 16 bits, round each element by up to 2⁻⁸ of its
            # size; sums of 16 pieces in bf16 are off by 5e-3. Even if a residual of 1e-2 were noise, it would move
            # B_simple by less than (1 + B_simple/B)·1e-4 of itself.
            tolerance=1e-2 if is_16_bit or comm_hook is not None else 1e-4,
            floor=1e-7 if dtype == torch.float16 or sends_fp16 else 0.0,
            likely_cause=self._likely_cause(is_16_bit=is_16_bit),
        )

    def has_changed(self) -> bool:
        """Whether a communication hook was registered, or the model converted, since the last call."""
        name, dtype = comm_hook_name(self._wrapper.ddp) or self._comm_hook, self._first.dtype
        if name == self._comm_hook and dtype == self._dtype:
            return False
        self._comm_hook, self._dtype = name, dtype
        return True

    def _likely_cause(self, *, is_16_bit: bool) -> str:
        if self._comm_hook is not None:
            return f"DDP's communication hook {self._comm_hook!r} is lossy, noise was added, or another hook changed it"
        if self._wrapper.group is None and dist.is_initialized() and dist.get_world_size() > 1:
            return (
                "were gradients averaged over ranks? Wrap the model in DDP before attach and pass the wrapped one, or "
                "pass process_group= if you average them yourself"
            )
        lost = "16-bit gradients lost small parts while many were added up (accumulate in fp32), or "
        other = "noise was added, a hook changed it, or a backward outside this window wrote to it"
        if self._wrapper.n_ranks > 1 and self._wrapper.ddp is not None:
            other = f"ranks did not average their gradients (local SGD, model.no_sync()), {other}"
        return lost + other if is_16_bit else other
