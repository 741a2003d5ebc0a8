"""Scoring responses micro-batch by micro-batch, on every rank, while nothing of the training notices."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from sonde.parallel.placements import is_fully_sharded, reshard
from sonde.parallel.process_groups import Tokens, gather_from_all_ranks
from sonde.parallel.wrappers import unwrap_model
from sonde.policy.scoring.directional_derivatives import LOST_IN_ROUNDING, Mode, derivatives_along
from sonde.policy.scoring.optimizer_step import Direction
from sonde.policy.scoring.rollouts import Rollouts, TokenStatistics
from sonde.policy.scoring.summed_gradient import GradientSum, summed_gradient
from sonde.policy.stats.entropy_gradient import Responses

T = TypeVar("T")

_PILOT_RESPONSES = 8
_ROUNDING = 0.01
"""Nats: more than the order of sums changes, bf16's included; less than any dropout does."""


@dataclass(frozen=True, eq=False)
class Scored:
    """What the policy makes of the responses of all ranks.

    Attributes:
        rollouts: this rank's.
        responses: all ranks'.
        log_prob: s_k in nats, [responses, tokens] of all ranks; fp64, on the CPU.
        entropy: H_k, likewise.
        rows: this rank's, among all.
    """

    rollouts: Rollouts
    responses: Responses
    log_prob: Tensor
    entropy: Tensor
    rows: slice

    @property
    def is_finite(self) -> bool:
        """Whether every token's numbers are."""
        return bool((self.log_prob.isfinite() & self.entropy.isfinite()).all())

    def own(self, values: Tensor) -> Tensor:
        """This rank's part of something of all ranks; [responses, tokens]."""
        return values[self.rows, : self.rollouts.mask.shape[1]]


@dataclass(frozen=True, eq=False)
class ScoreDerivatives:
    """How fast scores change along a direction Δ.

    Attributes:
        log_prob: D_Δ s_k, [responses, tokens] of all ranks; fp64, on the CPU.
        entropy: D_Δ H_k, likewise.
        mode: how derivatives were taken.
        doubt: why they are not to be trusted; empty if they are.
    """

    log_prob: Tensor
    entropy: Tensor
    mode: Mode
    doubt: str


