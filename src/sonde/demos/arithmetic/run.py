"""`sonde demo entropy` from beginning to end: trainer, probes, verdict, report."""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from rich.console import Console
from tyro.conf import arg

from sonde.demos.console import INTERRUPTED, PANEL_WIDTH, check_ranges, choose_folder, conclude
from sonde.log.sinks import JsonlSink
from sonde.log.trackers import FunctionSink
from sonde.policy.entropy_options import EntropyChangeOptions
from sonde.policy.stats.forecast_point import forecast_point
from sonde.records import RunLog
from sonde.runs.reader import read_run
from sonde.wording import number

FAILED = 1

COMPLETIONS = 8
"""Completions of each prompt."""
PROMPTS, EVALUATION_PROMPTS = 8, 32
"""Of the hundred sums, those that a step learns from, and those that evaluate a forecast."""


@dataclass(frozen=True)
class EntropyDemoOptions:
    """Train a tiny language model to add by GRPO, and forecast what each update does to its entropy.

    TRL's GRPOTrainer teaches a tiny model to add two digits, on the CPU. Every few steps, sonde forecasts what the
    optimizer's step will do to the policy's entropy, and then measures what it did. It needs TRL. Ctrl-C stops
    early and keeps the measurements.

    Attributes:
        steps: Optimizer steps.
        every: Optimizer steps from one forecast to the next.
        learning_rate: Learning rate of AdamW.
        seed: Seed of the weights and of sampling.
        out: New or empty folder for log and report.
    """

    steps: Annotated[int, arg(metavar="N")] = 120
    every: Annotated[int, arg(metavar="N")] = 5
    learning_rate: Annotated[float, arg(metavar="RATE")] = 3e-3
    seed: Annotated[int, arg(metavar="N")] = 0
    out: Annotated[Path | None, arg(metavar="FOLDER", help_behavior_hint="(default: sonde-demo/DATE-TIME)")] = None


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
    console = Console(highlight=False)
    check_ranges(options, "steps", "every")
    folder = choose_folder(options.out)
    import sonde.integrations.trl  # before any output, since TRL may be missing

    folder.mkdir(parents=True, exist_ok=True)
    console.print(
        f"sonde demo entropy: TRL's GRPOTrainer teaches a tiny transformer to add two digits. A step learns from "
        f"{PROMPTS} sums with {COMPLETIONS} completions each. Every {options.every} steps, sonde forecasts "
        "what the step will do to the policy's entropy, in nats a token. Then it measures what the step did, by fresh "
        "rollouts before and after it. Ctrl-C stops early and keeps the measurements.\n",
        width=min(console.width, PANEL_WIDTH),
    )

    def show(metrics: Mapping[str, float], step: int) -> None:
        console.print(line_of(metrics, step, options.steps), markup=False, soft_wrap=True)

    status, ending = 0, "training ended"
    with tempfile.TemporaryDirectory() as checkpoints:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # warnings of other packages
            trainer = make_trainer(options, checkpoints)
        probes = sonde.integrations.trl.attach(
            trainer,
            EntropyChangeOptions(every=options.every, micro_batch_prompts=16),
            noise_every=options.every,
            evaluation_prompts=EVALUATION_PROMPTS,
            causes=True,
            rollouts=True,
            log=RunLog(
                [JsonlSink(folder), FunctionSink(show)],
                run="adding by GRPO",
            ),
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
    conclude(read_run(folder), console)
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
        "per_device_train_batch_size": PROMPTS * COMPLETIONS,
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


def line_of(metrics: Mapping[str, float], step: int, n_steps: int) -> str:
    """The metrics of a step as one line.

    Example:
        >>> entropy = {"evaluation_per_token": 1.2, "delta_forecast": -0.0213, "delta_se": 0.001}
        >>> entropy |= {"delta_rollouts": -0.02, "delta_rollouts_se": 0.0001, "is_valid": 1.0}
        >>> metrics = {"sonde/reward": 0.5} | {f"entropy/{name}": value for name, value in entropy.items()}
        >>> line_of(metrics, 6, 120)
        'step 6/120, reward 0.50, entropy 1.20, forecast of its change −0.021 ± 0.001, truth −0.020 ± 1 × 10⁻⁴'
    """
    point = forecast_point(step, metrics)
    forecast, truth = (
        f"{number(metrics.get(f'entropy/delta_{name}'), 2)} ± {number(metrics.get(f'entropy/delta_{se}'), 1)}"
        for name, se in (("forecast", "se"), ("rollouts", "rollouts_se"))
    )
    doubt = "" if point.is_valid or point.delta is None else "; not to be trusted"
    return (
        f"step {step}/{n_steps}, reward {number(metrics.get('sonde/reward'), 2)}, entropy {number(point.entropy)}, "
        f"forecast of its change {forecast}, truth {truth}{doubt}"
    )


COMMAND = (EntropyDemoOptions, run_entropy_demo)
