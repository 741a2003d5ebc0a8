"""Parameters that a model has but that are not measured, since they came or became trainable after attach."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor, nn

from sonde.parallel.inventory import Inventory
from sonde.parallel.wrappers import clean_name


class UnmeasuredParameters:
    """Looks for parameters that are not measured.

    Args:
        model: as the user calls it.
        measured: the parameters that are.
    """

    def __init__(self, model: nn.Module, measured: Iterable[Tensor]) -> None:
        self._inventory = Inventory(model)
        self._measured = {id(p) for p in measured}

    def now(self) -> dict[str, nn.Parameter]:
        """Those that the model has now, by name."""
        return {name: p for name, p in self._inventory.parameters().items() if id(p) not in self._measured}

    def alert(self) -> str:
        """What to say if some of them are trainable; empty if none is."""
        trainable = [name for name, p in self.now().items() if p.requires_grad]
        if not trainable:
            return ""
        return (
            f"{len(trainable)} parameters became trainable, or replaced others, after the probe was attached, and "
            f"are not measured ({clean_name(trainable[0])}, …): attach again"
        )
