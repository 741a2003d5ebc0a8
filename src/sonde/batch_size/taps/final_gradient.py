"""The gradient at the end of a window: its norm, its squares and the elements that are compared with the pieces."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from sonde.batch_size.taps.expert_pieces import ExpertPieces
from sonde.batch_size.taps.further_metrics import FurtherMetrics
from sonde.batch_size.taps.metric import GradientMetric
from sonde.batch_size.taps.squared_norms import Part, add_squares
from sonde.batch_size.taps.tap import RankGradient
from sonde.batch_size.taps.window_sums import WindowSums
from sonde.batch_size.taps.witness import Witness
from sonde.gradient_norm.global_norm import GlobalNorm, global_norm, own_square_sums
from sonde.gradient_norm.partial_gradients import reduce_partial
from sonde.gradient_norm.plan import NormPlan
from sonde.parallel.devices import to_device, widened
from sonde.parallel.placements import counted_part, holds_first_copy, layout_of, local_tensor, spec_of
from sonde.parallel.wrappers import Wrapper


class FinalGradient:
    """Reads `.grad`, whole or cut over ranks, after the last piece of a window.

    Args:
        wrapper: the model.
        group_names: the groups, [groups].
        group_index: the group of each parameter of this rank, [parameters].
        metric: how gradients are squared.
        witness: which elements are compared.
        sums: adds up parameters to groups.
        further: metrics beside `metric`; None without.
    """

    def __init__(
        self,
        wrapper: Wrapper,
        group_names: Sequence[str],
        group_index: Sequence[int],
        metric: GradientMetric,
        witness: Witness,
        sums: WindowSums,
        further: FurtherMetrics | None,
    ) -> None:
        self._wrapper, self._metric, self._witness, self._sums, self._further = wrapper, metric, witness, sums, further
        self._parameters, self._device = list(wrapper.parameters.values()), wrapper.leaves[0].device
        self._groups, self._group_index = list(group_names), list(group_index)
        self._unmeasured: list[int] | None = None
        self._unmeasured_by_name: dict[str, Tensor] = {}
        self._plain_plan: NormPlan | None = None
        self.seconds_of_clip = 0.0
        """Host time spent on norms that a clip needs in any window: no cost of measuring."""
        self.clip_also({})

    def clip_also(self, unmeasured: Mapping[str, Tensor]) -> None:
        """Include parameters that are not measured, by name, in the plain norm."""
        ids = [id(p) for p in unmeasured.values()]
        if self._unmeasured == ids:
            return
        self._unmeasured = ids
        measured, parts, names = self._wrapper.parameters, self._group_index, list(self._groups)
        if self._wrapper.experts is not None:
            are_experts = self._wrapper.experts.indices
            parts = [group + len(self._groups) * (i in are_experts) for i, group in enumerate(parts)]
            names += [f"experts of {group}" for group in self._groups]
        self._unmeasured_by_name, self._plain_plan = dict(unmeasured), None
        self.plan = NormPlan(
            [*measured.values(), *unmeasured.values()],
            [*measured, *unmeasured],
            parts=[*parts, *[len(names)] * len(unmeasured)],
            part_names=[*names, "not measured"],
            mesh=self._wrapper.mesh,
            pp_mesh=self._wrapper.pp_mesh,
            allow_sparse=True,
        )

    @property
    def plan_without_groups(self) -> NormPlan:
        """The same gradients for a clip between measured windows, where norms of groups would cost, for nothing."""
        if self._plain_plan is None:
            everything = self._wrapper.parameters | self._unmeasured_by_name
            self._plain_plan = NormPlan(
                [*everything.values()],
                [*everything],
                mesh=self._wrapper.mesh,
                pp_mesh=self._wrapper.pp_mesh,
                allow_sparse=True,
            )
        return self._plain_plan

    @property
    def _n_squares(self) -> int:
        """Parts of the model whose |F|² is measured: the groups and, if there are any, the experts of each group."""
        return len(self._groups) * (1 if self._wrapper.experts is None else 2)

    def norm_of_clip(self, riding: Tensor | None = None) -> GlobalNorm:
        """The plain norm as a clip takes it, waiting for all ranks; `riding` is summed over them besides."""
        start = time.perf_counter()
        norm = global_norm(self.plan, 2.0, riding=riding)
        self.seconds_of_clip += time.perf_counter() - start
        return norm

    def own_squares(self) -> Tensor:
        """This rank's part of |F|² of each part of the model, to be summed over ranks; [parts]."""
        return widened(to_device(own_square_sums(self.plan)[: self._n_squares], self._device))

    def squared(self, norm: GlobalNorm) -> Tensor:
        """|F|² per group from a measured norm; [groups]."""
        return widened(to_device(norm.by_part[: self._n_squares], self._device)).square()

    def witness(self, grads: Sequence[Tensor | None]) -> Tensor:
        """The elements that are compared, where every rank holds all of them; [elements]."""
        elements = {i: self._witness.read(i, g) for i in self._witness.indices if (g := grads[i]) is not None}
        return self._witness.join(elements, self._device)

    def witness_of_shards(self, grads: Sequence[Tensor | None]) -> Tensor:
        """The compared elements that this rank is the first to hold; 0 for the others; [elements]."""
        assert self._wrapper.mesh is not None
        first = min(self.plan.in_stage)
        elements = {}
        for i in self._witness.indices:
            if (grad := grads[i]) is not None and holds_first_copy(layout_of(grad), first):
                elements[i] = self._witness.read_shard(i, local_tensor(grad), spec_of(grad))
        return self._witness.join(elements, self._device)

    def scaled_since_reduction(self, rank_gradient: RankGradient, witness: Tensor) -> Tensor:
        """|F|² per group from DDP's buckets, without another read of `.grad`.

        The buckets show the gradient as the reduction left it. A later scaling (a clip, a GradScaler) has scaled the
        witness by the same factor, so the witness gives the factor. Any other change shows in the witness and drops the
        window later.
        """
        return self._sums.per_group(rank_gradient.reduced.sq_norms) * self._scaling_since_reduction(
            rank_gradient, witness
        )

    @staticmethod
    def _scaling_since_reduction(rank_gradient: RankGradient, witness: Tensor) -> Tensor:
        """The square of what the gradient was scaled by since the reduction; 0-dim."""
        before, now = rank_gradient.reduced.witness.square().sum(), witness.square().sum()
        return torch.where(before > 0, now / before, 1.0)

    def sq_norms(self, grads: Sequence[Tensor | None]) -> Tensor:
        """|F|² per parameter in the metric, [parameters].

        In fp32, at half the cost of a clip's norm: |F|² is only compared with the pieces, which are squared alike.
        """
        present = [(i, g) for i, g in enumerate(grads) if g is not None]
        parts: list[Part] = []
        for device in dict.fromkeys(g.device for _, g in present):
            on_device = [(i, g) for i, g in present if g.device == device]
            parts += self._metric.parts([i for i, _ in on_device], [g for _, g in on_device])
        return add_squares(len(grads), parts, self._device)

    def further(
        self, grads: Sequence[Tensor | None], rank_gradient: RankGradient | None, witness: Tensor
    ) -> Tensor | None:
        """The final gradient in further metrics, where every rank holds all of it; flat. None without such metrics."""
        if self._further is None or self._sums.further is None:
            return None
        if rank_gradient is not None and rank_gradient.reduced.further is not None:
            factor = self._scaling_since_reduction(rank_gradient, witness).sqrt()
            norms = rank_gradient.reduced.further * factor
        else:
            present = {i: g for i, g in enumerate(grads) if g is not None}
            by_device: dict[torch.device, list[int]] = {}
            for i, grad in present.items():
                by_device.setdefault(grad.device, []).append(i)
            parts = [self._further.norms(own, [present[i] for i in own]) for own in by_device.values()]
            norms = self._further.join(parts, len(grads), self._device)
        return self._sums.further.per_group(norms).view(-1)

    def further_of_shards(self, grads: Sequence[Tensor | None], experts: ExpertPieces | None) -> list[Tensor]:
        """The pieces in further metrics, this rank's part of the final gradient, and that of experts if there are any.

        Empty without such metrics.
        """
        if self._further is None or self._sums.further is None:
            return []
        shards = self.counted_shards(grads)
        norms = [self._further.norms_of_shard(i, shard) for i, shard in enumerate(shards) if shard is not None]
        joined, more = self._further.join(norms, len(grads), self._device), []
        if experts is not None:
            joined, of_experts = experts.split_further(joined)
            more = [of_experts.view(-1)]
        return [self._sums.further.pack(), self._sums.further.per_group(joined).view(-1), *more]

    def counted_shards(self, grads: Sequence[Tensor | None]) -> list[Tensor | None]:
        """What this rank counts of each gradient, so that every element of it counts once; [parameters]."""
        first = min(self.plan.in_stage)
        present = [(i, g) for i, g in enumerate(grads) if g is not None]
        shards: list[Tensor | None] = [None] * len(grads)
        for (i, _), grad in zip(present, reduce_partial([g for _, g in present]), strict=True):
            part = counted_part(spec_of(grad), first, like=spec_of(self._parameters[i]))
            if part is not None:
                shards[i] = part.of(local_tensor(grad))
        return shards
