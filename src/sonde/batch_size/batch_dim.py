"""Which dim of what a model is called with is the batch: decided once, by several witnesses, or asked."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from sonde.batch_size.module_hook import is_compiled, takes_fast_path
from sonde.batch_size.taps.problems import HOW_TO_COUNT
from sonde.wording import plural

_KINDS: dict[int, tuple[type[nn.Module], ...]] = {
    2: (nn.Linear, nn.RNNCellBase),
    3: (nn.RNNBase, nn.MultiheadAttention, nn.Conv1d, nn.ConvTranspose1d),
    4: (nn.Conv2d, nn.ConvTranspose2d),
    5: (nn.Conv3d, nn.ConvTranspose3d),
}
"""Layers by the number of dims of their input. With one dim less, it is a single unit."""


class UnclearUnitsError(ValueError):
    """Raised where the witnesses contradict each other.

    Args:
        seen: what was seen.
        remedy: what to do in a loop that calls the probe.
    """

    def __init__(self, seen: str, remedy: str = HOW_TO_COUNT) -> None:
        super().__init__(seen)
        self.remedy = remedy


@dataclasses.dataclass(frozen=True)
class Counted:
    """The units of a batch.

    Attributes:
        n: how many.
        where: what was counted, in words.
    """

    n: int
    where: str


@dataclasses.dataclass(frozen=True)
class LayerSaw:
    """What a layer was called with that shows how many units there are.

    Attributes:
        kind: the layer's type, in words.
        n: size of the batch; 1 for an input without this dim.
        unit: shape of one unit in it; empty if units differ in length.
        is_step: whether it was one of a unit's positions.
        knows: whether the layer is one of those that may read time first; see `layers_that_know`.
    """

    kind: str
    n: int
    unit: tuple[int, ...] = ()
    is_step: bool = False
    knows: bool = False

    @property
    def is_square(self) -> bool:
        """Whether there are as many positions as units."""
        return len(self.unit) > 1 and self.unit[0] == self.n


@dataclasses.dataclass(frozen=True)
class Shown:
    """What the layers of a forward have shown of its first tensor: the same for all tensors of as many dims.

    Attributes:
        dim: that is the batch, 0 or 1; None if no layer that may read time first shows it.
        kind: the type of a layer that shows it, in words.
        are_hidden: whether there are such layers, and none was seen.
        may_be_single: whether the tensor may be one unit without a dim for the batch.
    """

    dim: int | None = None
    kind: str = ""
    are_hidden: bool = False
    may_be_single: bool = False


@dataclasses.dataclass(frozen=True)
class _Witness:
    """A part of what a model is called with.

    Attributes:
        name: of the argument or entry that it is; empty if it has none.
        text: the part, in words.
        sizes: the numbers of units that it may show, the likeliest first.
        shape: of a tensor; empty for others.
        is_certain: whether it says the number of units by itself, whatever the model returns.
        is_of_tokens: whether it is a tensor of whole numbers.
        mixes_rows: whether it shows that rows are no units: edges between them, or borders of documents inside them.
    """

    name: str
    text: str
    sizes: tuple[int, ...]
    shape: tuple[int, ...] = ()
    is_certain: bool = False
    is_of_tokens: bool = False
    mixes_rows: bool = False


def batch_dim(layer: nn.Module) -> int:
    """The dim of a layer's input and output that is the batch, by what the layer says; 0 for most layers."""
    return int(isinstance(layer, nn.RNNBase | nn.MultiheadAttention) and not layer.batch_first)


def _knows(layer: nn.Module) -> bool:
    return bool(batch_dim(layer)) or isinstance(layer, nn.RNNCellBase)


def layers_that_know(model: nn.Module) -> list[nn.Module]:
    """The layers whose input shows whether a model that reads time first is called with time first."""
    return [layer for layer in model.modules() if _knows(layer)]


