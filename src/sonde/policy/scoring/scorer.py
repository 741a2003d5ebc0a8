"""Scores of responses, their derivatives and their gradients: micro-batch by micro-batch, on every rank."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from sonde.parallel.model_state import checkpointing
from sonde.parallel.placements import is_fully_sharded, reshard
from sonde.parallel.process_groups import Tokens, gather_from_all_ranks, start_reduce
from sonde.parallel.unwrap import unwrap_model
from sonde.policy.scoring.directional_derivatives import LOST_IN_ROUNDING, derivatives_along
from sonde.policy.scoring.optimizer_step import Direction
from sonde.policy.scoring.precision import (
    NARROW,
    Precision,
    gathers_narrow,
    has_run,
    in_float32,
    narrow_parameter,
    why_not_in_float32,
)
from sonde.policy.scoring.rollouts import Rollouts, TokenStatistics
from sonde.policy.scoring.summed_gradient import summed_gradient
from sonde.policy.scoring.token_statistics import checked_scores
from sonde.policy.stats.entropy_gradient import Along, Coefficients, Responses, along_tokens

T = TypeVar("T")

_PILOT_RESPONSES = 8
_NEVER = -1e4
"""Log-probability of a token that a truncated policy does not sample, in nats: its exponential is 0, and its product
with 0 too."""
_ROUNDING = 0.01
"""Nats. A different order of sums changes scores by less, also in bf16; dropout changes them by more."""


@dataclass(frozen=True, eq=False)
class Batch:
    """The responses of all ranks.

    Attributes:
        rollouts: this rank's responses.
        responses: which tokens of all ranks' responses count.
        rows: where this rank's responses are among all.
    """

    rollouts: Rollouts
    responses: Responses
    rows: slice

    def own(self, values: Tensor) -> Tensor:
        """This rank's rows of values of all ranks; [responses, tokens]."""
        return values[self.rows, : self.rollouts.mask.shape[1]]


@dataclass(frozen=True, eq=False)
class Scored(Batch):
    """The policy's scores of the responses of all ranks.

    Attributes:
        log_prob: s_k in nats, [responses, tokens] of all ranks; fp64, on the CPU.
        entropy: H_k in nats, [responses, tokens] of all ranks; fp64, on the CPU.
        sampled_log_prob: log-probabilities that the sampler reported, as `log_prob`; None if the responses are the
            policy's own.
        outside: of a truncated policy, sampled tokens that it would not sample: the sampler rounds otherwise at the
            edge. Their log-probability stands as −H, before a step and after it. None without truncation.
    """

    log_prob: Tensor
    entropy: Tensor
    sampled_log_prob: Tensor | None = None
    outside: Tensor | None = None

    @property
    def is_finite(self) -> bool:
        """Whether all scores are finite."""
        return bool((self.log_prob.isfinite() & self.entropy.isfinite()).all())


@dataclass(frozen=True, eq=False)
class ScoreDerivatives:
    """How fast scores change along a direction Δ.

    Attributes:
        along: sums over each prompt's tokens, of all ranks.
        doubt: why they are not to be trusted; empty if they are.
    """

    along: Along
    doubt: str


