"""Scores of responses, their derivatives and their gradients: micro-batch by micro-batch, on every rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from sonde.parallel.placements import is_fully_sharded, reshard
from sonde.parallel.process_groups import Tokens, gather_from_all_ranks
from sonde.parallel.unwrap import unwrap_model
from sonde.policy.scoring.directional_derivatives import LOST_IN_ROUNDING, Mode, derivatives_along
from sonde.policy.scoring.optimizer_step import Direction
from sonde.policy.scoring.rollouts import Rollouts, TokenStatistics
from sonde.policy.scoring.summed_gradient import GradientSum, summed_gradient
from sonde.policy.stats.entropy_gradient import Responses

T = TypeVar("T")

_PILOT_RESPONSES = 8
_ROUNDING = 0.01
"""Nats. A different order of sums changes scores by less, also in bf16; dropout changes them by more."""


@dataclass(frozen=True, eq=False)
class Scored:
    """The policy's scores of the responses of all ranks.

    Attributes:
        rollouts: this rank's responses.
        responses: which tokens of all ranks' responses count.
        log_prob: s_k in nats, [responses, tokens] of all ranks; fp64, on the CPU.
        entropy: H_k in nats, [responses, tokens] of all ranks; fp64, on the CPU.
        rows: where this rank's responses are among all.
    """

    rollouts: Rollouts
    responses: Responses
    log_prob: Tensor
    entropy: Tensor
    rows: slice

    @property
    def is_finite(self) -> bool:
        """Whether all scores are finite."""
        return bool((self.log_prob.isfinite() & self.entropy.isfinite()).all())

    def own(self, values: Tensor) -> Tensor:
        """This rank's rows of values of all ranks; [responses, tokens]."""
        return values[self.rows, : self.rollouts.mask.shape[1]]


