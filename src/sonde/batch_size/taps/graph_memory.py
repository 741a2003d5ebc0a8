"""Gradients in memory that a CUDA graph owns, and writes to again at its next run."""

from __future__ import annotations

import torch
from torch import Tensor


def is_same_memory(earlier: Tensor, later: Tensor) -> bool:
    """Whether a gradient lies where an earlier one lay that is still held, so that the earlier one is overwritten.

    No allocator gives out memory that is held. A graph that was captured writes its results to the same place.
    """
    dense = earlier.layout is later.layout is torch.strided
    return dense and earlier.dtype == later.dtype and earlier.is_set_to(later)


def is_output_of_graph(grad: Tensor) -> bool:
    """Whether `torch.compile(mode="reduce-overhead")` owns a gradient's memory, and takes it back at its next run.

    autograd asks the same before it keeps a gradient as `.grad`.
    """
    # Private: there is no public function. A test guards it.
    return not grad.is_cpu and torch._C._is_cached_tensor(grad)  # type: ignore[attr-defined]


def says_overwritten(error: RuntimeError) -> bool:
    """Whether torch refuses to read what a compiled graph returned in a run before its last."""
    return "has been overwritten by a subsequent run" in str(error)