class Scorer:
    """Runs a model over responses, a few prompts at a time, on every rank.

    Args:
        model: plain, compiled, wrapped in DDP or fully sharded.
        statistics: what to make of a micro-batch.
        prompts_each: prompts in a micro-batch.
        group: ranks that hold responses of their own; None for this process alone.
    """

    def __init__(
        self, model: nn.Module, statistics: TokenStatistics, prompts_each: int, group: dist.ProcessGroup | None
    ) -> None:
        self._wrapped = model
        self._model = unwrap_model(model)  # DDP's forward would issue collectives
        self._statistics = statistics
        self._prompts_each = prompts_each
        self._group = group
        self._is_sharded = any(map(is_fully_sharded, model.modules()))

    @torch.no_grad()
    def scored(self, rollouts: Rollouts) -> Scored:
        """`log_prob` and `entropy` of the responses of all ranks."""
        batches = self._batches(rollouts)

        def work() -> Tokens:
            tokens = self._in_order(rollouts, [self._outputs(b) for b in batches], ("log_prob", "entropy"))
            n = torch.tensor([len(rollouts)])
            return tokens | {"mask": rollouts.mask.cpu().bool(), "prompt": rollouts.prompt.cpu(), "n": n}

        found = gather_from_all_ranks(self._group, work)
        reshard(self._wrapped)
        rank = self._group.rank() if self._group is not None else 0
        before = int(found["n"][:rank].sum())
        rows = slice(before, before + len(rollouts))
        responses = Responses(found["mask"], found["prompt"])
        return Scored(rollouts, responses, found["log_prob"], found["entropy"], rows)

    def derivatives(
        self, rollouts: Rollouts, direction: Direction, mode: Literal["auto", "forward", "central"]
    ) -> ScoreDerivatives:
        """Derivatives of `log_prob` and `entropy` along a direction, of the responses of all ranks."""
        batches = self._batches(rollouts)
        # Of many prompts: a policy may be certain of its answers to some, which then tell nothing.
        n = min(_PILOT_RESPONSES, min(len(batch) for batch in batches))
        pilot = rollouts.rows(torch.linspace(0, len(rollouts) - 1, n).round().long())
        used: list[Mode] = []

        def work() -> Tokens:
            found = derivatives_along(self._outputs, self._model, direction, batches, mode=mode, pilot=pilot)
            used.append(found.mode)
            tokens = self._in_order(rollouts, found.of_batches, ("d_log_prob", "d_entropy"))
            is_finite = all(bool(of.isfinite().all()) for of in tokens.values())
            tokens = {name: of.nan_to_num(0.0, 0.0, 0.0) for name, of in tokens.items()}
            return tokens | {"is_lost": torch.tensor([bool(found.doubt) or not is_finite])}

        tokens = gather_from_all_ranks(self._group, work)
        doubt = LOST_IN_ROUNDING if bool(tokens["is_lost"].any()) else ""
        return ScoreDerivatives(tokens["d_log_prob"], tokens["d_entropy"], used[0], doubt)

    def everywhere(self, name: str, own: Callable[[], Tensor]) -> Tensor:
        """Something of this rank's tokens, of all ranks; [responses, tokens]."""
        return gather_from_all_ranks(self._group, lambda: {name: own()})[name]

    def gradient(
        self,
        rollouts: Rollouts,
        on_log_prob: Tensor,
        on_entropy: Tensor | None = None,
        *,
        of: Tensor | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> Direction:
        """∇ Σ (on_log_prob·s + on_entropy·H) over the tokens of all ranks.

        Args:
            rollouts: this rank's.
            on_log_prob: constants, [responses, tokens] of this rank.
            on_entropy: likewise; 0 by default.
            of: which of its responses count, [responses]; all by default.
            dtype: of the sums.
        """
        rows = torch.arange(len(rollouts)) if of is None else of.nonzero()[:, 0]
        batches = (
            [(chosen, 1.0) for i in rollouts.rows(rows).order(self._prompts_each) for chosen in [rows[i]]]
            if len(rows)
            else [(torch.arange(1), 0.0)]
        )  # nobody waits for who has nothing to add
        batches = self._as_many_everywhere(batches, lambda batch: (batch[0], 0.0))

        def weighted(batch: tuple[Tensor, float]) -> Tensor:
            chosen, factor = batch
            s, h = self._outputs(rollouts.rows(chosen))
            total = (factor * on_log_prob[chosen].to(s) * s).sum()
            return total if on_entropy is None else total + (factor * on_entropy[chosen].to(h) * h).sum()

        n_ranks = self._group.size() if self._group is not None else 1

        @torch.enable_grad()
        def work() -> GradientSum:
            return summed_gradient(weighted, self._wrapped, batches, n_ranks=n_ranks, dtype=dtype)

        reshard(self._wrapped)
        return self.on_all_ranks(work).over_ranks(self._group)

    def on_all_ranks(self, work: Callable[[], T]) -> T:
        """Do something on each rank, and return this rank's result. An error on one rank is raised on all."""
        results: list[T] = []

        def and_gather_nothing() -> Tokens:
            results.append(work())
            return {}

        gather_from_all_ranks(self._group, and_gather_nothing)
        return results[0]

    @torch.no_grad()
    def check_repeatable(self, rollouts: Rollouts) -> None:
        """Refuse, on all ranks, a model whose two forwards do not agree.

        Raises:
            ValueError: when they differ by more than rounding and the order of sums explain.
        """
        batch = self._own(rollouts)[0]

        def check() -> None:
            first, second = self._outputs(batch), self._outputs(batch)
            apart = max(float((a - b).abs().max()) for a, b in zip(first, second, strict=True))
            if apart > _ROUNDING:
                raise ValueError(
                    f"two forwards of the same responses are {apart:.2g} nats apart: turn off what is random in the "
                    "model (its dropout is off already, being in evaluation mode)"
                )

        self.on_all_ranks(check)

    def _own(self, rollouts: Rollouts) -> list[Rollouts]:
        return [rollouts.rows(index) for index in rollouts.order(self._prompts_each)]

    def _batches(self, rollouts: Rollouts) -> list[Rollouts]:
        """Micro-batches; where parameters are sharded as many on each rank, by the last one again."""
        return self._as_many_everywhere(self._own(rollouts), lambda batch: batch)

    def _as_many_everywhere(self, batches: list[T], in_place_of_none: Callable[[T], T]) -> list[T]:
        if not self._is_sharded:
            return batches
        counts = gather_from_all_ranks(self._group, lambda: {"n": torch.tensor([len(batches)])})["n"]
        return batches + [in_place_of_none(batches[-1])] * (int(counts.max()) - len(batches))

    def _outputs(self, batch: Rollouts) -> tuple[Tensor, Tensor]:
        found = self._statistics(self._model, batch)
        shapes = [tuple(t.shape) if isinstance(t, Tensor) else type(t).__name__ for t in found]
        if shapes != [tuple(batch.mask.shape)] * 2:
            raise ValueError(
                f"token statistics must be log-probability and entropy, each {tuple(batch.mask.shape)} as the mask, "
                f"got {shapes}"
            )
        # 0 outside the mask: what is there may be NaN, and its derivative too.
        s, h = (torch.where(batch.mask.bool().to(t.device), t, 0.0) for t in found)
        return s, h

    def _in_order(self, rollouts: Rollouts, found: Sequence[Sequence[Tensor]], names: Sequence[str]) -> Tokens:
        """What the micro-batches gave, as rows of the rollouts."""
        order = rollouts.order(self._prompts_each)
        rows = torch.cat(order)
        tokens = {}
        for i, name in enumerate(names):
            tokens[name] = torch.zeros(rollouts.mask.shape, dtype=torch.float64)
            tokens[name][rows] = torch.cat([outputs[i].detach().cpu().double() for outputs in found[: len(order)]])
        return tokens
