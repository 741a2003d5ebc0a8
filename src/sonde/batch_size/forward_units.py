"""The units of a piece, counted in what its forward was called with."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from typing_extensions import TypeIs

from sonde.batch_size.module_hook import ModuleHook, is_in_graph, put_on

FirstDim = Literal["first dim"]
"""The size of dim 0 of the first tensor that the model is called with: the rows of a micro-batch."""
[FIRST_DIM] = get_args(FirstDim)
UnitsOfForward = Callable[..., Any]
"""Called as the model is, it returns the micro-batch's units: a number, a 0-dim tensor, one of these by unit, or
`CountsOfForward`."""
UnitsPerPiece = float | Mapping[str, float] | FirstDim | UnitsOfForward | None
"""The units of a piece whose number the user does not give."""


@dataclasses.dataclass(frozen=True)
class CountsOfForward:
    """What a function of a forward may return besides the units: the arguments of `NoiseScaleProbe.piece`.

    Attributes:
        units: in the micro-batch; None for one unit per entry of `unit_weights`.
        weight: of the micro-batch in the loss.
        unit_weights: the weight of each unit, [units].
    """

    units: Any = None
    weight: float | Tensor = 1.0
    unit_weights: Tensor | None = None


def rows(*inputs: object) -> int | None:
    """The size of dim 0 of the first tensor of one or more dims, in order, also inside of mappings, lists and objects.

    Args:
        *inputs: what a model is called with, or a batch.

    Returns:
        The number of rows; None where there is no such tensor.

    Example:
        >>> rows({"input_ids": torch.zeros(8, 128), "labels": torch.zeros(8, 128)})
        8
    """
    first = _first_tensor(inputs)
    return None if first is None else first.shape[0]


def _first_tensor(inputs: Iterable[object]) -> Tensor | None:
    """The first tensor of one or more dims."""
    for value in inputs:
        found: Tensor | None = None
        if isinstance(value, Tensor):
            found = value if value.dim() else None
        elif isinstance(value, Mapping):
            found = _first_tensor(value.values())
        elif isinstance(value, list | tuple):
            found = _first_tensor(value)
        elif dataclasses.is_dataclass(value) and not isinstance(value, type):
            found = _first_tensor(getattr(value, field.name) for field in dataclasses.fields(value))
        elif isinstance(data := getattr(value, "data", None), Mapping):  # a UserDict, as encodings of texts are
            found = _first_tensor(data.values())
        if found is not None:
            return found
    return None


class ForwardUnits:
    """Counts the units of each forward that builds a graph, for the backward that follows it.

    A forward in train mode goes before those in evaluation mode: an evaluation that forgets `torch.no_grad()` has no
    backward. Nothing is counted in windows that are not measured. A model whose forward was compiled with its hooks
    (`model.compile()`) shows nothing here.

    Args:
        model: as the user calls it.
        count: called as the model is, it returns the units.
    """

    def __init__(self, model: nn.Module, count: UnitsOfForward | FirstDim) -> None:
        self._rows = _RowsOfCall(model)
        self._hook = _Hook(self._rows if isinstance(count, str) else count)
        self._handle = put_on(model.register_forward_pre_hook, self._hook, with_kwargs=True)

    @property
    def seconds(self) -> float:
        """Host time spent in the hook so far."""
        return self._hook.seconds

    @property
    def counted_in(self) -> str:
        """The tensor whose rows were counted first, in words; empty where a function counts."""
        return self._rows.counted_in

    def take(self) -> Any:
        """The units of the one forward since the last call; None where there was none, or several.

        Raises:
            Exception: what the user's function has raised.
        """
        seen, self._hook.seen = self._hook.seen, []
        forwards = [units for is_training, units in seen if is_training] or [units for _, units in seen]
        if len(forwards) != 1:
            return None
        if isinstance(forwards[0], Exception):
            raise forwards[0]
        return forwards[0]

    def forget(self) -> None:
        """Forget forwards whose backward has not come, before a declared piece."""
        self._hook.seen = []

    def begin_window(self, *, is_measured: bool) -> None:
        """Forget forwards of the window before, and count those that come if the window is measured."""
        self._hook.seen, self._hook.counts = [], is_measured

    def close(self) -> None:
        """Remove the hook."""
        self._handle.remove()


class _Hook(ModuleHook):
    """Counts the units of forwards that build a graph."""

    def __init__(self, count: UnitsOfForward) -> None:
        self.seen: list[tuple[bool, Any]] = []
        """Whether the model was in train mode, and the units, of each forward since they were taken."""
        self.seconds = 0.0
        self.counts = True
        """Whether the present window is measured."""
        self._count = count

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if is_in_graph() or not (self.counts and torch.is_grad_enabled()):
            return
        start = time.perf_counter()
        try:
            units = self._count(*args, **kwargs)
        except Exception as error:  # raised where the units are needed, not inside the user's forward
            units = error
        self.seen.append((module.training, units))
        self.seconds += time.perf_counter() - start


class _RowsOfCall:
    """Counts the rows of the first tensor that a model is called with, and remembers the first such tensor's shape.

    Args:
        model: a layer in which may read time first.
    """

    def __init__(self, model: nn.Module) -> None:
        self.counted_in = ""
        reads_time_first = (
            type(layer).__name__
            for layer in model.modules()
            if isinstance(layer, nn.RNNBase | nn.MultiheadAttention) and not layer.batch_first
        )
        self._time_first = next(reads_time_first, "")

    def __call__(self, *args: object, **kwargs: object) -> int | None:
        if (first := _first_tensor((*args, *kwargs.values()))) is None:
            return None
        if not self.counted_in:
            self.counted_in = f"dim 0 of {str(first.dtype).removeprefix('torch.')} {list(first.shape)}"
            if first.dim() == 1:
                self.counted_in += "; if that is one unit without a dim of its own, pass units_per_piece=1"
            elif self._time_first:
                self.counted_in += (
                    f"; its {self._time_first} has batch_first=False: if dim 0 is time, pass units_per_piece=lambda x: "
                    "x.shape[1]"
                )
        return first.shape[0]


def is_of_forward(units_per_piece: UnitsPerPiece) -> TypeIs[FirstDim | UnitsOfForward]:
    """Whether units are counted in what forward is called with."""
    return units_per_piece == FIRST_DIM or callable(units_per_piece)


def check_units_of_forward(units_per_piece: object, names: Iterable[str]) -> None:
    """Refuse a text or a function that cannot count the units.

    Raises:
        ValueError: for another text, and for rows where pieces are counted in several units.
    """
    if isinstance(units_per_piece, str) and units_per_piece != FIRST_DIM:
        raise ValueError(
            f"units_per_piece must be a number, {FIRST_DIM!r} or a function, got {units_per_piece!r}: "
            f"{FIRST_DIM!r} counts the rows of the first tensor that the model is called with"
        )
    if units_per_piece == FIRST_DIM and len(several := tuple(names)) > 1:
        raise ValueError(
            f"units_per_piece={FIRST_DIM!r} counts one unit, and pieces are counted in {', '.join(several)}: pass a "
            "function that is called as the model is and returns a count for each"
        )
