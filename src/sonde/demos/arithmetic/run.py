"""`sonde demo entropy` from beginning to end: trainer, probes, verdict, report."""

from __future__ import annotations

import logging
import math
import tempfile
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from rich.console import Console
from tyro.conf import arg

from sonde.demos.console import INTERRUPTED, PANEL_WIDTH, LastingConsole, choose_folder, conclude
from sonde.log.sinks import JsonlSink
from sonde.policy.stats.entropy_verdict import judge_entropy
from sonde.policy.stats.forecast_point import forecast_point
from sonde.records import RunLog
from sonde.runs.reader import read_run
from sonde.wording import number

FAILED = 1
_COLUMNS = f"{'step':>9}  {'reward':>6}  {'entropy':>7}  {'forecast ± SE':>19}  {'truth ± SE':>19}"
_STYLES = {"holds": "green", "collapses": "red", "unknown": "cyan"}
"""Colours of the verdict; yellow for all others."""

COMPLETIONS = 8
"""Completions of each prompt."""
_N_PROMPTS = 100  # sums of two digits


@dataclass(frozen=True)
class EntropyDemoOptions:
    """Train a tiny language model to add by GRPO, and forecast what each update does to its entropy.

    TRL's GRPOTrainer teaches a tiny model to add two digits, on the CPU. Every few steps, sonde forecasts what the
    optimizer's step will do to the policy's entropy, and then measures what it did. It needs TRL. Ctrl-C stops
    early and keeps the measurements.

    Attributes:
        steps: Optimizer steps.
        every: Optimizer steps from one forecast to the next.
        prompts: Prompts that a step learns from, with 8 completions each.
        evaluation_prompts: Prompts that evaluate a forecast and its truth.
        learning_rate: Learning rate of AdamW.
        seed: Seed of the weights and of sampling.
        out: New or empty folder for log and report.
    """

    steps: Annotated[int, arg(metavar="N")] = 120
    every: Annotated[int, arg(metavar="N")] = 5
    prompts: Annotated[int, arg(metavar="N")] = 8
    evaluation_prompts: Annotated[int, arg(metavar="N")] = 32
    learning_rate: Annotated[float, arg(metavar="RATE")] = 3e-3
    seed: Annotated[int, arg(metavar="N")] = 0
    out: Annotated[Path | None, arg(metavar="FOLDER", help_behavior_hint="(default: sonde-demo/DATE-TIME)")] = None

    def check(self) -> None:
        """Refuse options out of range.

        Raises:
            ValueError: naming the option.
        """
        for name in ("steps", "every"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}: give a whole number from 1 up")
        if self.prompts < 2:
            raise ValueError(f"prompts must be at least 2, got {self.prompts}: noise is measured by comparing prompts")
        if self.prompts > _N_PROMPTS - 2:
            raise ValueError(
                f"prompts must be at most {_N_PROMPTS - 2}, got {self.prompts}: of {_N_PROMPTS} sums, at least 2 must "
                "evaluate the forecast"
            )
        if not 2 <= self.evaluation_prompts <= _N_PROMPTS - self.prompts:
            raise ValueError(
                f"evaluation_prompts must be from 2 to {_N_PROMPTS - self.prompts}, the number of sums that a step "
                f"does not learn from, got {self.evaluation_prompts}: pass --evaluation-prompts "
                f"{min(32, _N_PROMPTS - self.prompts)}"
            )
        if not 0 <= self.seed < 2**31:
            raise ValueError(f"seed must be at least 0 and less than 2³¹, got {self.seed}: choose another")
        if not 0 < self.learning_rate < math.inf:
            raise ValueError(f"learning_rate must be positive and finite, got {self.learning_rate}: try 0.003")


def run_entropy_demo(options: EntropyDemoOptions) -> int:
    """Train a policy, forecast what its steps do to its entropy, and leave a log and a report.

    Args:
        options: the demo's options.

    Returns:
        The exit status: 0; 130 after Ctrl-C; 1 if training failed.

    Raises:
        ValueError: for options out of range.
        FileExistsError: if the folder for log and report is not empty.
        ImportError: without TRL.
    """
    console = LastingConsole(highlight=False)
    options.check()
    folder = choose_folder(options.out)
    import sonde.integrations.trl  # before any output, since TRL may be missing

    folder.mkdir(parents=True, exist_ok=True)
    logging.getLogger("sonde").setLevel(logging.ERROR)  # the lines below show alerts already
    console.print(
        f"sonde demo entropy: TRL's GRPOTrainer teaches a tiny transformer to add two digits. A step learns from "
        f"{options.prompts} sums with {COMPLETIONS} completions each. Every {options.every} steps, sonde forecasts "
        "what the step will do to the policy's entropy, in nats a token. Then it measures what the step did, by fresh "
        "rollouts before and after it. Ctrl-C stops early and keeps the measurements.\n",
        width=min(console.width, PANEL_WIDTH),
    )
    status, ending = 0, "training ended"
    with tempfile.TemporaryDirectory() as checkpoints:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # warnings of other packages
            trainer = make_trainer(options, checkpoints)
        probes = sonde.integrations.trl.attach(
            trainer,
            {
                "gns_probe": {"enabled": True, "log_every": options.every},
                "entropy_probe": {"enabled": True, "every": options.every, "budget": None, "micro_batch_prompts": 16},
                "policy_entropy_probe": {"enabled": True},
            },
            evaluation_prompts=options.evaluation_prompts,
            causes=True,
            rollouts=True,
            log=RunLog([JsonlSink(folder), ForecastLines(options.steps, console)], run="adding by GRPO"),
        )
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                trainer.train()
        except KeyboardInterrupt:
            status, ending = INTERRUPTED, "interrupted"
            console.print(f"Stopped after step {trainer.state.global_step} of {options.steps}.")
        except RuntimeError as error:  # torch raises it if probabilities are not finite
            status, ending = FAILED, f"training failed: {error}"
            Console(stderr=True, markup=False, soft_wrap=True).print(
                f"sonde: error: training failed at step {trainer.state.global_step + 1}: {error}; was the learning "
                f"rate of {options.learning_rate:g} too large?"
            )
        probes.close(ending)
    run = read_run(folder)

    def judge() -> tuple[str, str, str]:
        verdict = judge_entropy([reading.point for reading in run.policy])
        return verdict.headline, verdict.detail, _STYLES.get(verdict.kind, "yellow")

    conclude(run, judge, console)
    return status


