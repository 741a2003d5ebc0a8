"""Probes for TRL's GRPOTrainer: what each update does to the policy's entropy, in TRL's own logs."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor, nn

from sonde.contrib.hold_entropy import HoldEntropy
from sonde.parallel.model_state import preserve_training_state, seed_everything
from sonde.parallel.process_groups import data_parallel_group, gather_objects, together
from sonde.parallel.unwrap import kind_of, settings_of, unwrap_optimizer
from sonde.policy.entropy_change import AroundStep, EntropyChangeProbe, ForecastPace
from sonde.policy.entropy_options import EntropyChangeOptions
from sonde.policy.log import PolicyLog
from sonde.policy.policy_entropy import PolicyEntropyProbe
from sonde.policy.prompt_noise import PromptNoiseProbe
from sonde.policy.scoring.rollouts import Rollouts
from sonde.policy.scoring.scorer import Scorer
from sonde.policy.stats.entropy_forecast import EntropyForecast
from sonde.policy.stats.policy_entropy import PolicyEntropy
from sonde.records import LogOrPlaces, RunLog, log_of, logger
from sonde.version import TESTED, install_hint

try:
    from transformers import TrainerCallback
    from trl import GRPOTrainer
    from trl import __version__ as trl_version

    from sonde.integrations.guarded import OnError, WrappedMethods, checked_on_error, warn_if_untested
    from sonde.integrations.trl_checks import Wanted, check_arguments, default_prompts
    from sonde.integrations.trl_rollouts import FullPrecision, TrlRollouts
except ImportError as error:
    raise ImportError(f"this needs trl: {install_hint('trl')}") from error

T = TypeVar("T")
DEFAULT = EntropyChangeOptions(every=10, budget=0.05)
DIVIDED_BY_TOKENS = ("bnpo", "dapo", "cispo", "vespo")
"""Losses that TRL divides by the number of all tokens."""
SAVED_AS = "sonde"
"""The entry of `TrainerState.stateful_callbacks` with the state of the noise scale in prompts. transformers saves that
mapping with a checkpoint. No callback has this name, so transformers restores no callback from the entry."""
_PROMPTS_EACH = 8
"""Prompts scored at a time."""
_SCALARS = ("reward", "reward_std", "kl", "clip_ratio/region_mean")
"""Metrics of TRL that the log has beside the entropy."""


def attach(
    trainer: GRPOTrainer,
    options: EntropyChangeOptions | None = DEFAULT,
    *,
    noise_every: int | None = None,
    evaluation: Literal["fresh", "same"] = "fresh",
    evaluation_prompts: int | None = None,
    causes: bool = False,
    rollouts: bool = False,
    coefficient_to_hold: bool = False,
    on_error: OnError = "warn",
    log: LogOrPlaces = None,
) -> TrlProbes:
    """Measure a GRPO run. Call it before `trainer.train()`. Weights are bit for bit those of a run without it.

    Every `options.every` optimizer steps, or in fewer by its `budget`, the entropy of the step's own responses is
    measured, and the change of entropy along the step is forecast before the step and measured after it. The trainer's
    own sampler draws the responses, with separate random numbers. The noise scale is in prompts: TRL shuffles a
    prompt's completions over micro-batches, so these are not independent samples, and `PromptNoiseProbe` runs its own
    backwards. Metrics go to the trainer's logs under sonde's names. A training that resumes from a checkpoint goes on
    with the averages of the noise scale: they are in the checkpoint's `trainer_state.json`.

    Args:
        trainer: the trainer, with any of its losses.
        options: of forecasts, by default one in 10 steps that takes 5 % of the time at most; with `update="step"`. None
            measures no entropy.
        noise_every: optimizer steps from one measurement of the noise scale to the next; None for none.
        evaluation: "fresh" samples responses to prompts that the step does not learn from. "same" takes the responses
            that the step learns from: it needs no generation, but an update changes its own prompts more than others,
            so the forecast is biased.
        evaluation_prompts: number of prompts of "fresh" on all ranks, each with as many responses as the trainer
            generates. By default 16, and at least 2 on each rank.
        causes: also split the change into momentum and this batch, and by prompt of the step; this takes another
            backward.
        rollouts: also measure the step's effect by fresh rollouts: as many prompts, answered before and after it.
        coefficient_to_hold: also say with which `entropy_coef` the entropy would not change.
        on_error: "warn" makes an error of a probe an alert, with its traceback in the log, and training goes on;
            "raise" raises it, for tests.
        log: of the run, or what `RunLog` takes, such as a folder, of which `sonde report folder` makes a page. The
            policy's part ends when training ends.

    Raises:
        ValueError: for a trainer whose samples are not the policy's (repetition_penalty) or cannot be drawn without
            disturbing training (vLLM); for options out of range.
    """
    log = log_of(log)
    warn_if_untested(
        "trl", trl_version, TESTED["trl"], "compare a few forecasts with fresh rollouts, by attach(…, rollouts=True)"
    )
    if evaluation_prompts is None:
        evaluation_prompts = default_prompts(trainer)
    wanted = Wanted(options, noise_every, evaluation, evaluation_prompts, causes, rollouts, coefficient_to_hold)
    check_arguments(trainer, wanted)
    return TrlProbes(trainer, wanted, checked_on_error(on_error), log)


def _forgiving(event: Callable[..., None]) -> Callable[..., None]:
    """An event of the trainer in which an error of a probe does not end training."""

    @functools.wraps(event)
    def forgiven(self: TrlProbes, *args: Any, **kwargs: Any) -> None:
        with self._forgiven():
            event(self, *args, **kwargs)

    return forgiven


class TrlProbes(TrainerCallback):  # type: ignore[misc]
    """The probes of a trainer, as `attach` returns them: already a callback of the trainer.

    Attributes:
        forecasts: every forecast with the number of its optimizer step, from 1.
        texts: the texts of the last forecast's prompts by their numbers, for its `table`.
    """

    def __init__(self, trainer: GRPOTrainer, wanted: Wanted, on_error: OnError, log: RunLog) -> None:
        self.forecasts: list[tuple[int, EntropyForecast]] = []
        self._trainer, self._wanted, self._on_error = trainer, wanted, on_error
        self._options, self._noise_every = wanted.options, wanted.noise_every
        self._hold = HoldEntropy() if wanted.coefficient_to_hold else None
        self._run_log, self._has_log = log, log.has_sinks
        self._statistics = FullPrecision()
        self._entropy: EntropyChangeProbe | None = None
        self._policy: PolicyEntropyProbe | None = None
        self._noise: PromptNoiseProbe | None = None
        self._policy_log: PolicyLog | None = None
        self._rollouts = TrlRollouts(trainer, wanted.n_prompts // trainer.accelerator.num_processes)
        self._around: tuple[ExitStack, AroundStep, float, float] | None = None
        """Of the forecast under way, with the seconds that sampling took, and all of its seconds before the step."""
        self._pace = ForecastPace(1, None, None)
        self._knows_window = True
        """Whether the responses of all micro-batches so far are known: unless an error was forgiven."""
        self._for_truth: list[int] = []
        """Rows of the dataset that are answered before and after the step."""
        self._metrics: dict[str, float | None] = {}
        self._forecast: EntropyForecast | None = None
        self._policy_entropy: PolicyEntropy | None = None
        self.texts: dict[int, str] = {}
        self._wrapped = WrappedMethods(
            trainer, _generate_and_score_completions=self._generated, _compute_loss=self._micro_batch
        )
        self._clip = WrappedMethods(trainer.accelerator, clip_grad_norm_=self._clipped)
        self._clip_coefficient: float | Tensor = 1.0
        self._entropy_coefficient = 0.0
        trainer.add_callback(self)

    @property
    def alerts(self) -> Mapping[str, str]:
        """The alerts so far: messages by name."""
        return {} if self._policy_log is None else self._policy_log.alerts

    def close(self, reason: str = "closed") -> None:
        """Restore the trainer, and end the log.

        Args:
            reason: why the log ends; a log that has ended already stays unchanged.
        """
        if self._policy_log is not None:
            self._policy_log.end(reason)
        self._wrapped.restore()
        self._clip.restore()
        self._trainer.pop_callback(self)

    # Wrappers of the trainer's methods.

    def _generated(self, original: Callable[..., Any], inputs: list[dict[str, Any]]) -> dict[str, Any]:
        output: dict[str, Any] = original(inputs)
        with self._forgiven():
            if self._trainer.model.training:
                self._rollouts.generated(inputs, output)
        return output

    def _micro_batch(self, original: Callable[..., Any], model: Any, inputs: Mapping[str, Any]) -> Any:
        if not self._trainer.model.training:  # an evaluation
            return original(model, inputs)
        knew_all, self._knows_window = self._knows_window, False
        with self._forgiven():
            self._rollouts.learned_from(inputs)
            self._knows_window = knew_all
        return original(model, inputs)

    def _clipped(self, original: Callable[..., Any], parameters: Any, max_norm: float, *args: Any, **kw: Any) -> Any:
        norm = original(parameters, max_norm, *args, **kw)
        with self._forgiven():
            self._clip_coefficient = _clip_coefficient(norm, max_norm)
        return norm

    @contextlib.contextmanager
    def _forgiven(self) -> Iterator[None]:
        """An error of a probe becomes an alert, once for each place, unless errors are to be raised.

        Where ranks gather values, the block is in `together` too, so that all ranks leave it.
        """
        try:
            yield
        except Exception as error:
            if self._on_error == "raise":
                raise
            place = traceback.extract_tb(error.__traceback__)[-1]
            message = f"a probe failed, and training goes on without this measurement: {type(error).__name__}: {error}"
            if self._policy_log is None:
                logger.warning("sonde: %s", message)
                return
            details = "".join(traceback.format_exception(error))
            self._policy_log.alert(f"failed_{place.name}_{place.lineno}", message, details=details)

    # Events of the trainer, in their order.

    @_forgiving
    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Write the header, and make the probes: the model has its wrapper, and the optimizer exists.

        Only the first training is logged: its end ends the log.
        """
        if self._policy_log is None:
            self._policy_log = PolicyLog(self._run_log, setup=self._setup())
        elif self._has_log:
            logger.warning("sonde: the log ended with the first training: attach again to log this training")
        with together(self._group):
            self._make_probes(kwargs["optimizer"], state.stateful_callbacks.get(SAVED_AS))

    @_forgiving
    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Begin a window."""
        self._around, self._knows_window = None, True
        self._rollouts.begin_window()
        self._metrics, self._forecast, self._policy_entropy = {}, None, None
        self._clip_coefficient = 1.0
        self._entropy_coefficient = _entropy_coefficient(self._trainer)

    @_forgiving
    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Measure, and forecast the step: gradients are whole and clipped."""
        options, noise_every = self._options, self._noise_every
        measures_noise = noise_every is not None and state.global_step % noise_every == 0
        forecasts = options is not None and state.global_step % options.every == 0 and self._pace.is_due()
        if measures_noise or forecasts:
            with together(self._group):
                update = self._rollouts.window() if self._knows_window else None
                everywhere = self._on_every_rank((self._knows_window, update is not None))
                if not all(knows_window for knows_window, _ in everywhere):
                    return  # an error in a micro-batch was forgiven
                if not all(has_tokens for _, has_tokens in everywhere):
                    update = None  # TRL has emptied all masks of a rank, as of truncated completions
                if update is None and self._wanted.evaluation == "same":
                    return
                if measures_noise and update is not None:
                    self._measure_noise(update, state)
                if forecasts:
                    self._forecast_step(update, state.global_step)

    def _measure_noise(self, update: Rollouts, state: Any) -> None:
        assert self._noise is not None
        self._noise.measure(update)
        self._log(self._noise.metrics())
        state.stateful_callbacks[SAVED_AS] = self._noise.state_dict()

    def _forecast_step(self, update: Rollouts | None, step: int) -> None:
        entered = time.perf_counter()
        assert self._policy is not None
        assert self._entropy is not None
        if update is not None:
            self._policy_entropy = self._policy.measure(update)
            self._log(self._policy.metrics())
        begun = time.perf_counter()
        if update is not None and self._wanted.evaluation == "same":
            evaluation = self._own_responses(update)
        else:
            evaluation = self._fresh(step)
        sampling_seconds = time.perf_counter() - begun
        every_text = self._on_every_rank({**({} if update is None else update.texts), **evaluation.texts})
        self.texts = {n: text for texts in every_text for n, text in texts.items()}
        if self._wanted.rollouts:
            self._for_truth = self._choose(self._seed_for(step) + 500_000)
        if self._hold is not None:
            self._hold.entropy_coefficient = self._entropy_coefficient
            self._hold.applied_scale = self._clip_coefficient
        stack = ExitStack()
        learned = self._with_loss_weights(update) if self._wanted.causes and update is not None else None
        around = stack.enter_context(self._entropy.around_step(evaluation, learned, causes=self._wanted.causes))
        self._around = stack, around, sampling_seconds, time.perf_counter() - entered

    @_forgiving
    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Measure the step, which has been taken."""
        if self._around is None:
            return
        (stack, around, sampling_seconds, before), self._around = self._around, None
        begun = time.perf_counter()
        with together(self._group):
            stack.close()
            self._pace.took(before + time.perf_counter() - begun)
        self._forecast = around.forecast.after_sampling(sampling_seconds)
        self.forecasts.append((state.global_step + 1, self._forecast))
        self._log(self._forecast.metrics())
        self._log({"entropy/is_of_own_prompts": float(self._wanted.evaluation == "same")})

    @_forgiving
    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Log the measurements around the step."""
        if self._metrics and self._policy_log is not None:
            logged = self._trainer._metrics["train"]
            scalars = {name: float(logged[name][-1]) for name in _SCALARS if logged.get(name)}
            self._policy_log.measured(
                state.global_step, scalars | self._metrics, self._forecast, self.texts, self._policy_entropy
            )

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """End the log."""
        if self._policy_log is not None:
            n, most = state.global_step, state.max_steps
            self._policy_log.end("training ended" if n >= most else f"stopped at step {n} of {most}")

    @property
    def _group(self) -> Any:
        """The ranks that hold different data."""
        return data_parallel_group(self._trainer.model_wrapped)

    def _make_probes(self, optimizer: Any, saved_noise: Mapping[str, Any] | None) -> None:
        model, statistics, options = self._trainer.model_wrapped, self._statistics, self._options
        if options is not None:
            # One in every `every` steps is asked.
            self._pace = ForecastPace(1, options.budget, self._group)
            self._entropy = EntropyChangeProbe(
                model,
                unwrap_optimizer(optimizer),
                options,
                token_statistics=statistics,
                sampler=self._truth if self._wanted.rollouts else None,
                grad_scaler=self._trainer.accelerator.scaler,
                beside=self._hold,
            )
            n_prompts = options.micro_batch_prompts
            self._policy = PolicyEntropyProbe(model, token_statistics=statistics, micro_batch_prompts=n_prompts)
        if self._noise_every is not None:
            by_tokens = self._trainer.loss_type in DIVIDED_BY_TOKENS
            weighs: Literal["tokens", "completions"] = "tokens" if by_tokens else "completions"
            self._noise = PromptNoiseProbe(model, token_statistics=statistics, weighs=weighs)
            if saved_noise is not None:
                try:
                    self._noise.load_state_dict(saved_noise)
                except ValueError as error:
                    logger.warning("sonde: the averages of the noise scale in prompts begin anew: %s", error)

    def _log(self, metrics: Mapping[str, float | None]) -> None:
        """Add metrics to the record, and to TRL's own logs, which are means since the previous log."""
        self._metrics |= metrics
        for name, value in metrics.items():
            if value is not None:
                self._trainer._metrics["train"][name].append(value)

    def _with_loss_weights(self, update: Rollouts) -> Rollouts:
        """U, with the weights that its tokens have in the loss, and the loss's other terms."""
        window = self._rollouts
        if self._entropy_coefficient:
            update = window.with_bonus(update, self._entropy_coefficient)
        if not (window.has_ratios or window.has_kl):
            return window.reweighed(update, None)
        model = self._trainer.model_wrapped
        scorer = Scorer(model, self._statistics, _PROMPTS_EACH, self._group)
        with preserve_training_state(model):
            scored = scorer.scored(update.untruncated())
        log_prob = scored.own(scored.log_prob)
        if window.has_kl:
            update = window.with_kl(update, log_prob)
        return window.reweighed(update, log_prob)

    def _own_responses(self, update: Rollouts) -> Rollouts:
        """E of evaluation="same", weighted by the log-probabilities at sampling if older weights sampled it."""
        assert self._options is not None
        if self._options.needs_own_responses(causes=self._wanted.causes) or update.truncation:
            return update  # without weights; the forecast says so if they are not the policy's own
        return dataclasses.replace(update, log_prob=self._rollouts.sampled_log_prob)

    def _fresh(self, step: int) -> Rollouts:
        """E: responses to prompts that this window does not learn from."""
        chosen = self._choose(self._seed_for(step))
        with preserve_training_state(self._trainer.model_wrapped):
            seed_everything(self._seed_for(step) + self._trainer.accelerator.process_index)
            return self._rollouts.fresh(chosen)

    def _truth(self, _: nn.Module) -> Rollouts:
        """Responses to other prompts, the same before and after the step. The probe seeds the sampler."""
        return self._rollouts.fresh(self._for_truth)

    def _choose(self, seed: int) -> list[int]:
        """Prompts that no rank's window learns from, for this rank."""
        learned = self._on_every_rank(self._rollouts.learned_texts())
        return self._rollouts.choose(seed, {text for texts in learned for text in texts})

    def _on_every_rank(self, value: T) -> list[T]:
        """The values of all ranks."""
        return gather_objects(self._group, lambda: value)

    def _seed_for(self, step: int) -> int:
        return 1_000_003 * (step + 1) + int(self._trainer.args.seed)

    def _setup(self) -> dict[str, object]:
        trainer, args, options = self._trainer, self._trainer.args, self._options
        is_own = self._wanted.evaluation == "same"
        completions = args.per_device_train_batch_size * args.gradient_accumulation_steps
        completions *= trainer.accelerator.num_processes
        optimizers = [unwrap_optimizer(trainer.optimizer)]
        return {
            "wrapper": f"{type(trainer).__name__} of TRL",
            "trainer": "TRL",
            "optimizer_kind": kind_of(optimizers),
            "optimizer_settings": settings_of(optimizers),
            "ranks": trainer.accelerator.num_processes,
            "device": str(trainer.accelerator.device),
            "parameters": sum(p.numel() for p in trainer.model.parameters() if p.requires_grad),
            "loss": trainer.loss_type,
            "temperature": args.temperature,
            "prompts_per_step": completions // trainer.num_generations,
            "completions_per_prompt": trainer.num_generations,
            "log_every": self._noise_every if options is None else options.every,
            "evaluation": "the step's own" if is_own else "fresh responses to other prompts",
            "objective": None if options is None else options.objective,
            "level": 0.95,
        }


def _entropy_coefficient(trainer: Any) -> float:
    """The coefficient of the entropy bonus in the window that begins.

    TRL's adaptive controller changes the coefficient at the end of a window, and applies it only while the entropy of
    the window before is at or below its target.
    """
    coefficient = float(getattr(trainer, "entropy_coef", 0.0))
    if getattr(trainer, "use_adaptive_entropy", False) and trainer._last_world_entropy > trainer.args.entropy_target:
        return 0.0
    return coefficient


def _clip_coefficient(norm: float | Tensor, max_norm: float) -> Tensor:
    """The factor by which torch clips gradients of this norm; no host synchronisation.

    It is 1 for a norm that is not finite: the step is not finite either, and says so itself.
    """
    factor = max_norm / (torch.as_tensor(norm) + 1e-6)
    return factor.where(factor > 0.0, 1.0).clamp(max=1.0)
