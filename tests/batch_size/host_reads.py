"""Notes where sonde reads a value of a tensor on the host, and which functions may."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from sonde.parallel import devices
from tests.pretend_device import reads_host, sonde_functions

OF_A_CLIP = {
    "gradient_norm/global_norm.py:error_of_peers",
    "gradient_norm/scaling.py:_coefficient",
    "gradient_norm/power_sums.py:_square_sum_in_blocks",
}
"""A clip looks at its norm and at its ranks' errors, if these are at hand: not on a GPU."""
OF_A_MESH = {
    # torch works out a shard's place with tensors of its own, on the CPU, once for each placement.
    "parallel/placements.py:shard_of",
    # A mesh's ranks are a tensor on the CPU.
    "parallel/placements.py:ranks_along",
}
COPIES = {"parallel/devices.py:start_copy_to_host"}
"""Copies at once where no device works beside the host. (Of a GPU, it starts a copy that does not wait.)"""
AT_HAND = OF_A_CLIP | OF_A_MESH | COPIES
"""Functions that may read on a CPU."""

ARRIVED = "batch_size/arrivals.py:receive"
"""Takes in copies that have arrived: what is read inside is on the host on any device."""


class HostReads(TorchDispatchMode):
    """Notes sonde's reads of values on this thread. (Callbacks of DDP run the same code on other threads.)"""

    def __init__(self) -> None:
        super().__init__()
        self.n_reads: Counter[str] = Counter()
        self._calls = CallsWithoutOperator(self)

    @property
    def places(self) -> set[str]:
        """Functions of sonde that read."""
        return set(self.n_reads)

    def note(self) -> None:
        """Note a read, if sonde makes it."""
        if (functions := sonde_functions()) and ARRIVED not in functions:
            self.n_reads[functions[0]] += 1

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if reads_host(function, args, kwargs, lambda x: isinstance(x, torch.Tensor)):
            self.note()
        return function(*args, **kwargs)

    def __enter__(self) -> HostReads:
        self._calls.__enter__()
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._calls.__exit__(*error)


READ_WHOLE = frozenset((Tensor.tolist, Tensor.numpy, Tensor.cpu))
"""Methods that read all values."""


def _waits_for_cpu(args: Any, kwargs: Any) -> bool:
    """Whether a call of `Tensor.to` with these arguments is a copy to the CPU that waits."""
    names = [each for each in (*args[1:], *kwargs.values()) if isinstance(each, str)]
    return "cpu" in names and not kwargs.get("non_blocking")


class CallsWithoutOperator(TorchFunctionMode):
    """Notes reads of a whole tensor, and copies to the CPU that wait: if it is there, they call no operator."""

    def __init__(self, reads: HostReads) -> None:
        super().__init__()
        self._reads = reads

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function in READ_WHOLE or (function is Tensor.to and _waits_for_cpu(args, kwargs)):
            self._reads.note()
        return function(*args, **kwargs)


@contextlib.contextmanager
def nothing_at_hand() -> Iterator[None]:
    """Values on this device are not at hand, as those on a GPU: a clip does what it does there."""
    was, devices.is_at_hand.__code__ = devices.is_at_hand.__code__, (lambda device: False).__code__
    try:
        yield
    finally:
        devices.is_at_hand.__code__ = was
