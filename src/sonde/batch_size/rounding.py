"""What may happen to this model's gradients by rounding, and what else may have changed them."""

from __future__ import annotations

import torch
import torch.distributed as dist

from sonde.batch_size.stats.scale_witness import RoundingTolerance
from sonde.batch_size.taps.ddp_buckets import comm_hook_name
from sonde.parallel.wrappers import Wrapper, lowest_precision


class RoundingWatch:
    """Keeps to what is to be expected: DDP may get a communication hook after attach, or the model another dtype.

    Args:
        wrapper: the model.
        comm_hook: the communication hook that its gradients go through, by name, asked before any tap wraps it.
    """

    def __init__(self, wrapper: Wrapper, comm_hook: str | None) -> None:
        self._wrapper, self._comm_hook = wrapper, comm_hook
        self._first = next(iter(wrapper.parameters.values()))
        self._dtype = self._first.dtype
        self._had_gradients = any(p.grad is not None for p in wrapper.parameters.values())

    def now(self) -> RoundingTolerance:
        """As things stand."""
        dtype, comm_hook = lowest_precision(self._wrapper.parameters), self._comm_hook
        is_16_bit = torch.finfo(dtype).bits <= 16
        # The least that fp16 holds is 6e-8; a communication hook may send fp16, unless it says that it sends bf16.
        sends_fp16 = comm_hook is not None and "bf16" not in comm_hook
        return RoundingTolerance(
            # 16-bit gradients, and communication hooks that send 16 bits, round each element by up to 2⁻⁸ of it; sums
            # of 16 in bf16 are off by 5e-3. Even if it were noise, 1e-2 would move B_simple by less than
            # (1 + B_simple/B)·1e-4 of itself.
            tolerance=1e-2 if is_16_bit or comm_hook is not None else 1e-4,
            floor=1e-7 if dtype == torch.float16 or sends_fp16 else 0.0,
            blame=self._blame(is_16_bit=is_16_bit),
        )

    def has_changed(self) -> bool:
        """Whether a communication hook has been registered, or the model been converted, since the last call."""
        name, dtype = comm_hook_name(self._wrapper.ddp) or self._comm_hook, self._first.dtype
        if name == self._comm_hook and dtype == self._dtype:
            return False
        self._comm_hook, self._dtype = name, dtype
        return True

    def _blame(self, *, is_16_bit: bool) -> str:
        if self._comm_hook is not None:
            return f"DDP's communication hook {self._comm_hook!r} is lossy, or noise was added or a hook changed it"
        if self._wrapper.group is None and dist.is_initialized() and dist.get_world_size() > 1:
            return (
                "gradients were reduced over ranks? Wrap the model in DDP, "
                "or pass process_group= if you reduce them yourself"
            )
        earlier = ""
        if self._had_gradients:
            earlier = "gradients were there before the probe was attached (zero them first), or "
        if is_16_bit:
            earlier += "16-bit gradients lost what is small while many were added up (accumulate in fp32), or "
        return f"{earlier}noise was added, a hook changed it, or a backward outside this window wrote to it"
