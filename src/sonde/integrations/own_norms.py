"""Norms of gradients that a loop or a trainer takes by torch's own functions, to clip by them or to log them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

Note = Callable[[Sequence[Tensor], Tensor, float | None], object]
"""Called with the parameters or gradients, their 2-norm before a clip, and max_norm of the clip; None without one."""


def _noted(note: Note, tensors: Any, use: Callable[[Any], Any], max_norm: Any, norm_type: Any, by: Any = None) -> Any:
    if torch.compiler.is_compiling():
        return use(tensors)
    every = [tensors] if isinstance(tensors, Tensor) else list(tensors)
    if not isinstance(tensors, Tensor | list | tuple):  # it may be used up now
        tensors = (t for t in every)
    result = use(tensors)
    norm = result if by is None else by
    if float(norm_type) == 2.0 and isinstance(norm, Tensor):
        note(every, norm, None if max_norm is None or max_norm == math.inf else float(max_norm))
    return result


def _clip(note: Note, clip: Any, parameters: Any, max_norm: Any, norm_type: Any = 2.0, *args: Any, **more: Any) -> Any:
    return _noted(note, parameters, lambda p: clip(p, max_norm, norm_type, *args, **more), max_norm, norm_type)


def _total(note: Note, total: Any, tensors: Any, norm_type: Any = 2.0, *args: Any, **more: Any) -> Any:
    return _noted(note, tensors, lambda t: total(t, norm_type, *args, **more), None, norm_type)


def _clip_by(note: Note, clip: Any, parameters: Any, max_norm: Any, total_norm: Any, *args: Any, **more: Any) -> Any:
    return _noted(note, parameters, lambda p: clip(p, max_norm, total_norm, *args, **more), max_norm, 2.0, total_norm)


FUNCTIONS: Mapping[str, Callable[..., Any]] = {
    "clip_grad_norm_": _clip,
    "get_total_norm": _total,
    "clip_grads_with_norm_": _clip_by,
}
"""Of `torch.nn.utils`, by name: what calls each of them, with a `Note`, the function itself and its arguments."""
