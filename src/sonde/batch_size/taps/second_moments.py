"""Adam's second moments, of whole parameters where FSDP2 has cut them over ranks."""

from __future__ import annotations

import math
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from sonde.parallel.devices import is_capturing, widened
from sonde.parallel.meshes import ranks_of
from sonde.parallel.placements import gathered_axis, is_dtensor, local_tensor, spec_of

_SMALL = 4096
"""Shards of parameters up to this many elements are gathered whole."""
_MOST_DOUBLINGS = 6
"""Two to this power is the largest number of turns in which moments are gathered."""


@dataclass(frozen=True)
class MomentPart:
    """The second moment v of one range of a gradient.

    Attributes:
        dim: along which the gradient is cut into ranges.
        start: of the range.
        values: v, as long as the range along that dim.
        rounded_to: the dtype to which each value is rounded before use; None for its own.
        weight: how many ranges of that length this one stands for.
    """

    dim: int
    start: int
    values: Tensor
    rounded_to: torch.dtype | None = None
    weight: float = 1.0

    def fits(self, shape: torch.Size) -> bool:
        """Whether this is the second moment of a range of a gradient of this shape."""
        return self.values.shape == self._range(shape)

    def _range(self, shape: torch.Size) -> torch.Size:
        if self.values.shape == shape or not shape or self.start > shape[self.dim]:
            return shape
        length = min(self.values.shape[self.dim], shape[self.dim] - self.start)
        return torch.Size([*shape[: self.dim], length, *shape[self.dim + 1 :]])

    def range_of(self, grad: Tensor) -> Tensor:
        """The range of a gradient that this belongs to."""
        shape = self._range(grad.shape)
        return grad if shape == grad.shape else grad.narrow(self.dim, self.start, shape[self.dim])

    def along(self, shape: torch.Size, start: int, values: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """The second moment of those of some elements of a gradient that lie in this range.

        Args:
            shape: of the whole gradient.
            start: the first of the elements, which follow each other.
            values: they themselves, 1-D.

        Yields:
            Elements that follow each other, and v of each: [elements].
        """
        # The range is a block in each stretch of so many elements: the only one if the first dim is cut.
        inner = math.prod(shape[self.dim + 1 :])
        n_stretch, n_block = (size[self.dim] * inner if shape else 1 for size in (shape, self.values.shape))
        flat, stop = self.values.reshape(-1), start + len(values)
        for stretch in range(start // n_stretch, -(-stop // n_stretch)):
            block = stretch * n_stretch + self.start * inner
            low, high = max(start, block), min(stop, block + n_block)
            if low < high:
                own = stretch * n_block - block
                yield values[low - start : high - start], flat[own + low : own + high]


class GatherAfterSteps:
    """Gathers second moments after each step of the optimizer, if the window that begins then is measured.

    Args:
        moments: to be gathered.
        is_measured: whether the present window is measured; alike on all ranks.
    """

    def __init__(self, moments: SecondMoments, is_measured: Callable[[], bool]) -> None:
        self._moments, self._is_measured = moments, is_measured
        self.moments_changed()
        alive = weakref.ref(self)  # the optimizer must not keep a probe that was dropped without close()

        def changed(*_: object) -> None:
            if (gathers := alive()) is not None:
                gathers.moments_changed()

        self._handles = [
            moments.optimizer.register_step_post_hook(changed),
            moments.optimizer.register_load_state_dict_post_hook(changed),
        ]

    def moments_changed(self) -> None:
        """Gather them if the present window is measured; otherwise forget those of the step before."""
        if self._moments.has_state and self._is_measured() and not is_capturing(self._moments.device):
            self._moments.gather()
        else:
            self._moments.forget()

    def close(self) -> None:
        """Gather no more."""
        for handle in self._handles:
            handle.remove()
        self._moments.forget()


@dataclass(frozen=True)
class _Cut:
    """How FSDP2 cuts one parameter.

    Attributes:
        dim: that is cut.
        shapes: of the part that each rank holds, [ranks]; alike on all ranks.
    """

    dim: int
    shapes: list[torch.Size]

    def range_of(self, shard: int, turn: int, n_turns: int) -> tuple[int, int]:
        """Where the range of a shard that is gathered in one of several turns begins, and its length; along the dim."""
        length = self.shapes[shard][self.dim]
        if math.prod(self.shapes[0]) <= _SMALL:
            return 0, length
        each = -(-length // n_turns)
        return min(turn * each, length), max(min(each, length - turn * each), 0)

    def shape_of(self, shard: int, turn: int, n_turns: int) -> torch.Size:
        """The shape of that range."""
        shape = self.shapes[shard]
        return torch.Size([*shape[: self.dim], self.range_of(shard, turn, n_turns)[1], *shape[self.dim + 1 :]])

    def weight(self, n_turns: int) -> float:
        """How many such ranges one stands for."""
        return 1.0 if math.prod(self.shapes[0]) <= _SMALL else float(n_turns)


class _Gathering:
    """Parameters that are cut over the same ranks: their second moments are gathered together.

    Args:
        group: the ranks.
        ranks: their numbers within the group, in the order of the shards.
        cuts: by index of the parameter.
    """

    def __init__(self, group: dist.ProcessGroup, ranks: Sequence[int], cuts: dict[int, _Cut]) -> None:
        self.group, self.cuts, self._ranks = group, cuts, list(ranks)
        self.own_shard = self._ranks.index(dist.get_rank(group))

    def _longest(self, n_turns: int) -> int:
        """The most elements of a rank in a turn; the first turn has the most."""
        shards = range(len(self._ranks))
        return max(sum(math.prod(cut.shape_of(s, 0, n_turns)) for cut in self.cuts.values()) for s in shards)

    def numel(self, n_turns: int) -> int:
        """Elements that are held at once: of all ranks, and of this rank to be sent."""
        return self._longest(n_turns) * (len(self._ranks) + 1)

    def gather(
        self, own: dict[int, list[MomentPart]], dtype: torch.dtype, device: torch.device, *, turn: int, n_turns: int
    ) -> dict[int, Any]:
        """Gather a range of every shard, by one all-gather. All ranks have to call this.

        Args:
            own: the range of this rank's shards, by index; empty where the optimizer has no second moment.
            dtype: in which they are gathered.
            device: which the group's backend accepts.
            turn: which of the ranges.
            n_turns: of how many.

        Returns:
            The parts of each parameter, by index; those of a missing moment are NaN.
        """
        longest = self._longest(n_turns)
        mine = torch.full((longest,), torch.nan, dtype=dtype, device=device)
        at = 0
        for index, cut in self.cuts.items():
            shape = cut.shape_of(self.own_shard, turn, n_turns)
            for part in own[index]:
                into = mine[at : at + math.prod(shape)].view(shape)
                into.copy_(part.values, non_blocking=device.type != "cpu")
            at += math.prod(shape)
        everything = torch.empty(longest * len(self._ranks), dtype=dtype, device=device)
        # As bytes, which every backend gathers. Older versions of torch know the call by another name.
        all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        all_gather(everything.view(torch.uint8), mine.view(torch.uint8), group=self.group)
        parts: dict[int, list[MomentPart]] = {index: [] for index in self.cuts}
        for shard, rank in enumerate(self._ranks):
            at = rank * longest
            for index, cut in self.cuts.items():
                shape = cut.shape_of(shard, turn, n_turns)
                n = math.prod(shape)
                start = sum(before[cut.dim] for before in cut.shapes[:shard]) + cut.range_of(shard, turn, n_turns)[0]
                values = everything[at : at + n].view(shape)
                parts[index].append(MomentPart(cut.dim, start, values, weight=cut.weight(n_turns)))
                at += n
        return parts


class SecondMoments:
    """The second moments of an optimizer's previous step.

    A hook on a parameter that FSDP2 gathers sees its whole gradient, while each rank keeps a shard of its second
    moment. So the shards are gathered after the optimizer's step, before the window in which they are needed, by one
    all-gather for each set of ranks, and are forgotten after the next step. They are gathered in fp32 or, if the bound
    of memory allows no more, in bf16. Then this rank's own shards are rounded alike, so that all norms have the same
    weights.

    If the bound does not allow even that, each window takes its turn with one range of the rows of every shard, which
    stands for all of them. Norms of pieces and of the window are of the same range, and over all turns each row counts
    once, so that the estimates stay unbiased.

    Args:
        optimizer: keeps `exp_avg_sq` and `step`, and has `betas` and `eps` in its groups.
        parameters: that the optimizer steps, in the order of the indices.
        leaves: the tensor that backward makes the gradient of each of them for.
        most_bytes: bound of the memory for gathered moments.

    Raises:
        ValueError: when a parameter is not in the optimizer, its group has no `betas` and `eps`, or the bound does not
            allow a 64th of the rows.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        parameters: Sequence[Tensor],
        leaves: Sequence[Tensor] | None = None,
        *,
        most_bytes: float = math.inf,
    ) -> None:
        self.optimizer = optimizer  # state and groups are looked up at each use: load_state_dict replaces both
        self._parameters = list(parameters)
        groups = {id(p): i for i, group in enumerate(optimizer.param_groups) for p in group["params"]}
        has_moments = [{"betas", "eps"} <= group.keys() for group in optimizer.param_groups]
        fits = all(id(p) in groups and has_moments[groups[id(p)]] for p in parameters)
        if not fits or isinstance(optimizer, torch.optim.Adamax):  # Adamax keeps a maximum instead of v̂
            raise ValueError(
                f"metric='adam' needs an optimizer of Adam's kind that holds every trainable parameter, "
                f"got {type(optimizer).__name__}: use Adam or AdamW, or metric='euclidean'"
            )
        self._groups = [groups[id(p)] for p in parameters]
        self.seconds = 0.0
        """Host time spent gathering so far."""
        self._gatherings = _gatherings(parameters, parameters if leaves is None else leaves)
        self._is_gathered = frozenset(i for gathering in self._gatherings for i in gathering.cuts)
        self.device = (parameters if leaves is None else leaves)[0].device
        """Where the moments are gathered."""
        self._dtype, self._n_turns = self._within(most_bytes)
        self._turn = 0
        self._parts: dict[int, list[MomentPart]] = {}

    def _within(self, most_bytes: float) -> tuple[torch.dtype, int]:
        """The dtype in which moments are gathered, and in how many turns."""
        needed = 0
        for dtype, n_turns in [(torch.float32, 1), *((torch.bfloat16, 2**k) for k in range(_MOST_DOUBLINGS + 1))]:
            needed = sum(gathering.numel(n_turns) for gathering in self._gatherings) * dtype.itemsize
            if needed <= most_bytes:
                return dtype, n_turns
        raise ValueError(
            "metric='adam' gathers second moments that FSDP2 has cut, in measured windows: even a "
            f"{2**_MOST_DOUBLINGS}th of them takes {needed / 2**20:.3g} MiB on each rank, got "
            f"staging_mib={most_bytes / 2**20:g}: pass staging_mib={math.ceil(needed / 2**20)} or more, or "
            "metric='euclidean'"
        )

    @property
    def in_words(self) -> str:
        """How they are gathered, for people."""
        part = "all" if self._n_turns == 1 else f"one in {self._n_turns} rows"
        return f"{part} gathered before each measured window, in {str(self._dtype).removeprefix('torch.')}"

    @property
    def must_gather(self) -> bool:
        """Whether any second moment is cut over ranks that each see a whole gradient."""
        return bool(self._gatherings)

    @property
    def has_state(self) -> bool:
        """Whether the optimizer has any second moment."""
        return any("exp_avg_sq" in state for state in self.optimizer.state.values())

    def scale(self, index: int) -> tuple[Any, float]:
        """The bias correction of √v, a number or 0-dim tensor, and ε, of a parameter that has a second moment."""
        group = self.optimizer.param_groups[self._groups[index]]
        # `step` is a 0-dim tensor on the CPU, or on the device for fused and capturable optimizers. Either kind divides
        # a tensor on the device without being read on the host.
        step = self.optimizer.state[self._parameters[index]]["step"]
        if isinstance(step, Tensor):  # in fp32, 1 − β₂ of the first step would keep 4 digits
            step = widened(step)
        return (1.0 - group["betas"][1] ** step) ** 0.5, group["eps"]

    def own(self, index: int) -> list[MomentPart]:
        """This rank's shard of v, or all of it; empty where the optimizer has none."""
        moment = self._local(index)
        if moment is None:
            return []
        if index not in self._is_gathered:
            return [MomentPart(0, 0, moment)]
        gathering = next(g for g in self._gatherings if index in g.cuts)
        cut = gathering.cuts[index]
        start, length = cut.range_of(gathering.own_shard, self._turn, self._n_turns)
        rounded_to = self._dtype if self._dtype.itemsize < moment.dtype.itemsize else None
        values = moment.narrow(cut.dim, start, length)
        return [MomentPart(cut.dim, start, values, rounded_to, cut.weight(self._n_turns))]

    def of_leaf(self, index: int) -> list[MomentPart]:
        """The parts of v of what a hook sees of a gradient; empty where v is not known."""
        if index not in self._is_gathered:
            return self.own(index)
        return self._parts.get(index, []) if self._local(index) is not None else []

    def _local(self, index: int) -> Tensor | None:
        state = self.optimizer.state.get(self._parameters[index], {})
        group = self.optimizer.param_groups[self._groups[index]]
        moment = state.get("max_exp_avg_sq" if group.get("amsgrad") else "exp_avg_sq")
        return None if moment is None else local_tensor(moment)

    @torch.no_grad()
    def gather(self) -> None:
        """Gather the moments that are cut. All ranks have to call this, after the same step."""
        start = time.perf_counter()
        self._parts = {}
        # Odd steps through a power of 2 reach every turn. Neighbouring windows take distant rows.
        step = self._n_turns // 2 + 1 if self._n_turns > 2 else 1
        self._turn = (self._turn + step) % self._n_turns
        for gathering in self._gatherings:
            own = {i: self.own(i) for i in gathering.cuts}
            self._parts |= gathering.gather(own, self._dtype, self.device, turn=self._turn, n_turns=self._n_turns)
        self.seconds += time.perf_counter() - start

    def forget(self) -> None:
        """Free what was gathered."""
        self._parts = {}


def _gatherings(parameters: Sequence[Tensor], leaves: Sequence[Tensor]) -> list[_Gathering]:
    """The parameters that FSDP2 gathers for forward and backward, by the ranks that they are gathered from."""
    cuts: dict[tuple[int, ...], dict[int, _Cut]] = {}
    groups: dict[tuple[int, ...], dist.ProcessGroup] = {}
    for index, (parameter, leaf) in enumerate(zip(parameters, leaves, strict=True)):
        if parameter is leaf or not is_dtensor(parameter):
            continue
        still_cut = ranks_of(cast(Any, leaf).device_mesh) if is_dtensor(leaf) else frozenset()
        if (cut := gathered_axis(spec_of(parameter), still_cut)) is None:
            continue
        groups.setdefault(cut.ranks, cut.group)
        shapes = _chunks(local_tensor(leaf.detach()).shape, cut.dim, len(cut.ranks))
        cuts.setdefault(cut.ranks, {})[index] = _Cut(cut.dim, shapes)
    return [
        _Gathering(groups[ranks], [dist.get_group_rank(groups[ranks], rank) for rank in ranks], cuts[ranks])
        for ranks in sorted(cuts)  # in the same order on every rank
    ]


def _chunks(shape: torch.Size, dim: int, n: int) -> list[torch.Size]:
    """The shapes of n chunks, as `torch.chunk` cuts them; the last may be shorter or empty."""
    each = -(-shape[dim] // n)
    lengths = [min(max(shape[dim] - k * each, 0), each) for k in range(n)]
    return [torch.Size([*shape[:dim], length, *shape[dim + 1 :]]) for length in lengths]
