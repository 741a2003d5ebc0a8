"""Forwards and backwards that sonde runs itself, which no probe may take for the training's."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from torch import nn

from sonde.parallel.gathered import fsdp_groups

_running: dict[int, int] = {}
"""How many of sonde's own passes go on, by the `id` of each module and parameter that they use.

Module-level, because the hooks of one probe must know of the passes of another, and autograd calls hooks on threads of
its own.
"""


@contextlib.contextmanager
def own_passes(model: nn.Module) -> Iterator[None]:
    """Passes of the model inside are sonde's own."""
    gathered = (vars(p).get("_unsharded_param") for group in fsdp_groups(model) for p in group.fsdp_params)
    parts = [*model.modules(), *model.parameters(), *(p for p in gathered if p is not None)]  # keeps the ids in use
    for part in parts:
        _running[id(part)] = _running.get(id(part), 0) + 1
    try:
        yield
    finally:
        for part in parts:
            _running[id(part)] -= 1
            if not _running[id(part)]:
                del _running[id(part)]


def is_in_own_pass(part: object) -> bool:
    """Whether the pass that uses a module or a parameter now is sonde's own."""
    return bool(_running) and id(part) in _running