def layers_that_show(model: nn.Module) -> tuple[list[nn.Module], list[nn.Module]]:
    """The layers whose input shows how many units there are: those that may have a hook, and those that are compiled.

    A hook inside an encoder layer in evaluation mode would keep torch from computing the layer in one kernel, and
    change its rounding. One inside a compiled module would have it compiled again.
    """
    compiled = {m for each in model.modules() if is_compiled(each) for m in each.modules()}
    closed = {m for each in model.modules() if takes_fast_path(each) and not each.training for m in each.modules()}
    layers = [layer for layer in model.modules() if _n_dims(layer)]
    return [x for x in layers if x not in compiled | closed], [x for x in layers if x in compiled]


def shown_by(
    parts: Mapping[str, object], layers: Sequence[LayerSaw], hidden: Sequence[nn.Module], *, may_read_time_first: bool
) -> Shown:
    """What the layers of a forward show of its first part.

    Args:
        parts: what the model is called with.
        layers: what they have seen.
        hidden: layers whose calls cannot be seen.
        may_read_time_first: whether the model has layers that may.
    """
    shape = first_shape(parts)
    knowing = [saw for saw in layers if saw.knows]
    dim = next((d for d, n in enumerate(shape[:2]) if n in {saw.n for saw in knowing}), None)
    kind = next((saw.kind for saw in knowing if dim is not None and saw.n == shape[dim]), "")
    is_hidden = may_read_time_first and not knowing
    return Shown(dim, kind, is_hidden, bool(shape) and _may_be_single_unit(parts, layers, hidden))


def _may_be_single_unit(parts: Mapping[str, object], layers: Sequence[LayerSaw], hidden: Sequence[nn.Module]) -> bool:
    """Whether the first part may be one unit without a dim for the batch.

    It may be if all layers have seen one unit, and the tensor's first dim is one of that unit's dims. Layers that were
    called with something that all units share, such as a grid, have seen one unit too, and so have those in a loop over
    units: these see fewer dims than the batch has.
    """
    first, *others = [witness for name, part in parts.items() for witness in _witnesses(part, name)]
    n = next(iter(first.shape), 1)
    if n == 1 or any(saw.n != 1 for saw in layers):
        return False
    if any(saw.is_step or (n in saw.unit and len(saw.unit) >= len(first.shape)) for saw in layers):
        return True
    if any(w.shape[:1] == first.shape[:1] and len(w.shape) > len(first.shape) for w in others):
        return False
    return any(_could_take(layer, first) for layer in hidden)


def _could_take(layer: nn.Module, unit: _Witness) -> bool:
    if unit.is_of_tokens:  # which are embedded first
        return len(unit.shape) == 1 and not isinstance(layer, nn.Linear)
    names = ("in_channels", "input_size", "embed_dim", "in_features")
    n_features = next(getattr(layer, name) for name in names if hasattr(layer, name))
    dim = 0 if hasattr(layer, "in_channels") else -1
    return len(unit.shape) == _n_dims(layer) - 1 and unit.shape[dim] == n_features


def _n_dims(layer: nn.Module) -> int:
    """How many dims a layer's input has with one for the batch; 0 for layers that do not show it."""
    return next((n_dims for n_dims, kinds in _KINDS.items() if isinstance(layer, kinds)), 0)


