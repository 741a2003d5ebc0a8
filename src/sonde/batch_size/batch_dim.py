"""Which dim of what a model is called with is the batch: decided once, by several witnesses, or asked."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from sonde.batch_size.taps.problems import HOW_TO_COUNT

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
        knows: whether the layer is one of those that may read time first; see `layers_that_know`.
    """

    kind: str
    n: int
    unit: tuple[int, ...] = ()
    knows: bool = False

    @property
    def is_square(self) -> bool:
        """Whether there are as many positions as units."""
        return len(self.unit) > 1 and self.unit[0] == self.n


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
    return LayerSaw(kind, n, unit, _knows(layer))


def is_time_first(shape: Sequence[int], layers: Sequence[LayerSaw]) -> bool:
    """Whether dim 1 of a tensor is the batch, since layers that know the batch have seen as many, and not dim 0.

    Layers that have seen neither do not say which it is: the model has folded several dims into one, say.
    """
    sizes = {saw.n for saw in layers}
    return len(shape) > 1 and shape[0] not in sizes and shape[1] in sizes


def batch_in_words(parts: Mapping[str, object], output: object = None) -> str:
    """What a batch holds, and the shapes of what the model has returned."""
    witnesses = itertools.islice(_witnesses(parts, ""), 5)
    returned = [str(list(_shape(tensor))) for tensor in itertools.islice(tensors_in(_without_stages(output)), 3)]
    what = f"the batch has {'; '.join(f'{w.name} {w.text}' for w in witnesses)}"
    return f"{what}, and the model returned {', '.join(returned)}" if returned else what


def has_certain_count(parts: Mapping[str, object]) -> bool:
    """Whether a batch says its number of units by itself, as a PackedSequence, graphs or a list of images do."""
    return any(w.is_certain or not w.shape for w in _witnesses(parts, ""))


def count_units(parts: Mapping[str, object], output: object = None, doubt: str = "") -> Counted | None:
    """The number of units in a batch.

    Dim 0 of the first tensor is taken for the batch.
    What the model returns must agree: it has as many rows, or as many in its dim 1, or a row for each position. Where
    the model returns a loss alone, other tensors of the batch must not outvote the first.

    Args:
        parts: what the model is called with, or the parts of a batch, by name.
        output: what the model has returned; None if it is not known.
        doubt: why its rows may be no units; empty without a doubt.

    Returns:
        The units; None where there is no tensor with a dim.

    Raises:
        UnclearUnitsError: where the witnesses contradict each other.

    Example:
        >>> count_units({"x": torch.zeros(8, 128), "y": torch.zeros(8)})
        Counted(n=8, where='dim 0 of float32 [8, 128]')
    """
    witnesses = list(_witnesses(parts, ""))
    if not witnesses:
        return None
    first, *others = witnesses
    returned = [_shape(tensor) for tensor in tensors_in(_without_stages(output))]
    what = batch_in_words(parts, output)
    candidates = {n: f"dim 0 of {first.text}" if first.shape else first.text for n in first.sizes}
    if not first.is_certain:
        if doubt := "rows may be no units here" if any(w.mixes_rows for w in witnesses) else doubt:
            raise UnclearUnitsError(f"{doubt}: {what}")
        candidates = _agreeing(candidates, first, others, returned)
    is_contradicted = any(w.is_certain and w.sizes[0] not in candidates for w in others)
    if len(candidates) != 1 or is_contradicted:
        raise UnclearUnitsError(f"which dim is the batch is not clear: {what}")
    [(n, where)] = candidates.items()
    if n == 1 and len(first.shape) == 2 and first.is_of_tokens:
        where += "; if documents are packed in it, count them by units_per_piece="
    return Counted(n, where)


def _without_stages(output: object) -> object:
    """What a model returns by name, without what parts of it have returned: an image encoder's rows are patches."""
    if not isinstance(output, Mapping):
        return output
    return [value for value in output.values() if not isinstance(value, Mapping)] or output


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


def _agreeing(
    candidates: dict[int, str],
    first: _Witness,
    others: Sequence[_Witness],
    returned: Sequence[tuple[int, ...]],
) -> dict[int, str]:
    """The candidates that no other witness contradicts."""
    # Positions that all units share are a single row, and masks that they share a square of positions.
    masks = {(n, n) for n in first.shape}
    voters = [w for w in others if w.sizes[0] > 1 and w.shape not in masks]
    with_rows = [shape for shape in returned if shape not in ((), (1,))]
    # A vector beside a batch of more dims may hold several losses, which say nothing.
    predicted = [shape for shape in with_rows if len(shape) > 1 or len(first.shape) == 1]
    if any(_shows(n, shape, first.shape, ()) for n in candidates for shape in with_rows):
        candidates = {
            n: where
            for n, where in candidates.items()
            if any(_shows(n, shape, first.shape, voters) for shape in with_rows)
        }
    elif (
        predicted
        and (agree := _supporters(predicted[0][0], others))
        and not any(_supporters(n, others) for n in candidates)
    ):
        # Offsets of bags have as many rows as the prediction, and so have texts that come after patches of images.
        return {predicted[0][0]: f"dim 0 of {agree[0].text}"}
    elif predicted and all(returned):  # no loss among them
        return {}
    else:
        candidates = {
            n: where
            for n, where in candidates.items()
            if sum(n not in w.sizes for w in voters) <= len(_supporters(n, others))
        }
    if len(candidates) > 1:
        candidates = {n: where for n, where in candidates.items() if _supporters(n, voters)}
    return candidates


def _shows(n: int, returned: tuple[int, ...], given: tuple[int, ...], others: Sequence[_Witness]) -> bool:
    """Whether a tensor that the model returns has n units: [n, …], [times, n, …] or [n times, …].

    Where another part has as many rows as `times`, these may be the units, and the first part what they share: queries,
    coordinates.

    Args:
        n: units.
        returned: shape of the tensor.
        given: shape of the first tensor that the model was called with.
        others: other parts.
    """
    if returned[0] == n:
        return True
    times = returned[0] if len(returned) > 2 and returned[1] == n else 0
    if not times and returned[0] in [math.prod(given[:k]) for k in range(2, len(given) + 1) if n in given[:k]]:
        times = returned[0] // n
    return bool(times) and not _supporters(times, others)


def _supporters(n: int, witnesses: Sequence[_Witness]) -> list[_Witness]:
    return [witness for witness in witnesses if n in witness.sizes]


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
            text = f"a list of {len(value)}: {in_words(value[0])}, …"
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
    return _Witness(name, in_words(tensor), (shape[0],), shape, tensor.is_nested, is_of_tokens, mixes_rows)


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


def in_words(value: object) -> str:
    """A tensor by its dtype and shape; anything else by its type."""
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
