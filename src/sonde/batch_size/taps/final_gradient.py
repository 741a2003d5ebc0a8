"""The gradient at the end of a window: its norm, its squares and the elements that are compared with the pieces."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import torch
from torch import Tensor

from sonde.batch_size.taps.metric import GradientTerms, Metrics
from sonde.batch_size.taps.tap import RankGradient
from sonde.batch_size.taps.witness import Witness
from sonde.batch_size.window_clock import NO_COST, OwnTime
from sonde.gradient_norm.global_norm import GlobalNorm, global_norm
from sonde.gradient_norm.plan import NormPlan
from sonde.parallel.devices import to_device, widened
from sonde.parallel.placements import local_tensor, spec_of
from sonde.parallel.shares import counted_part, reduce_partial, share_of
from sonde.parallel.wrappers import Wrapper


class FinalGradient:
    """Reads `.grad`, whole or cut over ranks, after the last piece of a window.

    Args:
        wrapper: the model.
        group_names: the groups, [groups].
        group_index: the group of each parameter of this rank, [parameters].
        metrics: in which gradients are measured.
        witness: which elements are compared.
        apart: by class of parameters that other pieces feed, which parameters it has, by index.
        own: the probe's time.
    """

    def __init__(
        self,
        wrapper: Wrapper,
        group_names: Sequence[str],
        group_index: Sequence[int],
        metrics: Metrics,
        witness: Witness,
        apart: Mapping[str, Collection[int]],
        own: OwnTime,
    ) -> None:
        self._own = own
        self._wrapper, self._metrics, self._witness, self._apart = wrapper, metrics, witness, apart
        self._parameters, self._device = list(wrapper.parameters.values()), wrapper.leaves[0].device
        self._groups, self._group_index = list(group_names), list(group_index)
        self._unmeasured: list[int] | None = None
        self._unmeasured_by_name: dict[str, Tensor] = {}
        self._plain_plan: NormPlan | None = None
        self.clip_also({})

    def clip_also(self, unmeasured: Mapping[str, Tensor]) -> None:
        """Include parameters that are not measured, by name, in the plain norm."""
        ids = [id(p) for p in unmeasured.values()]
        if self._unmeasured == ids:
            return
        self._unmeasured = ids
        measured, parts, names = self._wrapper.parameters, self._group_index, list(self._groups)
        for n, (name, indices) in enumerate(self._apart.items(), start=1):
            parts = [self._group_index[i] + n * len(self._groups) if i in indices else p for i, p in enumerate(parts)]
            names += [f"{name} of {group}" for group in self._groups]
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
        """Parts of the model whose |F|² is measured: the groups and, after them, those of each class apart."""
        return len(self._groups) * (1 + len(self._apart))

    def norm_of_clip(self, riding: Tensor | None = None) -> GlobalNorm:
        """The plain norm as a clip takes it, waiting for all ranks; `riding` is summed over them besides."""
        with self._own.on(NO_COST):  # a clip needs it in any window
            return global_norm(self.plan, 2.0, riding=riding)

    def squares(self, norm: GlobalNorm) -> Tensor:
        """|F|² per group and, last, of all from a measured norm: of the model but for classes apart, then of each.

        Returns:
            [1 + classes, groups + 1]
        """
        squares = widened(to_device(norm.by_part[: self._n_squares], self._device)).square().view(-1, len(self._groups))
        return torch.cat([squares, squares.sum(1, keepdim=True)], 1)

    def witness(self, grads: Sequence[Tensor | None]) -> Tensor:
        """The elements that are compared; where ranks hold parts, those that this rank is the first to hold, and 0.

        Returns:
            [elements]
        """
        elements, first = {}, min(self.plan.in_stage, default=0)
        for i in self._witness.indices:
            grad = grads[i]
            if grad is None:
                continue
            if self._wrapper.mesh is None:
                elements[i] = self._witness.read(i, grad)
            elif share_of(spec_of(grad)).is_first_copy(first):
                elements[i] = self._witness.read_shard(i, local_tensor(grad), spec_of(grad))
        return self._witness.join(elements, self._device)

    def since_reduction(self, rank_gradient: RankGradient, witness: Tensor) -> Tensor:
        """The terms of the gradient from DDP's buckets, without another read of `.grad`; [metrics, parameters].

        The buckets show the gradient as the reduction left it. A later scaling (a clip, a GradScaler) has scaled the
        witness by the same factor, so the witness gives the factor. Any other change shows in the witness and drops the
        window later.
        """
        before, now = rank_gradient.reduced.witness.square().sum(), witness.square().sum()
        factor = torch.where(before > 0, now / before, 1.0).sqrt()
        return rank_gradient.reduced.scaled(factor, self._metrics.n_squares).terms

    def terms(self, grads: Sequence[Tensor | None], metrics: Metrics) -> Tensor:
        """The terms of what this rank counts of the gradient; [metrics, parameters].

        In fp32, at half the cost of a clip's norm: |F|² is only compared with the pieces, which are squared alike.
        """
        counted = self._counted(grads) if metrics.all else {}
        terms = GradientTerms(metrics, len(grads), self._device)
        for device in dict.fromkeys(g.device for g in counted.values()):
            on_device = {i: g for i, g in counted.items() if g.device == device}
            terms.take(tuple(on_device), tuple(on_device.values()))
        return terms.sum()

    def _counted(self, grads: Sequence[Tensor | None]) -> dict[int, Tensor]:
        """What this rank counts of each gradient, by index: all, or a part, so that every element counts once."""
        present = {i: g for i, g in enumerate(grads) if g is not None}
        if self._wrapper.mesh is None:
            return present
        first, counted = min(self.plan.in_stage), {}
        for i, grad in zip(present, reduce_partial([*present.values()]), strict=True):
            part = counted_part(spec_of(grad), first, like=spec_of(self._parameters[i]))
            if part is not None:
                counted[i] = part.of(local_tensor(grad))
        return counted