class Scorer:
    """Runs a model over responses, a few prompts at a time, on every rank.

    Args:
        model: plain, compiled, wrapped in DDP or fully sharded.
        statistics: scores a micro-batch.
        prompts_each: number of prompts in a micro-batch.
        group: the ranks that hold different responses; None for this process alone.
        precision: in which arithmetic responses are scored.
    """

    def __init__(
        self,
        model: nn.Module,
        statistics: TokenStatistics,
        prompts_each: int,
        group: dist.ProcessGroup | None,
        precision: Precision = "model",
    ) -> None:
        self._wrapped = model
        self._model = unwrap_model(model)  # the forward of DDP would issue collectives
        self._statistics = statistics
        self._prompts_each = prompts_each
        self._group = group
        self._is_sharded = any(map(is_fully_sharded, model.modules()))
        self.precision: Precision = precision
        self.why_precision = ""
        """Why responses are not scored in 32 bits, if they were to be."""
        self._residuals: Mapping[Tensor, Tensor] = {}
        self._is_repeatable = False

    @contextlib.contextmanager
    def adding(self, residuals: Mapping[Tensor, Tensor]) -> Iterator[None]:
        """Parameters of 16 bits have these residuals added while they are converted to 32."""
        self._residuals = residuals
        try:
            yield
        finally:
            self._residuals = {}

    @property
    def adds_residuals(self) -> bool:
        """Whether `adding` has an effect: scores are those of a step that parameters of 16 bits do not hold."""
        return self.precision == "float32"

    @contextlib.contextmanager
    def _arithmetic(self) -> Iterator[Collection[nn.Module]]:
        """Around forwards and their backwards: the arithmetic of the scores. Yields modules converted to 32 bits."""
        if self.precision == "model":
            yield ()
            return
        device = next(self._model.parameters()).device
        with in_float32(self._model, device.type, self._residuals) as converted:
            yield converted

    @torch.no_grad()
    def scored(self, rollouts: Rollouts, before: Scored | None = None) -> Scored:
        """`log_prob` and `entropy` of the responses of all ranks.

        Args:
            rollouts: this rank's responses.
            before: the same responses before a step; None for responses of the policy as it is.
        """
        batches = self._batches(rollouts)

        def scores() -> Tokens:
            with self._arithmetic():
                outputs = [self._outputs(b) for b in batches]
            tokens = self._in_order(rollouts, outputs, ("log_prob", "entropy"))
            if rollouts.log_prob is not None:
                tokens["sampled"] = rollouts.log_prob.cpu().double()
            return tokens | {"is_truncated": torch.tensor([bool(rollouts.truncation)])}

        batch, tokens = self._gathered(rollouts, scores)
        reshard(self._wrapped)
        log_prob, entropy, outside = tokens["log_prob"], tokens["entropy"], None
        if bool(tokens["is_truncated"].any()):
            outside = log_prob.isneginf() if before is None else before.outside
            assert outside is not None
            log_prob = torch.where(outside, -entropy if before is None else before.log_prob, log_prob)
            log_prob = log_prob.masked_fill(log_prob.isneginf(), _NEVER)  # left by the step: it weighs nothing
        scores_of = (log_prob, entropy, tokens.get("sampled"), outside)
        return Scored(batch.rollouts, batch.responses, batch.rows, *scores_of)

    def credited(self, rollouts: Rollouts) -> tuple[Batch, Tensor, dict[str, Coefficients]]:
        """What a loss makes of the responses of all ranks. Scores nothing.

        Returns:
            The responses; advantage × weight of their tokens, [responses, tokens]; and of each other term of the loss,
            factors of the scores of their tokens.
        """
        terms = rollouts.other_terms()

        def values() -> Tokens:
            of_terms = {f"s {name}": on_log_prob.cpu() for name, (on_log_prob, _) in terms.items()}
            of_terms |= {f"h {name}": on_entropy.cpu() for name, (_, on_entropy) in terms.items()}
            return of_terms | {"credit": rollouts.credit().cpu()}

        batch, tokens = self._gathered(rollouts, values)
        others = {name: Coefficients(tokens[f"h {name}"], tokens[f"s {name}"]) for name in terms}
        return batch, tokens["credit"], others

    def _gathered(self, rollouts: Rollouts, of_tokens: Callable[[], Tokens]) -> tuple[Batch, Tokens]:
        """The responses of all ranks, with values of each token from every rank."""

        def work() -> Tokens:
            n = torch.tensor([len(rollouts)])
            return of_tokens() | {"mask": rollouts.mask.cpu().bool(), "prompt": rollouts.prompt.cpu(), "n": n}

        tokens = gather_from_all_ranks(self._group, work)
        rank = self._group.rank() if self._group is not None else 0
        n_before = int(tokens["n"][:rank].sum())
        rows = slice(n_before, n_before + len(rollouts))
        return Batch(rollouts, Responses(tokens["mask"], tokens["prompt"]), rows), tokens

    def derivatives(self, scored: Batch, direction: Direction) -> ScoreDerivatives:
        """Derivatives of the scores of all ranks' responses along a direction.

        Args:
            scored: the responses.
            direction: Δ.

        Raises:
            ValueError: for parameters of 16 bits that are not scored in 32: rounding swallows so small a movement.
        """
        if not self.adds_residuals and (narrow := next((p.dtype for p in direction if p.dtype in NARROW), None)):
            raise ValueError(
                f"derivatives need scores in 32 bits, got parameters of {narrow} and precision='model'"
                f"{self.why_precision and f' ({self.why_precision})'}: leave out what needs derivatives (causes, "
                "update='gradient'), or train parameters in fp32"
            )
        rollouts = scored.rollouts.untruncated()  # U as its loss has it; E that is truncated has no derivatives
        batches = self._batches(rollouts)
        # The pilot has responses to many prompts: where the policy is certain of its answer, nothing changes.
        n = min(_PILOT_RESPONSES, min(len(batch) for batch in batches))
        pilot = rollouts.rows(torch.linspace(0, len(rollouts) - 1, n).round().long())

        def passes(of: Sequence[Rollouts], narrow: Mapping[Tensor, Tensor]) -> list[tuple[Tensor, ...]]:
            with self.adding(narrow), self._arithmetic():
                return [tuple(out.clone() for out in self._outputs(batch)) for batch in of]

        made = derivatives_along(passes, self._model, direction, batches, pilot=pilot)
        own = self._in_order(rollouts, made.batches, ("d_log_prob", "d_entropy"))
        is_finite = all(bool(values.isfinite().all()) for values in own.values())
        own = {name: values.nan_to_num(0.0, 0.0, 0.0) for name, values in own.items()}
        own["is_lost"] = torch.tensor([bool(made.doubt) or not is_finite])
        tokens = gather_from_all_ranks(self._group, lambda: own)
        along = along_tokens(tokens["d_entropy"], tokens["d_log_prob"], scored.responses)
        return ScoreDerivatives(along, LOST_IN_ROUNDING if bool(tokens["is_lost"].any()) else "")

    def gradient(
        self,
        rollouts: Rollouts,
        on_log_prob: Tensor,
        on_entropy: Tensor | None = None,
        *,
        rows: Tensor | None = None,
    ) -> Direction:
        """∇ Σ (on_log_prob·s + on_entropy·H) over the tokens of all ranks.

        Args:
            rollouts: this rank's responses.
            on_log_prob: constants, [responses, tokens] of this rank.
            on_entropy: constants, [responses, tokens] of this rank; 0 by default.
            rows: mask of this rank's responses that count, [responses]; all by default.
        """
        rollouts = rollouts.untruncated()
        some = torch.arange(len(rollouts)) if rows is None else rows.nonzero()[:, 0]
        batches = (
            [(chosen, 1.0) for i in rollouts.rows(some).order(self._prompts_each) for chosen in [some[i]]]
            if len(some)
            else [(torch.arange(1), 0.0)]
        )  # a rank with no rows still runs one zero-weighted batch, so its peers do not hang
        batches = self._as_many_everywhere(batches, lambda batch: (batch[0], 0.0))

        def weighted(batch: tuple[Tensor, float]) -> Tensor:
            chosen, factor = batch
            s, h = self._outputs(rollouts.rows(chosen))
            _check_has_graph([s] if on_entropy is None else [s, h])
            total = (factor * on_log_prob[chosen].to(s) * s).sum()
            return total if on_entropy is None else total + (factor * on_entropy[chosen].to(h) * h).sum()

        n_ranks = self._group.size() if self._group is not None else 1
        reshard(self._wrapped)
        with torch.enable_grad(), checkpointing(self._model), self._arithmetic():
            parts, flat = summed_gradient(weighted, self._wrapped, batches, n_ranks=n_ranks)
        self.agree()
        if flat is not None and (work := start_reduce(flat, self._group)):
            work.wait()
        return parts

    def agree(self) -> None:
        """All ranks have come so far. An error of one, in a block of `together`, is raised on all here.

        It stands before what would wait for a rank that has failed: a sharded model's forward, or an all-reduce.
        """
        gather_from_all_ranks(self._group, dict)

    @torch.no_grad()
    def check(self, rollouts: Rollouts) -> None:
        """Refuse, on all ranks, a model that is random; once.

        If the model cannot compute in 32 bits, it is scored as it computes from here on.

        Raises:
            ValueError: if two forwards of the same responses differ by more than rounding and the order of sums can
                explain.
        """
        if self._is_repeatable:
            return
        batch = self._own(rollouts.untruncated())[0]
        if self.precision == "float32":
            self._try_float32(batch)
        with self._arithmetic():
            first, second = self._outputs(batch), self._outputs(batch)
        difference = max(float((a - b).abs().max()) for a, b in zip(first, second, strict=True))
        if difference > _ROUNDING:
            raise ValueError(
                f"two forwards of the same responses are {difference:.2g} nats apart, so the model is random: turn "
                "its randomness off (dropout is off already, since the model is in evaluation mode)"
            )
        self.agree()
        self._is_repeatable = True

    def _try_float32(self, batch: Rollouts) -> None:
        """Whether the model computes in 32 bits on all ranks. One without 16 bits is not tried."""
        if self._is_sharded and not has_run(self._model):
            self._outputs(batch)  # FSDP2 decides on dtypes in the first forward
        why = why_not_in_float32(self._model) if self._is_sharded else ""
        if not why and (gathers_narrow(self._model) or narrow_parameter(self._model) is not None):
            try:
                with self._arithmetic() as converted:
                    self._outputs(batch)
                if not (converted or self._is_sharded):
                    why = "its parameters are used outside the forwards of the modules that hold them"
            except RuntimeError as error:  # of operations whose tensors have different dtypes, or that need 16 bits
                why = str(error).splitlines()[0]
        failed = gather_from_all_ranks(self._group, lambda: {"failed": torch.tensor([bool(why)])})["failed"]
        if bool(failed.any()):
            self.precision, self.why_precision = "model", why or "another rank cannot compute in 32 bits"

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
        outputs = checked_scores(self._statistics(self._model, batch), batch.mask)
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


def _check_has_graph(outputs: Sequence[Tensor]) -> None:
    """Refuse outputs that no gradient can be taken of: it would be 0 without notice."""
    if not all(out.requires_grad for out in outputs):
        raise ValueError(
            "the token statistics return scores that no gradient can be taken of: compute both in torch, without "
            "detach() and no_grad(), or leave out what needs gradients (causes, update='gradient', "
            "HoldEntropy)"
        )