def seen_by(layer: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> LayerSaw | None:
    """What a call of such a layer shows of the batch; None for an input that has neither all dims nor one less."""
    first = args[0] if args else kwargs.get("query", kwargs.get("input"))
    kind = f"nn.{type(layer).__name__}"
    if isinstance(first, PackedSequence):
        return LayerSaw(kind, int(first.batch_sizes[0]), knows=_knows(layer))
    shape = _shape(first) if isinstance(first, Tensor) else ()
    n, unit, n_dims = 1, shape, _n_dims(layer)
    if len(shape) == n_dims and not isinstance(layer, nn.Linear):  # whose rows may be units or positions
        dim = batch_dim(layer)
        n, unit = shape[dim], shape[:dim] + shape[dim + 1 :]
    elif len(shape) != n_dims - 1:
        return None
    is_step = isinstance(layer, nn.RNNCellBase) or (isinstance(layer, nn.RNNBase) and unit[0] == 1)
    return LayerSaw(kind, n, unit, is_step, _knows(layer))


def is_time_first(shape: Sequence[int], layers: Sequence[LayerSaw]) -> bool:
    """Whether dim 1 of a tensor is the batch, since layers that know the batch have seen as many, and not dim 0.

    Layers that have seen neither do not say which it is: the model has folded several dims into one, say.
    """
    sizes = {saw.n for saw in layers}
    return len(shape) > 1 and shape[0] not in sizes and shape[1] in sizes


def count_units(parts: Mapping[str, object], output: object = None, shown: Shown | None = None) -> Counted | None:
    """The number of units in a batch.

    Dim 0 of the first tensor is taken for the batch, or dim 1 if a layer with `batch_first=False` was called with that.
    What the model returns must agree: it has as many rows, or as many in its dim 1, or a row for each position. Where
    the model returns a loss alone, other tensors of the batch must not outvote the first.

    Args:
        parts: what the model is called with, or the parts of a batch, by name.
        output: what the model has returned; None if it is not known.
        shown: what layers have shown of the first tensor; None without a model.

    Returns:
        The units; None where there is no tensor with a dim.

    Raises:
        UnclearUnitsError: where the witnesses contradict each other.

    Example:
        >>> count_units({"x": torch.zeros(8, 128), "y": torch.zeros(8)})
        Counted(n=8, where='dim 0 of float32 [8, 128]')
    """
    witnesses = [witness for name, part in parts.items() for witness in _witnesses(part, name)]
    if not witnesses:
        return None
    first, *others = witnesses
    shown = shown or Shown()
    returned = [_shape(tensor) for tensor in tensors_in(output)]
    candidates = _candidates(first, shown)
    if not first.is_certain:
        candidates = _agreeing(candidates, first, others, returned, is_shown=shown.dim is not None)
    what = f"the batch has {'; '.join(f'{w.name} {w.text}' for w in witnesses[:5])}"
    if returned:
        what += f", and the model returned {', '.join(str(list(shape)) for shape in returned[:3])}"
    if shown.dim is not None:
        what += f"; its {shown.kind} saw {plural(first.shape[shown.dim], 'unit')}"
    if not first.is_certain and any(w.mixes_rows for w in witnesses):
        raise UnclearUnitsError(f"rows may be no units here: {what}")
    if shown.may_be_single and first.sizes[0] in candidates:
        # Otherwise the model returns rows of another part, and the first one is what these share.
        raise UnclearUnitsError(f"the first tensor may be a single unit, without a dim for the batch: {what}")
    is_contradicted = any(w.is_certain and w.sizes[0] not in candidates for w in others)
    if len(candidates) != 1 or is_contradicted:
        raise UnclearUnitsError(f"which dim is the batch is not clear: {what}")
    [(n, where)] = candidates.items()
    if n == 1 and len(first.shape) == 2 and first.is_of_tokens:
        where += "; if documents are packed in it, count them by units_per_piece="
    return Counted(n, where)


def first_shape(parts: Mapping[str, object]) -> tuple[int, ...]:
    """The shape of the first tensor that `count_units` would look at; empty without one."""
    return next((witness.shape for name, part in parts.items() for witness in _witnesses(part, name)), ())


def units_in_batch(batch: object, remedy: str) -> int:
    """The number of units in a batch as a loader gives it. Its entries are columns, or one mapping for each unit.

    Args:
        batch: a mapping, a tuple or list, or anything else that is one part.
        remedy: what to do where it is not clear.

    Raises:
        ValueError: where it is not clear, and where there is no tensor with a dim.
    """
    parts: Mapping[Any, object] = {"batch": batch}
    if isinstance(batch, Mapping):
        parts = batch
    elif isinstance(batch, list | tuple) and not (batch and all(isinstance(part, Mapping) for part in batch)):
        parts = dict(enumerate(batch))
    try:
        counted = count_units({str(name): part for name, part in parts.items()})
    except UnclearUnitsError as question:
        raise UnclearUnitsError(f"{question}: {remedy}") from None
    if counted is None:
        raise ValueError(f"the batch has no tensor with rows: {remedy}")
    return counted.n


def _candidates(first: _Witness, shown: Shown) -> dict[int, str]:
    """The numbers of units that the first part of a batch may show, each with what is counted, in words."""
    shape = first.shape
    found = {n: f"dim 0 of {first.text}" if shape else first.text for n in first.sizes}
    if len(shape) < 2:
        return found
    of_dim_1 = f"dim 1 of {first.text}"
    if shown.dim == 1:
        return {shape[1]: f"{of_dim_1}, since its {shown.kind} reads time first"}
    return {shape[1]: of_dim_1} | found if shown.are_hidden else found


def _agreeing(
    candidates: dict[int, str],
    first: _Witness,
    others: Sequence[_Witness],
    returned: Sequence[tuple[int, ...]],
    *,
    is_shown: bool,
) -> dict[int, str]:
    """The candidates that no other witness contradicts. A layer that has shown which dim it is settles disputes."""
    # A loss says nothing. Nor does a vector beside a batch of more dims: it may hold several losses.
    predicted = [shape for shape in returned if len(shape) > 1 or (len(shape) == 1 == len(first.shape) != shape[0])]
    with_rows = [shape for shape in returned if shape not in ((), (1,))]
    fitting = {
        n: where
        for n, where in candidates.items()
        if any(_fits(n, shape, first, () if is_shown else others) for shape in with_rows)
    }
    is_disputed = any(_supporters(n, others) for n in candidates)
    if fitting:
        candidates = fitting
    elif any(_times(n, shape, first.shape) for n in candidates for shape in with_rows):
        return {}  # n may be queries or coordinates that all units share
    elif predicted and not is_disputed and (agree := _supporters(predicted[0][0], others)):
        # Offsets of bags have as many rows as the prediction, and so have texts that come after patches of images.
        return {predicted[0][0]: f"dim 0 of {agree[0].text}"}
    elif predicted and all(returned):  # no loss among them
        return {}
    elif not is_shown:
        candidates = {n: where for n, where in candidates.items() if not _is_outvoted(n, others)}
    if len(candidates) > 1:  # a square is a mask of positions: it supports the wrong one of batch and time
        voters = [w for w in others if len(w.shape) != 2 or w.shape[0] != w.shape[1]]
        candidates = {n: where for n, where in candidates.items() if _supporters(n, voters)}
    return candidates


def _fits(n: int, returned: tuple[int, ...], first: _Witness, others: Sequence[_Witness]) -> bool:
    """Whether n units show in a tensor that the model returns, and are not queries that units of another part share.

    Args:
        n: units, by the first part that the model was called with.
        returned: shape of the tensor.
        first: the first part.
        others: the other parts.
    """
    times = _times(n, returned, first.shape)
    positions = first.shape[1:] if first.is_of_tokens else first.shape[1:-1]
    if times is None or times == 1 or times in positions or first.shape[:1] != (n,):
        return times is not None
    # [m, n, …] beside a part with m rows: that may be the batch, and the first part n queries or coordinates. Or it is
    # a state of m layers, also [m, n, …], that is handed through by a model whose batch has positions.
    may_be_state = bool(positions) and positions[:1] != returned[2:3]
    return all(may_be_state and w.shape[1:2] in ((), (n,)) for w in _supporters(times, others))


def _times(n: int, returned: tuple[int, ...], given: tuple[int, ...]) -> int | None:
    """How many times a tensor shows n units: 1 for [n, …], times for [times, n, …] or [n times, …]; None for others.

    Args:
        n: units.
        returned: shape of a tensor that the model returns.
        given: shape of the first tensor that the model was called with.
    """
    if returned[0] == n:
        return 1
    if len(returned) > 2 and returned[1] == n:
        return returned[0]
    flattened = [math.prod(given[:k]) for k in range(2, len(given) + 1) if n in given[:k]]
    return returned[0] // n if returned[0] in flattened else None


def _supporters(n: int, witnesses: Sequence[_Witness]) -> list[_Witness]:
    return [witness for witness in witnesses if n in witness.sizes]


def _is_outvoted(n: int, witnesses: Sequence[_Witness]) -> bool:
    """Whether more parts of a batch speak against n than for it.

    A single row and a square say nothing: positions and masks that all units share look like this.
    """
    against = [w for w in witnesses if n not in w.sizes and w.sizes[0] > 1 and w.shape[1:] != w.shape[:1]]
    return len(against) > len(_supporters(n, witnesses))


def _witnesses(value: object, name: str) -> Iterator[_Witness]:
    """What each part of a value says about the number of units, in order."""
    if isinstance(value, Tensor):
        if value.dim():
            yield _of_tensor(value, name)
    elif isinstance(value, PackedSequence):  # a tuple, whose first tensor holds all steps of all sequences
        n = int(value.batch_sizes[0])
        yield _Witness(name, f"a PackedSequence of {n}", (n,), is_certain=True)
    elif isinstance(value, list | tuple):
        if sizes := _sizes_of_samples(value):
            text = f"a list of {len(value)}: {_in_words(value[0])}, …"
            yield _Witness(name, text, sizes, is_certain=not isinstance(value[0], Tensor))
        elif value and not isinstance(value[0], int | float):
            for part in value:
                yield from _witnesses(part, name)
    elif isinstance(value, Mapping):
        for key, part in value.items():
            yield from _witnesses(part, str(key))
    elif isinstance(value, nn.Module | type):  # whose attributes are not looked at
        return
    elif type(n_graphs := getattr(value, "num_graphs", None)) is int:
        yield _Witness(name, f"{n_graphs} graphs", (n_graphs,), is_certain=True)
    elif dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            yield from _witnesses(getattr(value, field.name), field.name)
    elif isinstance(data := getattr(value, "data", None), Mapping):  # a UserDict, as encodings of texts are
        yield from _witnesses(data, name)


def _of_tensor(tensor: Tensor, name: str) -> _Witness:
    shape = _shape(tensor)
    is_of_edges = "index" in name and len(shape) == 2 and shape[0] == 2 and tensor.dtype == torch.int64
    mixes_rows = is_of_edges or name.startswith("cu_seq") or tensor.is_sparse
    is_of_tokens = not tensor.is_floating_point()
    return _Witness(name, _in_words(tensor), (shape[0],), shape, is_of_tokens=is_of_tokens, mixes_rows=mixes_rows)


def _sizes_of_samples(values: Sequence[Any]) -> tuple[int, ...]:
    """The numbers of units in a list that has one entry for each, such as images; empty for another list.

    A list of tensors of the same first dim may also hold several inputs of as many units each.
    """
    first = values[0] if values else None
    if isinstance(first, Mapping) and all(isinstance(value, Mapping) for value in values):
        return (len(values),)
    if not isinstance(first, Tensor) or not first.dim() or len(values) < 2:
        return ()
    if any(not isinstance(v, Tensor) or (v.dim(), v.dtype) != (first.dim(), first.dtype) for v in values):
        return ()
    if len({len(value) for value in values}) > 1:
        return (len(values),)
    # Few tensors that are no images are columns of a batch: inputs, targets, weights.
    return () if len(values) <= 3 and first.dim() != 3 else (first.shape[0], len(values))


def _shape(tensor: Tensor) -> tuple[int, ...]:
    return (tensor.size(0),) if tensor.is_nested else tuple(tensor.shape)


def _in_words(value: object) -> str:
    if not isinstance(value, Tensor):
        return type(value).__name__
    return f"{str(value.dtype).removeprefix('torch.')} {list(_shape(value))}"


def tensors_in(value: object) -> Iterator[Tensor]:
    """The tensors that a model has returned, in order."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for part in value:
            yield from tensors_in(part)
    elif isinstance(value, Mapping):
        yield from tensors_in(list(value.values()))
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        yield from tensors_in([getattr(value, field.name) for field in dataclasses.fields(value)])
