"""Adam's second moments, of whole parameters where FSDP2 has cut them over ranks."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from sonde.parallel.placements import gathered_axis, is_dtensor, local_tensor, ranks_of, spec_of


@dataclass(frozen=True)
class MomentPart:
    """The second moment v of one range of a gradient.

    Attributes:
        dim: along which the gradient is cut into ranges.
        start: of the range.
        values: v, as long as the range along that dim.
        rounded_to: the dtype to which each value is rounded before use; None for its own.
    """

    dim: int
    start: int
    values: Tensor
    rounded_to: torch.dtype | None = None


class GatherAfterSteps:
    """Gathers second moments after each step of the optimizer, if the window that begins then is measured.

    Args:
        moments: to be gathered.
        optimizer: whose steps change them.
        is_measured: whether the present window is measured; alike on all ranks.
    """

    def __init__(
        self, moments: SecondMoments, optimizer: torch.optim.Optimizer, is_measured: Callable[[], bool]
    ) -> None:
        self._moments, self._is_measured = moments, is_measured
        self._changed()
        self._handles = [
            optimizer.register_step_post_hook(lambda *_: self._changed()),
            optimizer.register_load_state_dict_post_hook(lambda *_: self._changed()),
        ]

    def _changed(self) -> None:
        if self._moments.has_state and self._is_measured():
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


class _Gathering:
    """Parameters that are cut over the same ranks: their second moments are gathered together.

    Args:
        group: the ranks.
        ranks: their numbers within the group, in the order of the shards.
        cuts: by index of the parameter.
    """

    def __init__(self, group: dist.ProcessGroup, ranks: Sequence[int], cuts: dict[int, _Cut]) -> None:
        self.group, self.cuts, self._ranks = group, cuts, list(ranks)
        totals = [sum(math.prod(cut.shapes[shard]) for cut in cuts.values()) for shard in range(len(ranks))]
        self._longest = max(totals)

    @property
    def numel(self) -> int:
        """Elements of the buffer."""
        return self._longest * len(self._ranks)

    def gather(self, own: dict[int, Tensor | None], dtype: torch.dtype, device: torch.device) -> dict[int, Any]:
        """Gather every shard, by one all-gather. All ranks have to call this.

        Args:
            own: this rank's shards, by index; None where the optimizer has no second moment.
            dtype: in which they are gathered.
            device: which the group's backend accepts.

        Returns:
            The parts of each parameter, by index; those of a missing moment are NaN.
        """
        mine = torch.full((self._longest,), torch.nan, dtype=dtype, device=device)
        at = 0
        shard = self._ranks.index(dist.get_rank(self.group))
        for index, cut in self.cuts.items():
            n = math.prod(cut.shapes[shard])
            if (values := own[index]) is not None:
                mine[at : at + n].view(cut.shapes[shard]).copy_(values, non_blocking=device.type != "cpu")
            at += n
        everything = torch.empty(self.numel, dtype=dtype, device=device)
        # As bytes, which every backend gathers.
        dist.all_gather_into_tensor(everything.view(torch.uint8), mine.view(torch.uint8), group=self.group)
        parts: dict[int, list[MomentPart]] = {index: [] for index in self.cuts}
        for shard, rank in enumerate(self._ranks):
            at = rank * self._longest
            for index, cut in self.cuts.items():
                shape = cut.shapes[shard]
                n = math.prod(shape)
                start = sum(before[cut.dim] for before in cut.shapes[:shard])
                parts[index].append(MomentPart(cut.dim, start, everything[at : at + n].view(shape)))
                at += n
        return parts


class SecondMoments:
    """The second moments of an optimizer's previous step.

    A hook on a parameter that FSDP2 gathers sees its whole gradient, while each rank keeps a shard of its second
    moment. So the shards are gathered after the optimizer's step, before the window in which they are needed, by one
    all-gather for each set of ranks; and are forgotten at the end of the window. They are gathered in fp32 or, if the
    bound of memory allows no more, in bf16. Then this rank's own shards are rounded alike, so that all norms have the
    same weights.

    Args:
        optimizer: keeps `exp_avg_sq` and `step`, and has `betas` and `eps` in its groups.
        parameters: that the optimizer steps, in the order of the indices.
        leaves: the tensor that backward makes the gradient of each of them for.
        most_bytes: bound of the memory for gathered moments.

    Raises:
        ValueError: when a parameter is not in the optimizer, its group has no `betas` and `eps`, or the bound is below
            2 bytes for each gathered element.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        parameters: Sequence[Tensor],
        leaves: Sequence[Tensor] | None = None,
        *,
        most_bytes: float = math.inf,
    ) -> None:
        self._optimizer = optimizer  # state and groups are looked up at each use: load_state_dict replaces both
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
        self._device = (parameters if leaves is None else leaves)[0].device
        self._dtype = self._widest(most_bytes)
        self._parts: dict[int, list[MomentPart]] = {}

    def _widest(self, most_bytes: float) -> torch.dtype:
        """The dtype in which moments are gathered."""
        numel = sum(gathering.numel for gathering in self._gatherings)
        for dtype in (torch.float32, torch.bfloat16):
            if numel * dtype.itemsize <= most_bytes:
                return dtype
        raise ValueError(
            f"metric='adam' gathers the second moments of {numel:,} elements that FSDP2 has cut, in measured windows: "
            f"at least {2 * numel / 2**20:.0f} MiB on each rank, got staging_mib={most_bytes / 2**20:g}: pass "
            f"staging_mib={math.ceil(2 * numel / 2**20)} or more, or metric='euclidean'"
        )

    @property
    def must_gather(self) -> bool:
        """Whether any second moment is cut over ranks that each see a whole gradient."""
        return bool(self._gatherings)

    @property
    def has_state(self) -> bool:
        """Whether the optimizer has any second moment."""
        return any("exp_avg_sq" in state for state in self._optimizer.state.values())

    def scale(self, index: int) -> tuple[Any, float]:
        """The bias correction of √v, a number or 0-dim tensor, and ε, of a parameter that has a second moment."""
        group = self._optimizer.param_groups[self._groups[index]]
        # `step` is a 0-dim tensor on the CPU, or on the device for fused and capturable optimizers. Either kind divides
        # a tensor on the device without being read on the host.
        step = self._optimizer.state[self._parameters[index]]["step"]
        return (1.0 - group["betas"][1] ** step) ** 0.5, group["eps"]

    def own(self, index: int) -> list[MomentPart]:
        """This rank's shard of v, or all of it; empty where the optimizer has none."""
        moment = self._local(index)
        if moment is None:
            return []
        is_rounded = index in self._is_gathered and self._dtype.itemsize < moment.dtype.itemsize
        return [MomentPart(0, 0, moment, self._dtype if is_rounded else None)]

    def of_leaf(self, index: int) -> list[MomentPart]:
        """The parts of v of what a hook sees of a gradient; empty where v is not known."""
        if index not in self._is_gathered:
            return self.own(index)
        return self._parts.get(index, []) if self._local(index) is not None else []

    def _local(self, index: int) -> Tensor | None:
        state = self._optimizer.state.get(self._parameters[index], {})
        group = self._optimizer.param_groups[self._groups[index]]
        moment = state.get("max_exp_avg_sq" if group.get("amsgrad") else "exp_avg_sq")
        return None if moment is None else local_tensor(moment)

    @torch.no_grad()
    def gather(self) -> None:
        """Gather the moments that are cut. All ranks have to call this, after the same step."""
        start = time.perf_counter()
        self._parts = {}
        for gathering in self._gatherings:
            own = {i: self._local(i) for i in gathering.cuts}
            self._parts |= gathering.gather(own, self._dtype, self._device)
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
