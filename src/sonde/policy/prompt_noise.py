"""Is my number of prompts right? The gradient noise scale of reinforcement learning, in prompts."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from sonde.batch_size.stats.noise_scale import effective_units
from sonde.parallel.model_state import preserve_training_state
from sonde.parallel.placements import is_dtensor
from sonde.parallel.process_groups import check_group, gather_from_all_ranks, together
from sonde.parallel.refused_models import refuse_hidden_gradients
from sonde.parallel.unwrap import unwrap_model
from sonde.parallel.wrappers import clean_name
from sonde.policy.entropy_checks import check_is_model
from sonde.policy.scoring.prompt_norms import PromptRanks, nested_norms, prompt_ranks
from sonde.policy.scoring.rollouts import Rollouts, TokenStatistics
from sonde.policy.scoring.scorer import Scorer
from sonde.policy.scoring.token_statistics import as_statistics, check_scorable, checked_scores
from sonde.policy.stats.columns import OF_PROMPTS
from sonde.policy.stats.prompt_noise import RunningPromptNoise, solve_prompts
from sonde.stats.columns import Columns, taken
from sonde.stats.intervals import Status
from sonde.stats.sealed_state import check_identity, parameters_digest, sealed, unsealed
from sonde.wording import percent

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


@dataclass(frozen=True)
class PromptNoiseReading:
    """The noise scale in prompts now, as far as it is known.

    Attributes:
        b_simple: B_simple = tr Σ/|G|² in prompts; None unless resolved.
        low: lower end of its 95 % interval; 0 for an upper bound, None if unresolved.
        high: upper end; infinite for a lower bound, None if unresolved.
        status: "resolved", "lower_bound" (B_simple > low), "upper_bound" (B_simple < high) or "unresolved".
        reason: why B_simple is not resolved; empty if it is.
        trace_cov: tr Σ of one prompt over the last windows; None before the first.
        grad_sq: |G|² over the last windows, which may be negative; None before the first.
        completions_share: the part of tr Σ that more completions to each prompt would reduce. Only more prompts reduce
            the rest. None if no prompt has two completions.
        completions_share_low: lower end of its 95 % interval; None with fewer than 2 windows.
        completions_share_high: upper end; None with fewer than 2 windows, or if there is none.
        prompts_per_window: number of prompts in the last window, on all ranks.
        windows: number of windows measured.
    """

    b_simple: float | None
    low: float | None
    high: float | None
    status: Status
    reason: str
    trace_cov: float | None
    grad_sq: float | None
    completions_share: float | None
    prompts_per_window: int
    windows: int
    completions_share_low: float | None = None
    completions_share_high: float | None = None

    @property
    def cut_by_twice_completions(self) -> float | None:
        """The part of a window's noise that twice the completions to each prompt would take away; None if unknown.

        Twice the prompts would take away half of it, with as many tokens.
        """
        return None if self.completions_share is None else 0.5 * self.completions_share

    @property
    def advice(self) -> str:
        """What more completions and more prompts would do to the noise, in plain words; empty if unknown."""
        cut, low, high = self.cut_by_twice_completions, self.completions_share_low, self.completions_share_high
        if cut is None or low is None or high is None:
            return ""
        return (
            f"twice the completions to each prompt would cut the noise of a step by {percent(cut)} [{percent(low / 2)} "
            f"to {percent(high / 2)}], twice the prompts by {percent(0.5)}, both with twice the tokens"
        )


class PromptNoiseProbe:
    """Measures the noise scale of a policy gradient in prompts, and the completions' part of it.

    Trainers shuffle a prompt's completions over micro-batches, so micro-batches are not independent samples. This probe
    runs its own forward and backward for each half of every prompt's group: call it in some windows, not in all. During
    a measurement it holds two vectors of the size of this rank's parameters. Under FSDP2 it runs a forward and a
    backward of the whole prompt besides, and holds no vector but the shards of one gradient.

    Its noise scale is the level now, by the filter of `sonde.attach`'s readings. Its steps are measured windows.

    Args:
        model: the policy: plain, in DDP, or cut by FSDP2, tensor or sequence parallelism, or FSDP2 over these.
        token_statistics: scores responses; by default `CausalLMStatistics`, for a causal language model of
            transformers.
        weighs: "completions" if every completion has the same weight in the loss: as a sum, or as a mean over its own
            tokens. "tokens" if the loss is divided by the number of all tokens, so that long responses weigh more.
        process_group: the ranks that hold different responses, for a model that is not cut; by default those of DDP.
        mesh: all ranks that hold any of a cut model, where no parameter is on all of them.

    Raises:
        ValueError: for an argument outside its range, a model that hides its gradients, or `process_group` with a model
            that is cut.

    Reference:
        docs/batch-size.md; McCandlish et al. 2018, arXiv:1812.06162, for the noise scale.
    """

    METRICS: ClassVar[Columns] = OF_PROMPTS

    def __init__(
        self,
        model: nn.Module,
        *,
        token_statistics: TokenStatistics | None = None,
        weighs: Literal["completions", "tokens"] = "completions",
        process_group: dist.ProcessGroup | None = None,
        mesh: DeviceMesh | None = None,
    ) -> None:
        check_is_model(model)
        check_group(process_group)
        refuse_hidden_gradients(model)
        if process_group is not None and any(map(is_dtensor, model.parameters())):
            raise ValueError("process_group= is for plain modules, and a sharded model knows its ranks: leave it out")
        if weighs not in ("completions", "tokens"):
            raise ValueError(f"weighs must be 'completions' or 'tokens', got {weighs!r}")
        self._running = RunningPromptNoise()
        self._model = model
        self._statistics = as_statistics(token_statistics)
        self._weighs = weighs
        self._process_group, self._mesh = process_group, mesh
        self._ranks: PromptRanks | None = None
        self._scorer: Scorer | None = None
        # Of the parameters as they are now: they may be frozen later, before the state is saved or after it is loaded.
        self._identity = _identity(model, self._statistics, weighs)

    def measure(self, rollouts: Rollouts) -> PromptNoiseReading:
        """Add one window: the responses that this rank learns from, with advantages.

        All completions of a prompt must be on one rank. Ranks of tensor parallelism get the same responses.

        Raises:
            ValueError: without responses or advantages; if two ranks hold completions of one prompt; if ranks that work
                on the same responses were given others; if two forwards of the model do not agree; under FSDP2, while
                gradients wait to be reduced.
        """
        if self._ranks is None:
            self._ranks = prompt_ranks(self._model, self._process_group, self._mesh)
        with together(self._ranks.everyone):
            return self._measure(rollouts, self._ranks)

    def _measure(self, rollouts: Rollouts, ranks: PromptRanks) -> PromptNoiseReading:
        self._check_responses(rollouts, ranks)
        if self._scorer is None:
            self._scorer = Scorer(self._model, self._statistics, 1, ranks.everyone)
        with preserve_training_state(self._model):
            self._scorer.check(rollouts)
        rollouts = rollouts.untruncated()
        credit, prompts = rollouts.credit(), rollouts.order(1)

        def objective(rows: Tensor) -> Tensor:
            s, _ = checked_scores(self._statistics(unwrap_model(self._model), rollouts.rows(rows)), rollouts.mask[rows])
            if not s.requires_grad:
                raise ValueError(
                    "the token statistics return log-probabilities that no gradient can be taken of: compute them in "
                    "torch, without detach() and no_grad()"
                )
            mask = rollouts.mask[rows].bool().to(s.device)
            total: Tensor = (credit[rows].to(s) * torch.where(mask, s, 0.0)).sum()
            return total

        with preserve_training_state(self._model), nested_norms(self._model, ranks) as norms:
            own = {
                "prompt": torch.tensor([int(rollouts.prompt[rows[0]]) for rows in prompts]),
                "data_rank": torch.full((len(prompts),), ranks.data.rank),
                "sq_norms": norms.add(objective, prompts).cpu(),
                "counts": torch.tensor([self._counts(rollouts, rows) for rows in prompts], dtype=torch.float64),
            }
            gathered = gather_from_all_ranks(ranks.everyone, lambda: own)
            sq_norm_big = norms.sq_norm_of_sum()
        if not (math.isfinite(sq_norm_big) and bool(gathered["sq_norms"].isfinite().all())):
            raise ValueError(
                "the gradients of these responses are not finite, so this window was left out: look for NaN in the "
                "scores, the advantages and the weights"
            )
        self._running.update(solve_prompts(*_by_prompt(gathered), sq_norm_big))
        return self.reading()

    def _check_responses(self, rollouts: Rollouts, ranks: PromptRanks) -> None:
        """Refuse responses that cannot be measured, on all ranks alike."""

        check_scorable("the responses", rollouts, self._statistics)
        rollouts.credit()
        own = torch.tensor([[ranks.data.rank, rollouts.digest() if ranks.data.n_sharing > 1 else 0]])
        of_ranks = gather_from_all_ranks(ranks.everyone, lambda: {"of": own})["of"]
        if len(of_ranks.unique(dim=0)) > ranks.data.n_ranks:
            raise ValueError(
                "ranks that work on the same responses, as those of tensor parallelism, were given different ones: "
                "pass the same rollouts on all of them"
            )

    def reading(self) -> PromptNoiseReading:
        """The noise scale so far."""
        [interval], share = self._running.windows.levels(), self._running.within.interval()
        recent = self._running.windows.recent()
        return PromptNoiseReading(
            b_simple=interval.ratio,
            low=interval.low,
            high=interval.high,
            status=interval.status,
            reason=interval.reason,
            trace_cov=None if recent is None else recent.trace_cov[0],
            grad_sq=None if recent is None else recent.grad_sq[0],
            completions_share=self._running.completions_share,
            prompts_per_window=self._running.n_prompts,
            windows=self._running.n_windows,
            completions_share_low=share.low,
            completions_share_high=None if share.high == math.inf else share.high,
        )

    def metrics(self) -> Mapping[str, float | None]:
        """The reading by metric name; empty before the first window."""
        reading = self.reading()
        return taken(OF_PROMPTS, reading) if reading.windows else {}

    def state_dict(self) -> dict[str, Any]:
        """The averages so far, from which a restart continues: a version and a text.

        The same on every rank. Any checkpoint takes it: `torch.save`, JSON, and `torch.distributed.checkpoint` with the
        probe itself as one of its entries.
        """
        return sealed({"what": self._identity, "averages": self._running.state_dict()})

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from the result of `state_dict`.

        Load it on every rank, before the first `measure`; the run that saved it may have had another number of ranks,
        or a model that was cut in another way.

        Raises:
            ValueError: when it is damaged, or of another version, of other parameters, or of another `weighs`
                or token statistics; nothing is changed then.
        """
        contents = unsealed("prompt-noise probe state", state)
        check_identity(contents["what"], self._identity)
        self._running.load_state_dict(contents["averages"])

    def close(self) -> None:
        """Does nothing: the probe installs no hooks."""

    def _counts(self, rollouts: Rollouts, rows: Tensor) -> list[float]:
        """w₁, w₂, n₁, n₂ of a prompt's halves; 0 for the second half of a single completion."""
        lengths = rollouts.mask.sum(1).double()
        weights = lengths if self._weighs == "tokens" else torch.ones_like(lengths)
        of_halves = [weights[half].tolist() for half in (rows[::2], rows[1::2])]
        return [*map(sum, of_halves), *(effective_units(half) if half else 0.0 for half in of_halves)]


