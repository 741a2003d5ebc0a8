"""Which dim of what a model is called with is the batch, proved: a part of it is changed, and it is seen what moves.

Half of the slices of a dim are replaced by others, at random places. If the same slices of what the model returns move,
and no others, then slices do not depend on each other: they may be units. Where no dim is so, rows are coupled, as
tokens of packed documents are. Where several are, as in an ensemble [members, batch, features], only the loss knows.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from sonde.batch_size.batch_dim import Counted, UnclearUnitsError, in_words, tensors_in
from sonde.batch_size.per_example.rules import BATCH_NORMS
from sonde.batch_size.quiet_passes import LeavesTraceError, QuietPasses

_SEED = 580
_FEW = 8
"""Rows of a batch that suffice, where all its tensors can be shortened to so many."""
_MOST_BYTES = 256 * 2**20
"""Memory for what one pass returns."""
_MOST_OUTPUTS = 8
_SINGLE = 5
"""Rows that are changed one by one, to see how many numbers each moves."""
_MOVED = 2e-6
"""Part of the largest number of an output that moves by more than rounding; in 16 bits, two roundings."""
_JOINT = 1e-3
"""Part of a loss's changes by two halves that their common change may differ by, if it is a sum over slices."""
_COUPLED = 1e-2
"""The same part beyond which a loss is no sum over slices, whatever rounding does."""
_Shows = Literal["in slices", "in a sum", "nowhere"]
_TINY = 1e-3
"""Weights that are all smaller stand for zero: what they multiply would move nothing."""


@dataclasses.dataclass(frozen=True)
class Rule:
    """Where the units of a batch are counted, in all batches of the same form.

    Attributes:
        given: a tensor's place among those that the model is called with, and its dim that holds the units; None where
            only what the model returns shows them.
        returned: likewise of what it returns; None where the units have no dim of their own there.
    """

    given: tuple[int, int] | None = None
    returned: tuple[int, int] | None = None

    def count(self, given: Sequence[Tensor], output: object) -> Counted:
        """The units of a batch.

        Args:
            given: the tensors in what the model was called with.
            output: what it has returned.

        Raises:
            UnclearUnitsError: where the model returns another number of units than it has got.
        """
        found: list[Counted] = []
        for place, tensors in ((self.given, given), (self.returned, _returned_tensors(output))):
            if place is not None and place[0] < len(tensors) and place[1] < tensors[place[0]].dim():
                tensor = tensors[place[0]]
                found.append(Counted(tensor.shape[place[1]], f"dim {place[1]} of {in_words(tensor)}"))
        if len({each.n for each in found}) != 1:
            raise UnclearUnitsError("the model does not return as many units as it has got, as it did before")
        return found[0]


