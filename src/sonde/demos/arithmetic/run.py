"""`sonde demo entropy` from beginning to end: trainer, probes, verdict, report."""

from __future__ import annotations

import contextlib
import logging
import signal
import tempfile
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from rich.console import Console

from sonde.demos.arithmetic.options import COMPLETIONS, EntropyDemoOptions
from sonde.demos.arithmetic.progress import ForecastLines
from sonde.demos.console import PANEL_WIDTH, LastingConsole, choose_folder, leave_report, verdict_panel
from sonde.log.sinks import JsonlSink
from sonde.policy.stats.entropy_verdict import judge_entropy
from sonde.records import RunLog
from sonde.runs.reader import read_run

INTERRUPTED = 128 + signal.SIGINT
"""The exit status that shells expect after Ctrl-C."""
FAILED = 1
_STYLES = {"holds": "green", "collapses": "red", "unknown": "cyan"}
"""Colours of the verdict; yellow for all others."""


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
                "entropy_probe": {"enabled": True, "every": options.every, "micro_batch_prompts": 16},
                "policy_entropy_probe": {"enabled": True},
            },
            evaluation_prompts=options.evaluation_prompts,
            causes=True,
            rollouts=True,
            log=RunLog([JsonlSink(folder), ForecastLines(options.steps, console)], run="adding by GRPO"),
        )
        try:
            with warnings.catch_warnings(), note_interrupts() as is_interrupted:
                warnings.simplefilter("ignore")
                stop_when(trainer, is_interrupted.is_set)
                trainer.train()
        except KeyboardInterrupt:  # the second Ctrl-C
            is_interrupted.set()
        except RuntimeError as error:  # torch raises it if probabilities are not finite
            status, ending = FAILED, f"training failed: {error}"
            Console(stderr=True, markup=False, soft_wrap=True).print(
                f"sonde: error: training failed at step {trainer.state.global_step + 1}: {error}; was the learning "
                f"rate of {options.learning_rate:g} too large?"
            )
        if is_interrupted.is_set():
            status, ending = INTERRUPTED, "interrupted"
            console.print(f"Stopped at step {trainer.state.global_step} of {options.steps}.")
        probes.close(ending)
    conclude(folder, console)
    return status


@contextlib.contextmanager
def note_interrupts() -> Iterator[threading.Event]:
    """The first Ctrl-C sets the event; the second raises KeyboardInterrupt.

    The first is not raised, since Python drops exceptions in destructors and in callbacks of C code.
    """
    noted = threading.Event()

    def note(*_: object) -> None:
        if noted.is_set():
            raise KeyboardInterrupt
        noted.set()

    if threading.current_thread() is not threading.main_thread():  # only the main thread gets signals
        yield noted
        return
    before = signal.signal(signal.SIGINT, note)
    try:
        yield noted
    finally:
        signal.signal(signal.SIGINT, before)


def stop_when(trainer: Any, is_asked: Callable[[], bool]) -> None:
    """Make a trainer stop after the step in which `is_asked` becomes true."""
    from transformers import TrainerCallback

    class Stopping(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            control.should_training_stop = control.should_training_stop or is_asked()

    trainer.add_callback(Stopping())


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


def conclude(folder: Path, console: Console) -> None:
    """Print a run's verdict and write its report.

    Args:
        folder: the folder of the log.
        console: where the verdict goes.
    """
    run = read_run(folder)
    if not run.policy:
        console.print(f"Nothing was measured. The log is {run.path}.", soft_wrap=True)
        return
    verdict = judge_entropy([r.point for r in run.policy])
    console.print()
    style = _STYLES.get(verdict.kind, "yellow")
    console.print(verdict_panel(verdict.headline, verdict.detail, style=style, width=console.width))
    leave_report(run.path, folder, console)