@dataclass(frozen=True, eq=False)
class ScoreDerivatives:
    """How fast scores change along a direction Δ.

    Attributes:
        log_prob: D_Δ s_k, [responses, tokens] of all ranks; fp64, on the CPU.
        entropy: D_Δ H_k, [responses, tokens] of all ranks; fp64, on the CPU.
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
        statistics: scores a micro-batch.
        prompts_each: number of prompts in a micro-batch.
        group: the ranks that hold different responses; None for this process alone.
    """

    def __init__(
        self, model: nn.Module, statistics: TokenStatistics, prompts_each: int, group: dist.ProcessGroup | None
    ) -> None:
        self._wrapped = model
        self._model = unwrap_model(model)  # the forward of DDP would issue collectives
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

        tokens = gather_from_all_ranks(self._group, work)
        reshard(self._wrapped)
        rank = self._group.rank() if self._group is not None else 0
        n_before = int(tokens["n"][:rank].sum())
        rows = slice(n_before, n_before + len(rollouts))
        responses = Responses(tokens["mask"], tokens["prompt"])
        return Scored(rollouts, responses, tokens["log_prob"], tokens["entropy"], rows)

    def derivatives(
        self, rollouts: Rollouts, direction: Direction, mode: Literal["auto", "forward", "central"]
    ) -> ScoreDerivatives:
        """Derivatives of `log_prob` and `entropy` along a direction, of the responses of all ranks."""
        batches = self._batches(rollouts)
        # The pilot has responses to many prompts: where the policy is certain of its answer, nothing changes.
        n = min(_PILOT_RESPONSES, min(len(batch) for batch in batches))
        pilot = rollouts.rows(torch.linspace(0, len(rollouts) - 1, n).round().long())
        modes: list[Mode] = []

        def work() -> Tokens:
            derivatives = derivatives_along(self._outputs, self._model, direction, batches, mode=mode, pilot=pilot)
            modes.append(derivatives.mode)
            tokens = self._in_order(rollouts, derivatives.batches, ("d_log_prob", "d_entropy"))
            is_finite = all(bool(values.isfinite().all()) for values in tokens.values())
            tokens = {name: values.nan_to_num(0.0, 0.0, 0.0) for name, values in tokens.items()}
            return tokens | {"is_lost": torch.tensor([bool(derivatives.doubt) or not is_finite])}

        tokens = gather_from_all_ranks(self._group, work)
        doubt = LOST_IN_ROUNDING if bool(tokens["is_lost"].any()) else ""
        return ScoreDerivatives(tokens["d_log_prob"], tokens["d_entropy"], modes[0], doubt)

    def everywhere(self, name: str, own: Callable[[], Tensor]) -> Tensor:
        """Values of all ranks' tokens from this rank's values; [responses, tokens]."""
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
            rollouts: this rank's responses.
            on_log_prob: constants, [responses, tokens] of this rank.
            on_entropy: constants, [responses, tokens] of this rank; 0 by default.
            of: mask of this rank's responses that count, [responses]; all by default.
            dtype: dtype of the sums.
        """
        rows = torch.arange(len(rollouts)) if of is None else of.nonzero()[:, 0]
        batches = (
            [(chosen, 1.0) for i in rollouts.rows(rows).order(self._prompts_each) for chosen in [rows[i]]]
            if len(rows)
            else [(torch.arange(1), 0.0)]
        )  # a rank with no rows still runs one zero-weighted batch, so its peers do not hang
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
        """Refuse, on all ranks, a model whose two forwards of the same responses do not agree.

        Raises:
            ValueError: if they differ by more than rounding and the order of sums can explain.
        """

        def check() -> None:
            batch = self._own(rollouts)[0]
            first, second = self._outputs(batch), self._outputs(batch)
            difference = max(float((a - b).abs().max()) for a, b in zip(first, second, strict=True))
            if difference > _ROUNDING:
                raise ValueError(
                    f"two forwards of the same responses are {difference:.2g} nats apart, so the model is random: turn "
                    "its randomness off (dropout is off already, since the model is in evaluation mode)"
                )

        self.on_all_ranks(check)

    def _own(self, rollouts: Rollouts) -> list[Rollouts]:
        return [rollouts.rows(index) for index in rollouts.order(self._prompts_each)]

    def _batches(self, rollouts: Rollouts) -> list[Rollouts]:
        """Micro-batches. If parameters are sharded, every rank has as many: the last batch is repeated."""
        return self._as_many_everywhere(self._own(rollouts), lambda batch: batch)

    def _as_many_everywhere(self, batches: list[T], filler: Callable[[T], T]) -> list[T]:
        """The batches and fillers made of the last one, as many on every rank: a sharded forward needs all ranks."""
        if not self._is_sharded:
            return batches
        counts = gather_from_all_ranks(self._group, lambda: {"n": torch.tensor([len(batches)])})["n"]
        return batches + [filler(batches[-1])] * (int(counts.max()) - len(batches))

    def _outputs(self, batch: Rollouts) -> tuple[Tensor, Tensor]:
        outputs = self._statistics(self._model, batch)
        shapes = [tuple(t.shape) if isinstance(t, Tensor) else type(t).__name__ for t in outputs]
        if shapes != [tuple(batch.mask.shape)] * 2:
            raise ValueError(
                "token statistics must be log-probability and entropy, each of the mask's shape "
                f"{tuple(batch.mask.shape)}, got {shapes}: see sonde.TokenStatistics"
            )
        # 0 outside the mask, where scores may be NaN, and their derivatives too.
        s, h = (torch.where(batch.mask.bool().to(t.device), t, 0.0) for t in outputs)
        return s, h

    def _in_order(self, rollouts: Rollouts, batches: Sequence[Sequence[Tensor]], names: Sequence[str]) -> Tokens:
        """The micro-batches' outputs by name, with rows in the order of the rollouts."""
        order = rollouts.order(self._prompts_each)
        rows = torch.cat(order)
        tokens = {}
        for i, name in enumerate(names):
            tokens[name] = torch.zeros(rollouts.mask.shape, dtype=torch.float64)
            tokens[name][rows] = torch.cat([outputs[i].detach().cpu().double() for outputs in batches[: len(order)]])
        return tokens
