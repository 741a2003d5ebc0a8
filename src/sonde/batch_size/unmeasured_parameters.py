"""Parameters that a model has but that are not measured, since they came or became trainable after attach."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import Tensor, nn

from sonde.parallel.inventory import Inventory
from sonde.parallel.wrappers import clean_name


class UnmeasuredParameters:
    """Looks for parameters that are not measured.

    Args:
        model: as the user calls it.
        measured: the parameters that are.
        leaves: what FSDP2 shows at times in the place of each of them, otherwise the parameter itself.
        stand_ins: what FSDP2 shows at times in the place of any other parameter.
    """

    def __init__(
        self, model: nn.Module, measured: Sequence[Tensor], leaves: Sequence[Tensor], stand_ins: Iterable[Tensor]
    ) -> None:
        self._inventory = Inventory(model)
        self._measured = {id(p) for p in (*measured, *stand_ins)}
        self._shown_as = [{id(p), id(leaf)} for p, leaf in zip(measured, leaves, strict=True)]
        self._judged: dict[str, nn.Parameter] | None = None
        """The parameters of the model when `have_replaced_measured` was last worked out."""
        self._has_replaced = False

    def now(self) -> dict[str, nn.Parameter]:
        """Those that the model has now, by name."""
        return {name: p for name, p in self._inventory.parameters().items() if id(p) not in self._measured}

    def have_replaced_measured(self) -> bool:
        """Whether the model has lost a measured parameter, and has a trainable one that is not measured instead."""
        named = self._inventory.parameters()
        if named is not self._judged:
            present = {id(p) for p in named.values()}
            has_lost = any(present.isdisjoint(shown) for shown in self._shown_as)
            self._has_replaced = has_lost and any(p.requires_grad for p in self.now().values())
            self._judged = named
        return self._has_replaced

    def alert(self) -> str:
        """What to say if some of them are trainable; empty if none is."""
        trainable = [name for name, p in self.now().items() if p.requires_grad]
        if not trainable:
            return ""
        return (
            f"{len(trainable)} parameters became trainable, or replaced others, after the probe was attached, and "
            f"are not measured ({clean_name(trainable[0])}, …): attach again"
        )