def _identity(model: nn.Module, statistics: TokenStatistics, weighs: str) -> dict[str, object]:
    """What is measured, for the saved state. Averages of something else must not be continued."""
    trained = [(clean_name(name), p) for name, p in model.named_parameters() if p.requires_grad]
    return {
        "probe": PromptNoiseProbe.__name__,
        "weighs": weighs,
        "token statistics": type(statistics).__name__,
        "parameters": parameters_digest(
            [name for name, _ in trained], [None if is_lazy(p) else tuple(p.shape) for _, p in trained]
        ),
    }


def _by_prompt(gathered: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """The squared norms and the counts of each prompt, from the rows of all ranks.

    Raises:
        ValueError: when ranks with responses of their own hold completions of one prompt.
    """
    prompts, index = gathered["prompt"].unique(return_inverse=True)
    # Ranks that share a prompt each have a part of its squares, and know the same counts.
    sq_norms = torch.zeros(len(prompts), 3, dtype=torch.float64).index_add_(0, index, gathered["sq_norms"])
    counts, ranks = torch.zeros(len(prompts), 4, dtype=torch.float64), torch.zeros_like(prompts)
    counts[index], ranks[index] = gathered["counts"], gathered["data_rank"]
    if not torch.equal(ranks[index], gathered["data_rank"]):
        raise ValueError("completions of one prompt are on several ranks: its group must be whole on one of them")
    return sq_norms, counts
