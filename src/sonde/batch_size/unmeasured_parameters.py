"""Parameters that a model has but that are not measured, since they came or became trainable after attach."""

from __future__ import annotations

from torch import Tensor, nn

from sonde.batch_size.taps.problems import Problem
from sonde.parallel.gathered import shown_after_forward
from sonde.parallel.inventory import Inventory
from sonde.parallel.optimizers import parameters_of
from sonde.parallel.placements import is_dtensor
from sonde.parallel.wrappers import Wrapper, clean_name
from sonde.wording import plural, some_of


class UnmeasuredParameters:
    """Looks for parameters that are not measured: of the model, and of its optimizers.

    Args:
        model: as the user calls it.
        wrapper: of the model, with the parameters that are measured.
    """

    def __init__(self, model: nn.Module, wrapper: Wrapper) -> None:
        self._model, self._inventory, self._optimizers = model, Inventory(model), wrapper.optimizers
        measured = list(wrapper.parameters.values())
        self._measured = {id(p) for p in (*measured, *wrapper.stand_ins)}
        self._left_out = {id(p) for p in wrapper.frozen.values() if p.requires_grad}
        self._shown_as = [{id(p), id(leaf)} for p, leaf in zip(measured, wrapper.leaves, strict=True)]
        self._was_cut = any(map(is_dtensor, measured))
        self._looked_at: tuple[dict[str, nn.Parameter], int] | None = None
        self._of_model: dict[str, nn.Parameter] = {}
        self._of_optimizers: dict[str, Tensor] = {}
        self._change: Problem | None = None

    def _look(self) -> None:
        """Look again if the model has other parameters, or its optimizers have more after `add_param_group`."""
        shown = self._inventory.parameters()
        n_stepped = sum(len(group["params"]) for optimizer in self._optimizers for group in optimizer.param_groups)
        if self._looked_at is not None and self._looked_at[0] is shown and self._looked_at[1] == n_stepped:
            return
        self._looked_at = shown, n_stepped
        own = shown_after_forward(self._model)
        named = {name: own.get(id(p), p) for name, p in shown.items()}
        stepped = {id(p): p for p in parameters_of(*self._optimizers)}
        known = self._measured | (self._left_out - stepped.keys())  # what no optimizer steps is left out for good
        self._of_model = {name: p for name, p in named.items() if id(p) not in known}
        known = self._measured.union(map(id, self._of_model.values()))
        others = [p for key, p in stepped.items() if key not in known]
        self._of_optimizers = {f"parameter {i} that only the optimizer holds": p for i, p in enumerate(others)}
        present = {id(p) for p in named.values()}
        has_lost = any(present.isdisjoint(shown_as) for shown_as in self._shown_as)
        new = [p for p in self._of_model.values() if p.requires_grad] if has_lost else []
        is_cut = not self._was_cut and any(map(is_dtensor, new))
        self._change = (Problem.CUT_LATE if is_cut else Problem.REPLACED) if new else None

    def now(self) -> dict[str, Tensor]:
        """Those of the model and of its optimizers, by name, which a clip takes besides."""
        self._look()
        return self._of_model | self._of_optimizers

    def late_change(self) -> Problem | None:
        """What has become of a model that has lost a measured parameter, and trains one that is not measured instead.

        Returns:
            None if it has not.
        """
        self._look()
        return self._change

    def alert(self) -> str:
        """What to say if some of them are trainable; empty if none is."""
        self._look()
        trainable = {clean_name(name): p for name, p in self._of_model.items() if p.requires_grad}
        if not trainable:
            return ""
        n, some = plural(len(trainable), "parameter"), some_of(list(trainable))
        if any(id(p) in self._left_out for p in trainable.values()):
            return (
                f"an optimizer steps {n} that no given one held at attach, and that cannot be measured ({some}): "
                "attach again, with all optimizers that step the model: optimizer=(first, second)"
            )
        return f"{n} came or became trainable after attach and cannot be measured ({some}): attach again"
