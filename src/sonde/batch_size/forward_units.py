"""The units of a piece, counted in what its forward was called with."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import itertools
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from typing_extensions import TypeIs

from sonde.batch_size.batch_dim import (
    LayerSaw,
    Shown,
    UnclearUnitsError,
    count_units,
    first_shape,
    layers_that_know,
    layers_that_show,
    seen_by,
    shown_by,
    tensors_in,
)
from sonde.batch_size.hooks import ModuleHook, is_in_graph, put_on, why_no_hook
from sonde.batch_size.window_clock import ALWAYS, OwnTime
from sonde.parallel.unwrap import unwrap_model

if TYPE_CHECKING:
    from sonde.batch_size.step_watch import StepWatch

FirstDim = Literal["first dim"]
"""The rows of a micro-batch, as `count_units` finds them in what the model is called with and returns."""
[FIRST_DIM] = get_args(FirstDim)
UnitsOfForward = Callable[..., Any]
"""Called as the model is, it returns the micro-batch's units: a number, a 0-dim tensor, one of these by unit, or
`CountsOfForward`."""
UnitsPerPiece = float | Mapping[str, float] | FirstDim | UnitsOfForward | None
"""The units of a piece whose number the user does not give."""
_PASS_A_NUMBER = (
    "Pass units_per_piece= a number, or enter 'with probe.piece(units=…):' around the backward of each micro-batch"
)
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


class SecondBackwardError(UnclearUnitsError):
    """Raised where the forward of a backward has had one before, so that both are of one piece."""


@dataclasses.dataclass(eq=False)
class _Forward:
    """A forward that has built a graph.

    Attributes:
        units: what was counted, or the error of counting.
        is_training: whether the model was in train mode.
        is_reached: whether a backward has come to what it returned.
    """

    units: Any
    is_training: bool
    is_reached: bool = False

    def reach(self, gradients: object) -> None:
        """Called by autograd."""
        self.is_reached = True


class ForwardUnits:
    """Watches a model's forwards that build a graph: the units of each, for the backward that comes from it.

    Of several forwards, that one counts whose graph the backward has run through: another's loss may only be logged.
    Where that is not seen, a forward in train mode goes before those in evaluation mode. Nothing is counted in windows
    that are not measured. A model whose forward was compiled with its hooks (`model.compile()`) shows nothing here, nor
    does one that may have no hook.

    Args:
        model: as the user calls it.
        count: called as the model is, it returns the units; None if nothing is to be counted.
        own: the probe's time.
        steps: count each forward, in all windows. The hook on the model keeps them alive, and so the probe: a loop that
            calls no probe need not keep it.
    """

    def __init__(
        self,
        model: nn.Module,
        count: UnitsOfForward | FirstDim | None,
        own: OwnTime,
        steps: StepWatch | None = None,
    ) -> None:
        self._model, self._count, self._steps = model, count, steps
        self.spent = own.spent
        """Of the probe's time."""
        self.counted_in = ""
        """What was counted first, in words; empty where a function counts."""
        self._is_measured = True
        self._seen: list[_Forward] = []
        """Forwards whose backward has not come."""
        self._taken: list[_Forward] = []
        """Forwards of the present window whose backward has come, to notice a second one."""
        self._names: tuple[str, ...] = ()
        with contextlib.suppress(TypeError, ValueError):  # of a forward that is not written in Python
            self._names = tuple(inspect.signature(unwrap_model(model).forward).parameters)
        self._called_with: dict[str, Any] = {}
        self._given: Any = None
        self._may_read_time_first = bool(layers_that_know(model))
        self._shown: dict[int, Shown] = {}
        """What layers have shown of a first tensor, by its number of dims."""
        self._saw: list[LayerSaw] = []
        self._hidden: list[nn.Module] = []
        self._on_layers: list[RemovableHandle] = []
        self._on_model: list[RemovableHandle] = []
        self._counts = False
        self.open()

    def open(self, *, counts: bool = True) -> None:
        """Watch forwards.

        Args:
            counts: also note the units of each, for its backward.
        """
        if (self._on_model and counts == self._counts) or why_no_hook(self._model):
            return
        self.close()
        self._counts = counts
        self._on_model.append(put_on(self._model.register_forward_hook, _Hook(self, self._ends)))
        if counts and self._count is not None:
            begins = _Hook(self, self._begins)
            self._on_model.append(put_on(self._model.register_forward_pre_hook, begins, with_kwargs=True))

    def close(self) -> None:
        """Remove the hooks."""
        self._ask_no_more()
        for handle in self._on_model:
            handle.remove()
        self._on_model = []

    def begin_window(self, *, is_measured: bool) -> None:
        """Forget forwards of the window before, and count those that come if the window is measured."""
        self._is_measured = is_measured
        self.forget()

    def forget(self) -> None:
        """Forget forwards whose backward has not come, before a declared piece."""
        self._seen, self._taken = [], []

    def take(self) -> Any:
        """The units of the one forward of the backward that has ended.

        Raises:
            SecondBackwardError: where the forward has had a backward before.
            UnclearUnitsError: where there was no forward, or several, or one without a tensor that has rows; where rows
                are counted, and it is not clear which dim they are.
            Exception: what the user's function has raised.
        """
        forwards = self.of_backward()
        if not forwards:
            raise UnclearUnitsError(
                "no forward of the model was seen before a backward: the loop calls parts of the model, or the model "
                "is compiled by model.compile()",
                _PASS_A_NUMBER,
            )
        if len(forwards) > 1:
            raise UnclearUnitsError(f"a backward follows {len(forwards)} forwards of the model", _PASS_A_NUMBER)
        if isinstance(units := forwards[0].units, Exception):
            raise units
        if units is None:
            raise UnclearUnitsError("the model was called without a tensor that has rows", _PASS_A_NUMBER)
        return units

    def of_backward(self) -> list[_Forward]:
        """The forwards of the backward that has ended, as far as they were seen.

        Raises:
            SecondBackwardError: where their backward has come before.
        """
        again = any(forward.is_reached for forward in self._taken)
        seen = [forward for forward in self._seen if forward.is_reached] or self._seen
        self._seen = [forward for forward in self._seen if forward not in seen]  # whose backward may still come
        self._taken += (found := [forward for forward in seen if forward.is_training] or seen)
        for forward in self._taken:
            forward.is_reached = False
        if again and not found:
            raise SecondBackwardError(
                "a forward of the model had a second backward",
                "Put all backwards of one batch into one 'with probe.piece():'",
            )
        return found

    def _begins(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Note what the model is called with, before it takes anything out of it."""
        if self._on_layers:  # the forward before has failed
            self._ask_no_more()
        if not (self._is_measured and torch.is_grad_enabled()):
            return
        names = [*self._names[: len(args)], *map(str, range(len(self._names), len(args)))]
        self._called_with = dict(zip(names, args, strict=True)) | kwargs
        try:
            self._given = self._count(*args, **kwargs) if callable(self._count) else self._count
        except Exception as error:  # raised where the units are needed, not inside the user's forward
            self._given = error
        with contextlib.suppress(Exception):  # of an object of the user's, which `_ends` names
            if _is_first_dim(getattr(self._given, "units", self._given)):
                self._ask_layers(args, kwargs)

    def _ask_layers(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Have layers show what they are called with, in the first forward with a tensor of as many dims."""
        shape, self._saw = first_shape(self._called_with), []
        if not shape or len(shape) in self._shown or (shape[0] == 1 and not self._may_read_time_first):
            return
        layers, self._hidden = layers_that_show(self._model)
        hook = _Hook(self, self._layer_is_called)
        for layer in layers:
            self._on_layers.append(put_on(layer.register_forward_pre_hook, hook, with_kwargs=True))
            if layer is self._model:  # whose hooks are being called: a new one is left out
                self._layer_is_called(layer, args, kwargs)

    def _layer_is_called(self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if (saw := seen_by(layer, args, kwargs)) is not None:
            self._saw.append(saw)

    def _ask_no_more(self) -> None:
        for handle in self._on_layers:
            handle.remove()
        self._on_layers = []

    def _ends(self, model: nn.Module, args: object, output: object) -> None:
        """Count the units, with what the model has returned as a witness."""
        if not torch.is_grad_enabled():
            return
        if self._steps is not None:
            self._steps.n_runs += 1
            if self._steps.may_be_recorded:
                self._steps.note_recording()
        if not (self._is_measured and self._counts):
            return
        self._ask_no_more()
        given, self._given = self._given, None
        try:
            units = self._with_rows(given, output)
        except Exception as error:
            units = error
        forward = _Forward(units, model.training)
        for tensor in itertools.islice(tensors_in(output), _MOST_OUTPUTS):
            if tensor.grad_fn is not None:
                tensor.grad_fn.register_prehook(forward.reach)
        self._seen.append(forward)
        self._called_with = {}

    def _with_rows(self, given: Any, output: object) -> Any:
        """What was given, with the number of rows where it leaves that open; None without a tensor that has rows."""
        leaves_open = given.units if isinstance(given, CountsOfForward) else given
        if not _is_first_dim(leaves_open):
            return given
        try:
            counted = count_units(self._called_with, output, self._shown_by_layers())
        except UnclearUnitsError:
            raise
        except Exception as error:  # of an object of the user's that cannot be looked at
            raise UnclearUnitsError(f"the batch cannot be looked at ({type(error).__name__}: {error})") from error
        if counted is None:
            return None
        self.counted_in = self.counted_in or counted.where
        return counted.n if leaves_open is given else dataclasses.replace(given, units=counted.n)

    def _shown_by_layers(self) -> Shown:
        """What layers show of the first tensor, in this forward or in the first one with as many dims."""
        shape = first_shape(self._called_with)
        if (known := self._shown.get(len(shape))) is not None:
            return known
        shown = shown_by(self._called_with, self._saw, self._hidden)
        could_be_either = shown.dim is not None and shape[:1] == shape[1:2]
        if shape and shape[0] != 1 and not could_be_either:
            self._shown[len(shape)] = shown
        return shown


class _Hook(ModuleHook):
    """Calls a function in a forward that does not become a graph of torch's, and adds up its host time."""

    def __init__(self, forwards: ForwardUnits, note: Callable[..., None]) -> None:
        self._forwards, self._note = forwards, note

    def __call__(self, *called_with: Any) -> None:
        if not is_in_graph():
            start = time.perf_counter()
            self._note(*called_with)
            self._forwards.spent[ALWAYS] += time.perf_counter() - start


def _is_first_dim(value: object) -> bool:
    return isinstance(value, str) and value == FIRST_DIM


def is_of_forward(units_per_piece: UnitsPerPiece) -> TypeIs[FirstDim | UnitsOfForward]:
    """Whether units are counted in what forward is called with."""
    return units_per_piece == FIRST_DIM or callable(units_per_piece)