def tensors_given(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """The tensors in what a model is called with, in order."""
    return [leaf for leaf in tree_flatten((args, kwargs))[0] if isinstance(leaf, Tensor)]


def _returned_tensors(output: object) -> list[Tensor]:
    tensors = itertools.islice(tensors_in(output), _MOST_OUTPUTS)
    return [t.detach() for t in tensors if t.layout is torch.strided and t.numel()]


def form_of(given: Sequence[Tensor]) -> tuple[object, ...]:
    """What batches have in common for which one proof holds."""
    return tuple((t.dim(), t.dtype, t.layout, t.dim() > 0 and t.size(0) == 1) for t in given)


def prove(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Rule | str | None:
    """Where the units are; why that is not clear, in words; None where the model cannot be asked.

    Args:
        model: without its wrapper.
        args: what it is called with.
        kwargs: likewise.
    """
    leaves, tree = tree_flatten((args, kwargs))
    with contextlib.suppress(LeavesTraceError), QuietPasses(model, (args, kwargs)) as passes:
        for batch, passes.keeps_hooks in ((_shortened(leaves), False), (leaves, False), (leaves, True)):
            with contextlib.suppress(_CannotBeAskedError):
                if batch is not None:
                    return _Asked(model, passes, batch, tree).answer()
    return None


class _CannotBeAskedError(Exception):
    """Raised where a model does not take a changed batch, or returns another form."""


def _shortened(leaves: Sequence[Any]) -> list[Any] | None:
    """A batch of a few rows; None where not all its tensors have the same number of rows."""
    sizes = {leaf.shape[:1] for leaf in leaves if isinstance(leaf, Tensor)}
    if len(sizes) != 1 or any(type(leaf) is int for leaf in leaves) or not max(sizes) > (_FEW,):
        return None
    return [leaf[:_FEW] if isinstance(leaf, Tensor) else leaf for leaf in leaves]


class _Asked:
    """What moves in the outputs of a model when parts of its inputs are changed."""

    def __init__(self, model: nn.Module, passes: QuietPasses, leaves: Sequence[Any], tree: Any) -> None:
        self._model, self._passes, self._leaves, self._tree = model, passes, leaves, tree
        self._places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        self._tensors = [leaves[i] for i in self._places]
        self._generator = torch.Generator().manual_seed(_SEED)
        self._tiny = _tiny_parameters(model)
        self._moves_rows = False
        """Whether more than a loss moves."""
        self._moving: list[tuple[int, int]] = []
        """Dims whose slices move something, by tensor."""
        self._shown: dict[tuple[int, int], tuple[int, int]] = {}
        """Places in what the model returns that have as many slices, and move with them."""
        self._joint: dict[tuple[int, int], float] = {}
        """How far a loss that moves beside them is from a sum over slices."""
        self._builds_graph = False
        try:
            self._before = self._returned({})
        except _CannotBeAskedError:  # since the forward takes a derivative, perhaps
            self._builds_graph = True
            self._before = self._returned({})

    def answer(self) -> Rule | str | None:
        """See `prove`."""
        floats = [k for k, x in enumerate(self._tensors) if x.layout is torch.strided and x.is_floating_point()]
        free = self._free_dims(floats)
        for k, x in enumerate(self._tensors):
            free = free or (self._free_dims([k]) if _is_of_tokens(x) else [])
        if not self._moving:
            return None
        if not free:
            return self._without_free_dim()
        first = free[0][0]
        of_first = [d for k, d in free if k == first]
        if self._tensors[first].shape[0] == 1:  # a single slice cannot be told from its others
            of_first = [0, *of_first]
        if len(of_first) > 1:  # a loss beside predictions may tell: one over choices is no sum over them
            joint = {d: self._joint.get((first, d), 0.0) for d in of_first}
            sums = [d for d in of_first if joint[d] <= _JOINT]
            if len(sums) == 1 and all(joint[d] > _COUPLED for d in of_first if d not in sums):
                of_first, free = sums, [(k, d) for k, d in free if k != first or d in sums]
        if len(of_first) > 1:
            dims = " and ".join(map(str, of_first))
            return f"dims {dims} of {in_words(self._tensors[first])} are independent of each other in the model"
        if len({self._tensors[k].shape[d] for k, d in free}) > 1:
            parts = " and ".join(f"dim {d} of {in_words(self._tensors[k])}" for k, d in free)
            return f"{parts} are independent of each other in the model"
        return Rule((first, of_first[0]), self._shown.get((first, of_first[0])))

    def _free_dims(self, content: Sequence[int]) -> list[tuple[int, int]]:
        """The dims whose slices do not depend on each other, by tensor."""
        found: dict[_Shows, list[tuple[int, int]]] = {"in slices": [], "in a sum": []}
        for k in content:
            x = self._tensors[k]
            sides = {self._tensors[i].shape[d] for i, d in self._moving for d in range(self._tensors[i].dim())}
            if self._moving and x.dim() == 2 and x.shape[0] == x.shape[1] and x.shape[0] in sides:
                continue  # a mask that all units share
            for d in range(max(x.dim() - x.is_floating_point(), 1) if x.dim() else 0):
                if x.shape[d] > 1:
                    with contextlib.suppress(_CannotBeAskedError):  # as where a grid of other sizes does not fit
                        found.get(self._shown_by(k, d), []).append((k, d))
        return found["in slices"] or ([] if self._moves_rows else found["in a sum"])

    def _shown_by(self, k: int, d: int) -> _Shows:
        """Where it shows that slices of a dim do not depend on each other: "nowhere" if they do, or nothing moves."""
        n = self._tensors[k].shape[d]
        half = torch.randperm(n, generator=self._generator) < n // 2
        other = self._other(k, d)
        one, rest = (self._returned({k: self._changed(k, d, part, other)}) for part in (half, ~half))
        moved = [
            i for i, before in enumerate(self._before) if any(_moves(before, after[i]).any() for after in (one, rest))
        ]
        if not moved:
            return "nowhere"
        self._moving.append((k, d))
        axes = {i: [e for e in range(one[i].dim()) if self._fits(i, e, (one, half), (rest, ~half))] for i in moved}
        # A loss beside predictions says nothing. Alone, it shows whether it is a sum or a mean over slices.
        rows = [i for i in moved if axes[i] or one[i].dim() > 1]
        self._moves_rows |= bool(rows)
        if rows and all(axes[i] for i in rows):
            places = [(i, e) for i in rows for e in axes[i]]
            if whole := [(i, e) for i, e in places if self._before[i].shape[e] == n]:
                self._shown[k, d] = whole[0]
        if losses := [i for i in moved if i not in rows]:
            both = self._returned({k: self._changed(k, d, half | ~half, other)})
            self._joint[k, d] = max(_joint_part(self._before[i], one[i], rest[i], both[i]) for i in losses)
        if rows:
            return "in slices" if all(axes[i] for i in rows) else "nowhere"
        return "in a sum" if self._joint[k, d] <= _JOINT and self._tensors[k].dim() > 1 else "nowhere"

    def _fits(self, i: int, axis: int, *passes: tuple[Sequence[Tensor], Tensor]) -> bool:
        """Whether along an axis of an output just those slices move that were changed, also where it folds two dims."""
        size, n = self._before[i].shape[axis], len(passes[0][1])
        if size % n:
            return False
        moved = [(_moving_slices(self._before[i], after[i], axis), part) for after, part in passes]
        return any(
            not any((slices.view(shape).any(1 - over) & ~part).any() for slices, part in moved)
            for shape, over in (((n, size // n), 0), ((size // n, n), 1))
        )

    def _without_free_dim(self) -> Rule | str:
        """Where rows are coupled: a single unit, units that several rows make up, or a question."""
        k, d = self._moving[0]
        x = self._tensors[k]
        n, other = x.shape[d], self._other(k, d)
        if x.shape[0] == 1 and x.dim() > 1:
            after = self._returned({k: self._changed(k, d, torch.arange(n) < n // 2, other)})
            pairs = list(zip(self._before, after, strict=True))
            reached = [_moving_slices(b, a, e)[-1] for b, a in pairs for e in range(b.dim()) if b.shape[e] == n]
            if all(reached):
                return Rule((k, 0))
            return f"parts of {in_words(x)} do not depend on each other, as documents that are packed in it"
        places = torch.linspace(0, n - 1, _SINGLE).long().unique()
        single = [self._returned({k: self._changed(k, d, torch.arange(n) == i, other)}) for i in places]
        n_moved = 0
        for i, before in enumerate(self._before):
            for axis in range(before.dim()):
                moved = [_moving_slices(before, after[i], axis).nonzero().flatten().tolist() for after in single]
                if max(map(len, moved)) == 1 and len({place for each in moved for place in each}) > 1:
                    return Rule(returned=(i, axis))
                n_moved = max(n_moved, *map(len, moved)) if axis == 0 else n_moved
        return f"rows depend on each other in the model: one that is changed in {in_words(x)} moves {n_moved}"

    def _other(self, k: int, d: int) -> Tensor:
        """Other contents of a tensor, of numbers that it has in the same column, so that they are in its domain.

        They are no permutation of its own, by which a sum over a dim would not move.
        """
        x = self._tensors[k].detach()
        along = 0 if x.shape[0] > 1 else d
        n = x.shape[along]
        source = (torch.arange(n) + torch.randint(1, n, (n,), generator=self._generator)) % n
        source[-1] = source[0]
        other: Tensor = x.index_select(along, source.to(x.device))
        if x.is_floating_point() and not (x == x.round()).all():
            noise = torch.randn(x.shape, generator=self._generator, dtype=torch.float32).to(x.device)
            other = other + (0.5 * x.float().nan_to_num(0, 0, 0).std() * noise).to(x.dtype)
        return other

    def _changed(self, k: int, d: int, part: Tensor, other: Tensor) -> Tensor:
        """A tensor with other contents in some slices."""
        x = self._tensors[k].detach()
        return torch.where(part.to(x.device).view([-1 if i == d else 1 for i in range(x.dim())]), other, x)

    def _returned(self, changed: Mapping[int, Tensor]) -> list[Tensor]:
        leaves = list(self._leaves)
        for k, tensor in changed.items():
            leaves[self._places[k]] = tensor
        args, kwargs = tree_unflatten(leaves, self._tree)
        try:
            with torch.set_grad_enabled(self._builds_graph):
                output = self._passes(args, kwargs, self._prepare)
        except LeavesTraceError:
            raise
        except Exception as error:  # of the user's code
            raise _CannotBeAskedError from error
        returned = _returned_tensors(output)
        if sum(t.nbytes for t in returned) > _MOST_BYTES:
            raise LeavesTraceError("what the model returns is too large")
        return [t if t.is_floating_point() else t.double() for t in returned]

    def _prepare(self) -> None:
        """Let batch normalisation use running statistics, and parameters that are 0, as at the start, be others."""
        for module in self._model.modules():
            if isinstance(module, BATCH_NORMS):
                module.training = False
                if module.running_mean is None:
                    zeros = next(self._model.parameters()).new_zeros(module.num_features)
                    module.running_mean, module.running_var = zeros, zeros + 1
        for module, name, p in self._tiny:
            scale = p[0].numel() ** -0.5 if p.dim() > 1 else 1.0
            numbers = torch.arange(p.numel(), device=p.device).mul(12.9898).sin().view(p.shape)
            module._parameters[name] = nn.Parameter((scale * numbers).to(p.dtype), requires_grad=p.requires_grad)


def _tiny_parameters(model: nn.Module) -> list[tuple[nn.Module, str, nn.Parameter]]:
    named = [(m, name, p) for m in model.modules() for name, p in m._parameters.items() if p is not None and p.numel()]
    named = [each for each in named if each[2].is_floating_point() and not each[1].endswith("bias")]
    if not named:
        return []
    with torch.no_grad():
        sizes = torch.stack([p.abs().max().float() for _, _, p in named]).tolist()
    tiny = [(m, name, p) for (m, name, p), size in zip(named, sizes, strict=True) if size < _TINY]
    return tiny if sum(p.nbytes for *_, p in tiny) <= _MOST_BYTES else []


def _is_of_tokens(x: Tensor) -> bool:
    """Whether whole numbers are contents of a batch, not borders or positions within it, which may not be exchanged."""
    if x.is_floating_point() or x.is_complex() or x.dtype == torch.bool or not x.dim() or x.layout is not torch.strided:
        return False
    return x.squeeze().dim() > 1 or bool((x.flatten()[1:] < x.flatten()[:-1]).any())


def _moves(before: Tensor, after: Tensor) -> Tensor:
    """Which numbers of an output have moved by more than rounding."""
    if before.shape != after.shape:
        raise _CannotBeAskedError("the output has another shape")
    rounding = max(2 * torch.finfo(before.dtype).eps if before.element_size() <= 2 else 0.0, _MOVED)
    largest = before.float().nan_to_num(0, 0, 0).abs().max()
    return ((before - after).abs() > rounding * largest) | (before.isnan() != after.isnan())


def _moving_slices(before: Tensor, after: Tensor, axis: int) -> Tensor:
    """Which slices along an axis have moved; [size], on the CPU."""
    return _moves(before, after).movedim(axis, 0).reshape(before.shape[axis], -1).any(1).cpu()


def _joint_part(before: Tensor, one: Tensor, other: Tensor, both: Tensor) -> float:
    """The part of two changes of losses by which they differ from their common change: 0 for a sum over slices."""
    first, second, together = (after.double() - before.double() for after in (one, other, both))
    return float(((together - first - second).abs() / (first.abs() + second.abs()).clamp(min=1e-300)).max())
