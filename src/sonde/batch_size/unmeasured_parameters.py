"""Parameters that a model has but that are not measured, since they came or became trainable after attach."""

from __future__ import annotations

from torch import Tensor, nn

from sonde.batch_size.taps.tap import Problem
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
        self._shown: dict[str, nn.Parameter] | None = None
        self._named: dict[str, nn.Parameter] = {}
        measured = list(wrapper.parameters.values())
        self._measured = {id(p) for p in (*measured, *wrapper.stand_ins)}
        self._left_out = {id(p) for p in wrapper.frozen.values() if p.requires_grad}
        self._shown_as = [{id(p), id(leaf)} for p, leaf in zip(measured, wrapper.leaves, strict=True)]
        self._was_cut = any(map(is_dtensor, measured))
        self._judged: dict[str, nn.Parameter] | None = None
        """The parameters of the model when `late_change` was last worked out."""
        self._change: Problem | None = None
        self._stepped: dict[int, Tensor] = {}
        self._n_stepped = 0

    def _parameters(self) -> dict[str, nn.Parameter]:
        """All parameters that the model has now, by name; the same dictionary until they change."""
        shown = self._inventory.parameters()
        if shown is not self._shown:
            own = shown_after_forward(self._model)
            self._shown, self._named = shown, {name: own.get(id(p), p) for name, p in shown.items()}
        return self._named

    def _stepped_now(self) -> dict[int, Tensor]:
        """What the optimizers hold now, by id: more after `add_param_group`."""
        n = sum(len(group["params"]) for optimizer in self._optimizers for group in optimizer.param_groups)
        if n != self._n_stepped:
            self._n_stepped = n
            self._stepped = {id(p): p for p in parameters_of(*self._optimizers)}
        return self._stepped

    def _of_model(self) -> dict[str, nn.Parameter]:
        """Those of the model, by name, but for what no optimizer steps."""
        unknown = self._measured | (self._left_out - self._stepped_now().keys())
        return {name: p for name, p in self._parameters().items() if id(p) not in unknown}

    def now(self) -> dict[str, Tensor]:
        """Those of the model and of its optimizers, by name, which a clip takes besides."""
        of_model = self._of_model()
        known = self._measured.union(map(id, of_model.values()))
        others = [p for key, p in self._stepped_now().items() if key not in known]
        return of_model | {f"parameter {i} that only the optimizer holds": p for i, p in enumerate(others)}

    def late_change(self) -> Problem | None:
        """What has become of a model that has lost a measured parameter, and trains one that is not measured instead.

        Returns:
            None if it has not.
        """
        named = self._parameters()
        if named is not self._judged:
            present = {id(p) for p in named.values()}
            has_lost = any(present.isdisjoint(shown) for shown in self._shown_as)
            new = [p for p in self._of_model().values() if p.requires_grad] if has_lost else []
            is_cut = not self._was_cut and any(map(is_dtensor, new))
            self._change = (Problem.CUT_LATE if is_cut else Problem.REPLACED) if new else None
            self._judged = named
        return self._change

    def alert(self) -> str:
        """What to say if some of them are trainable; empty if none is."""
        trainable = {clean_name(name): p for name, p in self._of_model().items() if p.requires_grad}
        if not trainable:
            return ""
        n, some = plural(len(trainable), "parameter"), some_of(list(trainable))
        if any(id(p) in self._left_out for p in trainable.values()):
            return (
                f"an optimizer steps {n} that no given one held at attach, and that cannot be measured ({some}): "
                "attach again, with all optimizers that step the model: optimizer=(first, second)"
            )
        return f"{n} came or became trainable after attach and cannot be measured ({some}): attach again"