def make_trainer(options: EntropyDemoOptions, folder: str | Path, **more: Any) -> Any:
    """TRL's own trainer, with the demo's model.

    Args:
        options: the demo's options.
        folder: the trainer's folder.
        more: settings of `GRPOConfig` that replace the demo's.
    """
    import datasets
    import transformers
    from trl import GRPOConfig, GRPOTrainer

    from sonde.demos.arithmetic import task

    transformers.utils.logging.set_verbosity_error()
    datasets.disable_progress_bars()
    settings: dict[str, Any] = {
        "output_dir": str(folder),
        "per_device_train_batch_size": options.prompts * COMPLETIONS,
        "num_generations": COMPLETIONS,
        "max_completion_length": 6,
        "learning_rate": options.learning_rate,
        "lr_scheduler_type": "constant",
        "max_steps": options.steps,
        "logging_steps": options.every,
        "loss_type": "dr_grpo",
        "scale_rewards": "none",
        "beta": 0.0,
        "seed": options.seed,
        "report_to": [],
        "save_strategy": "no",
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
    }
    trainer = GRPOTrainer(
        model=task.model(options.seed),
        processing_class=task.tokenizer(),
        train_dataset=task.dataset(),
        reward_funcs=task.reward,
        args=GRPOConfig(**(settings | more)),
    )
    trainer.remove_callback(transformers.PrinterCallback)
    return trainer


class ForecastLines:
    """A sink that prints a policy's records as they are written: the same numbers as in the log.

    Args:
        n_steps: number of optimizer steps of the run.
        console: where the lines go.
    """

    def __init__(self, n_steps: int, console: Console) -> None:
        self._n_steps, self._console = n_steps, console
        self._has_head = False

    def write(self, record: Mapping[str, Any]) -> None:
        """Print a record."""
        match record["kind"]:
            case "alert":
                self._console.print(f"alert: {record['message']}", style="yellow", markup=False, highlight=False)
            case "policy":
                if not self._has_head:
                    self._has_head = True
                    self._console.print(_COLUMNS, style="dim", soft_wrap=True)
                self._console.print(record_line(record, self._n_steps), markup=False, highlight=False, soft_wrap=True)

    def close(self) -> None:
        """No record follows."""


def record_line(record: Mapping[str, Any], n_steps: int) -> str:
    """A policy's record as one line.

    Example:
        >>> entropy = {"evaluation_per_token": 1.2, "delta_forecast": -0.0213, "delta_se": 0.001}
        >>> entropy |= {"delta_rollouts": -0.02, "delta_rollouts_se": 0.0001, "is_valid": 1}
        >>> metrics = {"reward": 0.5} | {f"entropy/{name}": value for name, value in entropy.items()}
        >>> record_line({"window": 6, "metrics": metrics, "reason": ""}, 120)
        '    6/120    0.50     1.20  −2.13e-2 ± 1.0e-3  −2.00e-2 ± 1.0e-4'
    """
    metrics = record["metrics"]
    point = forecast_point(record["window"], metrics, reason=record["reason"])
    step = f"{record['window']}/{n_steps}"
    reward = "–" if metrics.get("reward") is None else f"{metrics['reward']:.2f}"
    entropy = "–" if point.entropy is None else number(point.entropy)
    forecast = _with_error(metrics.get("entropy/delta_forecast"), metrics.get("entropy/delta_se"))
    truth = _with_error(metrics.get("entropy/delta_rollouts"), metrics.get("entropy/delta_rollouts_se"))
    doubt = ""
    if not point.is_valid and record["reason"]:
        doubt = "  step too large" if point.is_too_large else f"  {record['reason'].split(':')[0]}"
    return f"{step:>9}  {reward:>6}  {entropy:>7}  {forecast:>17}  {truth:>17}{doubt}"


def _with_error(value: float | None, se: float | None) -> str:
    if value is None:
        return "–"
    return _short(value, 2) + ("" if se is None else f" ± {_short(se, 1)}")


def _short(value: float, decimals: int) -> str:
    mantissa, _, exponent = f"{value:.{decimals}e}".partition("e")
    return f"{mantissa.replace('-', '−')}e{int(exponent)}"


COMMAND = (EntropyDemoOptions, run_entropy_demo)
