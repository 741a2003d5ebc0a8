"""The units of a piece, counted in what its forward was called with."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import itertools
import time
from collections.abc import Callable, Mapping
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from typing_extensions import TypeIs

from sonde.batch_size.batch_dim import (
    LayerSaw,
    UnclearUnitsError,
    compiled_layers,
    count_units,
    first_shape,
    is_single_unit,
    layers_that_know,
    layers_with_batch_first,
    may_be_single_unit,
    seen_by,
    tensors_in,
)
from sonde.batch_size.module_hook import ModuleHook, is_in_graph, put_on, takes_fast_path
from sonde.parallel.unwrap import unwrap_model

FirstDim = Literal["first dim"]
"""The rows of a micro-batch, as `count_units` finds them in what the model is called with and returns."""
[FIRST_DIM] = get_args(FirstDim)
UnitsOfForward = Callable[..., Any]
"""Called as the model is, it returns the micro-batch's units: a number, a 0-dim tensor, one of these by unit, or
`CountsOfForward`."""
UnitsPerPiece = float | Mapping[str, float] | FirstDim | UnitsOfForward | None
"""The units of a piece whose number the user does not give."""
_MOST_OUTPUTS = 8
"""Tensors of what a model returns, from the first on, by which a backward shows that it comes from this forward."""


@dataclasses.dataclass(frozen=True)
class CountsOfForward:
    """What a function of a forward may return besides the units: the arguments of `NoiseScaleProbe.piece`.

    Attributes:
        units: in the micro-batch; None for one unit per entry of `unit_weights`; "first dim" for its rows.
        weight: of the micro-batch in the loss; None where it weighs by its units.
        unit_weights: the weight of each unit, [units].
    """

    units: Any = None
    weight: float | Tensor | None = 1.0
    unit_weights: Tensor | None = None


@dataclasses.dataclass
class _Seen:
    """A forward that has built a graph.

    Attributes:
        is_training: whether the model was in train mode.
        units: what was counted, or the error of counting.
        is_reached: whether a backward has come to what it returned.
    """

    is_training: bool
    units: Any
    is_reached: bool = False

    def reach(self, gradients: object) -> None:
        """Called by autograd."""
        self.is_reached = True


class NotOneForwardError(UnclearUnitsError):
    """Raised where a backward does not come from one forward of the model, called with rows: only a number helps."""

    remedy = (
        "Pass units_per_piece= a number, or enter 'with probe.piece(units=…):' around the backward of each micro-batch"
    )


class SecondBackwardError(UnclearUnitsError):
    """Raised where the forward of a backward has had one before, so that both are of one piece."""

    remedy = "Put all backwards of one batch into one 'with probe.piece():'"


class ForwardUnits:
    """Counts the units of each forward that builds a graph, for the backward that comes from it.

    Of several forwards, that one counts whose graph the backward has run through: another's loss may only be logged.
    Where that is not seen, a forward in train mode goes before those in evaluation mode. Nothing is counted in windows
    that are not measured. A model whose forward was compiled with its hooks (`model.compile()`) shows nothing here.

    Args:
        model: as the user calls it.
        count: called as the model is, it returns the units.
    """

    def __init__(self, model: nn.Module, count: UnitsOfForward | FirstDim) -> None:
        self._forward, self._model = _Forward(model, count), model
        layers = layers_that_know(model)
        self._forward.has_layers_that_know = bool(layers)
        fast = {part for module in model.modules() if takes_fast_path(module) for part in module.modules()}
        self._layers = [layer for layer in layers if layer not in fast]  # a hook in those would change training
        self._handles: list[RemovableHandle] = []
        self._taken: list[_Seen] = []
        """Forwards of the present window whose units were taken, to notice a second backward of one."""
        self.open()

    def open(self) -> None:
        """Count forwards, if they are not counted."""
        if self._handles:
            return
        begins, called, ends = (
            _Hook(self._forward, note)
            for note in (self._forward.begins, self._forward.layer_is_called, self._forward.ends)
        )
        self._handles = [
            put_on(self._model.register_forward_pre_hook, begins, with_kwargs=True),
            *(put_on(layer.register_forward_pre_hook, called, with_kwargs=True) for layer in self._layers),
            put_on(self._model.register_forward_hook, ends),
        ]

    @property
    def seconds(self) -> float:
        """Host time spent in the hooks so far."""
        return self._forward.seconds

    @property
    def counted_in(self) -> str:
        """What was counted first, in words; empty where a function counts."""
        return self._forward.counted_in

    def take(self) -> Any:
        """The units of the one forward of the backward that has ended.

        Raises:
            SecondBackwardError: where the forward has had a backward before.
            NotOneForwardError: where there was no forward, or several, or one without a tensor that has rows.
            UnclearUnitsError: where rows are counted, and it is not clear which dim they are.
            Exception: what the user's function has raised.
        """
        seen, self._forward.seen = self._forward.seen, []
        again = any(each.is_reached for each in self._taken)
        if reached := [each for each in seen if each.is_reached]:
            # The backward of the others may still come.
            self._forward.seen = [each for each in seen if not each.is_reached]
            seen = reached
        seen = [each for each in seen if each.is_training] or seen
        if not seen and again:
            raise SecondBackwardError("a forward of the model had a second backward")
        if not seen:
            raise NotOneForwardError(
                "no forward of the model was seen before a backward: the loop calls parts of the model, or the model "
                "is compiled by model.compile()"
            )
        if len(seen) > 1:
            raise NotOneForwardError(f"a backward follows {len(seen)} forwards of the model")
        self._taken.append(seen[0])
        seen[0].is_reached = False
        units = seen[0].units
        if isinstance(units, Exception):
            raise units
        if units is None:
            raise NotOneForwardError("the model was called without a tensor that has rows")
        return units

    def forget(self) -> None:
        """Forget forwards whose backward has not come, before a declared piece."""
        self._forward.seen, self._taken = [], []

    def begin_window(self, *, is_measured: bool) -> None:
        """Forget forwards of the window before, and count those that come if the window is measured."""
        self._forward.seen, self._forward.counts, self._taken = [], is_measured, []

    def close(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self._forward.look_away()


class _Forward:
    """Counts the units of the present forward from its begin to its end.

    Args:
        model: as the user calls it.
        count: as for `ForwardUnits`.
    """

    def __init__(self, model: nn.Module, count: UnitsOfForward | FirstDim) -> None:
        self.seen: list[_Seen] = []
        """The forwards since they were taken."""
        self.seconds = 0.0
        self.counts = True
        """Whether the present window is measured."""
        self.counted_in = ""
        self.has_layers_that_know = False
        self._count = count
        self._names: tuple[str, ...] = ()
        with contextlib.suppress(TypeError, ValueError):  # of a forward that is not written in Python
            self._names = tuple(inspect.signature(unwrap_model(model).forward).parameters)
        self._called_with: dict[str, Any] = {}
        self._layers: list[LayerSaw] = []
        self._given: Any = None
        self._is_single: dict[int, bool] = {}
        """Whether the first tensor is one unit without a dim for the batch, by its number of dims."""
        self._looks: list[RemovableHandle] = []
        """Hooks on other layers that know the batch, in a forward of which this is not known yet."""
        self._seen_first: list[LayerSaw] = []
        self._compiled: list[nn.Module] = []
        """Layers that know the batch, and have no hook in this forward, since they are compiled."""

    @property
    def _is_counted(self) -> bool:
        return self.counts and torch.is_grad_enabled()

    def begins(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Note what the model is called with, before it takes anything out of it."""
        self.look_away()  # where the forward before has failed
        if not self._is_counted:
            return
        names = [*self._names[: len(args)], *map(str, range(len(self._names), len(args)))]
        self._called_with, self._layers = dict(zip(names, args, strict=True)) | kwargs, []
        try:
            self._given = self._count if isinstance(self._count, str) else self._count(*args, **kwargs)
        except Exception as error:  # raised where the units are needed, not inside the user's forward
            self._given = error
        with contextlib.suppress(Exception):  # of an object of the user's, which `ends` names
            self._look(model, args, kwargs)

    def _look(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Ask all layers of a first forward whether the model is called without a dim for the batch."""
        self._seen_first = []
        is_rows = _is_first_dim(getattr(self._given, "units", self._given))
        shape = first_shape(self._called_with) if is_rows else ()
        if not shape or shape[0] == 1 or len(shape) in self._is_single:
            return
        self._compiled = compiled_layers(model)
        hook = _Hook(self, self._layer_tells)
        for layer in layers_with_batch_first(model):
            self._looks.append(put_on(layer.register_forward_pre_hook, hook, with_kwargs=True))
            if layer is model:  # whose hooks are being called: a new one is left out
                self._layer_tells(layer, args, kwargs)

    def _layer_tells(self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if (saw := seen_by(layer, args, kwargs)) is not None:
            self._seen_first.append(saw)

    def _single(self, shape: tuple[int, ...]) -> bool | None:
        """Whether the first tensor is one unit without a dim for the batch; None if that is not clear."""
        if shape[:1] in ((), (1,)):
            return False
        if (known := self._is_single.get(len(shape))) is None:
            known = is_single_unit(shape, [*self._layers, *self._seen_first])
            if known is False and may_be_single_unit(self._called_with, self._compiled):
                return None
            if known is not None:
                self._is_single[len(shape)] = known
        return known

    def look_away(self) -> None:
        """Remove the hooks of a first forward."""
        for handle in self._looks:
            handle.remove()
        self._looks = []

    def layer_is_called(self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Note what a layer is called with that knows which dim is the batch."""
        if self._is_counted and (saw := seen_by(layer, args, kwargs)) is not None:
            self._layers.append(saw)

    def ends(self, model: nn.Module, args: object, output: object) -> None:
        """Count the units, with what the model has returned as a witness."""
        if not self._is_counted:
            return
        given, self._given = self._given, None
        self.look_away()
        try:
            units = self._with_rows(given, output)
        except Exception as error:
            units = error
        seen = _Seen(model.training, units)
        for tensor in itertools.islice(tensors_in(output), _MOST_OUTPUTS):
            if tensor.grad_fn is not None:
                tensor.grad_fn.register_prehook(seen.reach)
        self.seen.append(seen)
        self._called_with = {}

    def _with_rows(self, given: Any, output: object) -> Any:
        """What was given, with the number of rows where it leaves that open."""
        if isinstance(given, CountsOfForward) and _is_first_dim(given.units):
            n = self._rows(output)
            return None if n is None else dataclasses.replace(given, units=n)
        return self._rows(output) if _is_first_dim(given) else given

    def _rows(self, output: object) -> int | None:
        is_unseen = self.has_layers_that_know and not self._layers
        try:
            is_single = self._single(first_shape(self._called_with))
            counted = count_units(
                self._called_with, output, layers=self._layers, may_be_time_first=is_unseen, is_single=is_single
            )
        except UnclearUnitsError:
            raise
        except Exception as error:  # of an object of the user's that cannot be looked at
            raise UnclearUnitsError(f"the batch cannot be looked at ({type(error).__name__}: {error})") from error
        if counted is None:
            return None
        self.counted_in = self.counted_in or counted.where
        return counted.n


class _Hook(ModuleHook):
    """Calls a function in a forward that does not become a graph of torch's, and adds up its host time."""

    def __init__(self, forward: _Forward, note: Callable[..., None]) -> None:
        self._forward, self._note = forward, note

    def __call__(self, *called_with: Any) -> None:
        if not is_in_graph():
            start = time.perf_counter()
            self._note(*called_with)
            self._forward.seconds += time.perf_counter() - start


def _is_first_dim(value: object) -> bool:
    return isinstance(value, str) and value == FIRST_DIM


def is_of_forward(units_per_piece: UnitsPerPiece) -> TypeIs[FirstDim | UnitsOfForward]:
    """Whether units are counted in what forward is called with."""
    return units_per_piece == FIRST_DIM or callable(units_per_piece)


def check_units_of_forward(units_per_piece: object) -> None:
    """Refuse another text than "first dim".

    Raises:
        ValueError: with what may be passed.
    """
    if isinstance(units_per_piece, str) and units_per_piece != FIRST_DIM:
        raise ValueError(
            f"units_per_piece must be a number, {FIRST_DIM!r} or a function, got {units_per_piece!r}: "
            f"{FIRST_DIM!r} counts the rows of what the model is called with"
        )
