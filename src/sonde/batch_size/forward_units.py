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
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.hooks import RemovableHandle
from typing_extensions import TypeIs

from sonde.batch_size.batch_dim import (
    Counted,
    UnclearUnitsError,
    batch_in_words,
    count_units,
    has_certain_count,
    layers_that_know,
    tensors_in,
)
from sonde.batch_size.hooks import ModuleHook, is_in_graph, put_on, why_no_hook
from sonde.batch_size.proved_units import Rule, form_of, prove, tensors_given
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
_MOST_FORMS = 8
"""Forms of batches that are proved. Further ones are counted by what is usual."""
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


@dataclasses.dataclass(frozen=True)
class _Source:
    """A tensor, recognised while its memory is in use, and it has not been written to."""

    memory: StorageWeakRef
    view: tuple[object, ...]

    @classmethod
    def of(cls, tensor: Tensor) -> _Source | None:
        """The tensor's; None for one whose memory is not its own."""
        if tensor.layout is not torch.strided or tensor.is_nested or tensor.is_inference():
            return None
        view = tensor.storage_offset(), tensor.shape, tensor._version
        return cls(StorageWeakRef(tensor.untyped_storage()), view)

    def is_same(self, other: _Source) -> bool:
        """Whether both are the same numbers."""
        return self.view == other.view and self.memory == other.memory and not self.memory.expired()


@dataclasses.dataclass(eq=False)
class _Forward:
    """A forward that has built a graph.

    Attributes:
        units: what was counted, or the error of counting.
        is_training: whether the model was in train mode.
        source: the tensor that holds the units; None where the user counts them.
        is_reached: whether a backward has come to what it returned.
    """

    units: Any
    is_training: bool
    source: _Source | None = None
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
        self._sources: list[_Source] = []
        """Of the pieces of the present window."""
        self._names: tuple[str, ...] = ()
        with contextlib.suppress(TypeError, ValueError):  # of a forward that is not written in Python
            self._names = tuple(inspect.signature(unwrap_model(model).forward).parameters)
        self._called_with: dict[str, Any] = {}
        self._given: Any = None
        self.dim = 0
        """Of what the model was called with last, in which its units lie."""
        self._doubt = (
            "layers of the model read time first, and it cannot be tried which dim is the batch"
            if layers_that_know(model)
            else ""
        )
        self._rules: dict[object, Rule | str | None] = {}
        """What was proved of batches, by their form."""
        self._rule: Rule | str | None = None
        """Of the forward that goes on."""
        self._tensors: list[Tensor] = []
        self._source: _Source | None = None
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
        for handle in self._on_model:
            handle.remove()
        self._on_model = []

    def begin_window(self, *, is_measured: bool) -> None:
        """Forget forwards of the window before, and count those that come if the window is measured."""
        self._is_measured = is_measured
        self._sources = []
        self.forget()

    def discard(self) -> None:
        """Forget the pieces of the present window, whose gradients were zeroed."""
        self._sources = []

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
        if (source := forwards[0].source) is not None:
            if any(map(source.is_same, self._sources)):
                raise UnclearUnitsError(
                    "two backwards of a window are of the same rows, so they are no two pieces",
                    "Add the two losses up and call backward once, or put both into one 'with probe.piece():'. A loop "
                    "that zeroes gradients between the two, as SAM does, is not measured",
                )
            self._sources.append(source)
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
        if not (self._is_measured and torch.is_grad_enabled()):
            return
        names = [*self._names[: len(args)], *map(str, range(len(self._names), len(args)))]
        self._called_with = dict(zip(names, args, strict=True)) | kwargs
        try:
            self._given = self._count(*args, **kwargs) if callable(self._count) else self._count
        except Exception as error:  # raised where the units are needed, not inside the user's forward
            self._given = error
        if _is_first_dim(getattr(self._given, "units", self._given)):
            self._rule, self._tensors = None, tensors_given(args, kwargs)
            if self._tensors and not has_certain_count(self._called_with):
                self._rule = self._proved(args, kwargs)

    def _proved(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Rule | str | None:
        """Where the units of a batch of this form are; see `prove`."""
        form = self._model.training, *form_of(self._tensors)
        if form not in self._rules and len(self._rules) < _MOST_FORMS:
            self._rules[form] = prove(unwrap_model(self._model), args, kwargs)
        return self._rules.get(form)

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
        given, self._given, self._source = self._given, None, None
        try:
            units = self._with_rows(given, output)
        except Exception as error:
            units = error
        forward = _Forward(units, model.training, self._source)
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
            counted = self._counted(output)
        except UnclearUnitsError:
            raise
        except Exception as error:  # of an object of the user's that cannot be looked at
            raise UnclearUnitsError(f"the batch cannot be looked at ({type(error).__name__}: {error})") from error
        if counted is None:
            return None
        self.counted_in = self.counted_in or counted.where
        return counted.n if leaves_open is given else dataclasses.replace(given, units=counted.n)

    def _counted(self, output: object) -> Counted | None:
        rule, given, self._tensors = self._rule, self._tensors, []
        if given:
            place = rule.given[0] if isinstance(rule, Rule) and rule.given else 0
            self._source = _Source.of(given[place])
        if rule is None:
            return count_units(self._called_with, output, self._doubt)
        try:
            if isinstance(rule, Rule):
                self.dim = rule.given[1] if rule.given else 0
                return rule.count(given, output)
        except UnclearUnitsError as question:
            self._rules, rule = {}, str(question)
        raise UnclearUnitsError(f"{rule}: {batch_in_words(self._called_with, output)}")


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
