"""Parameters that a model has but that are not measured, since they came or became trainable after attach."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import Tensor, nn

from sonde.batch_size.taps.tap import Problem
from sonde.parallel.gathered import shown_after_forward
from sonde.parallel.inventory import Inventory
from sonde.parallel.placements import is_dtensor
from sonde.parallel.wrappers import clean_name
from sonde.wording import plural, some_of


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
        self._model, self._inventory = model, Inventory(model)
        self._shown: dict[str, nn.Parameter] | None = None
        self._named: dict[str, nn.Parameter] = {}
        self._measured = {id(p) for p in (*measured, *stand_ins)}
        self._shown_as = [{id(p), id(leaf)} for p, leaf in zip(measured, leaves, strict=True)]
        self._was_cut = any(map(is_dtensor, measured))
        self._judged: dict[str, nn.Parameter] | None = None
        """The parameters of the model when `late_change` was last worked out."""
        self._change: Problem | None = None

    def _parameters(self) -> dict[str, nn.Parameter]:
        """All parameters that the model has now, by name; the same dictionary until they change."""
        shown = self._inventory.parameters()
        if shown is not self._shown:
            own = shown_after_forward(self._model)
            self._shown, self._named = shown, {name: own.get(id(p), p) for name, p in shown.items()}
        return self._named

    def now(self) -> dict[str, nn.Parameter]:
        """Those that the model has now, by name."""
        return {name: p for name, p in self._parameters().items() if id(p) not in self._measured}

    def late_change(self) -> Problem | None:
        """What has become of a model that has lost a measured parameter, and trains one that is not measured instead.

        Returns:
            None if it has not.
        """
        named = self._parameters()
        if named is not self._judged:
            present = {id(p) for p in named.values()}
            has_lost = any(present.isdisjoint(shown) for shown in self._shown_as)
            new = [p for p in self.now().values() if p.requires_grad] if has_lost else []
            is_cut = not self._was_cut and any(map(is_dtensor, new))
            self._change = (Problem.CUT_LATE if is_cut else Problem.REPLACED) if new else None
            self._judged = named
        return self._change

    def alert(self) -> str:
        """What to say if some of them are trainable; empty if none is."""
        trainable = [name for name, p in self.now().items() if p.requires_grad]
        if not trainable:
            return ""
        return (
            f"{plural(len(trainable), 'parameter')} came or became trainable after attach and cannot be measured "
            f"({some_of([clean_name(name) for name in trainable])}): attach again"
        )
