"""A real Trainer of transformers: the values of a plain loop, weights as without sonde, and its own logs."""

from __future__ import annotations

import copy
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("transformers", reason="needs transformers: pip install '.[transformers]'")
# transformers and what it imports cause various warnings.
pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("no_accelerate_state")]

from transformers import Trainer, TrainerCallback  # noqa: E402

import sonde  # noqa: E402
from sonde.integrations import transformers as integration  # noqa: E402
from tests.integrations.hf_trainer import by_tokens, record, trainer_of  # noqa: E402
from tests.integrations.plain_loop import BY_PIECES, Piece, plain_loop, same_numbers, weights  # noqa: E402


def trained(folder: Path, **options: Any) -> Tensor:
    """The weights that training without sonde gives."""
    trainer = trainer_of(folder, **options)
    trainer.train()
    return weights(trainer.model)


@pytest.mark.parametrize("options", [{}, {"label_smoothing_factor": 0.1}, {"max_grad_norm": 0.0}], ids=str)
def test_ragged_sequences_read_as_in_a_plain_loop(tmp_path: Path, options: dict[str, Any]) -> None:
    """The last window of each epoch is shorter. Sequences have 2 to 11 tokens in the loss."""
    trainer = trainer_of(tmp_path, **options)
    start, recorded = copy.deepcopy(trainer.model), record(trainer)
    probe = integration.attach(trainer, log=tmp_path / "log", **BY_PIECES)
    trainer.train()
    assert torch.equal(weights(trainer.model), trained(tmp_path, **options))
    reading = probe.reading()
    assert (reading.windows, reading.dropped, reading.unit) == (14, {}, "sequences")
    if not options:
        assert [len(window) for window in recorded.windows] == [3, 3, 3, 3, 3, 3, 2] * 2
        assert same_numbers(reading, plain_loop(start, list(by_tokens(recorded.windows))))
        wrongly = [
            [Piece(i, {"units": 4}, 1 / len(window)) for i, _ in window] for window in recorded.windows
        ]  # as means of micro-batches
        assert not same_numbers(reading, plain_loop(start, wrongly))
    run = sonde.read_run(tmp_path / "log")
    assert (run.ended, run.header.setup["optimizer_kind"]) == ("training ended", "Adam or AdamW (β = 0.9)")
    assert run.header.setup["trainer"] == "transformers"
    logged = [row for row in trainer.state.log_history if "loss" in row]
    assert [row["step"] for row in logged] == [5, 10]
    _, values = run.series("gns/b_simple")
    assert logged[-1]["gns/b_simple"] == pytest.approx(values[0])  # both of window 10
    assert logged[-1]["gns/units_per_window"] == pytest.approx(12, abs=0.5)  # one window of 8 among them
    assert not any("gns/b_simple" in row for row in trainer.state.log_history if "train_runtime" in row)


def test_bf16(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, bf16=True)
    start, recorded = copy.deepcopy(trainer.model), record(trainer)
    probe = integration.attach(trainer, **BY_PIECES)
    trainer.train()
    assert torch.equal(weights(trainer.model), trained(tmp_path, bf16=True))

    def loss_of(model: Any, piece: Piece) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            return model(**piece.inputs, num_items_in_batch=piece.n_items).loss  # in the trainer's order: bf16 rounds

    assert same_numbers(probe.reading(), plain_loop(start, list(by_tokens(recorded.windows)), loss_of))


class GoesBackwardItself(Trainer):
    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        loss = self.compute_loss(model, inputs, num_items_in_batch=num_items_in_batch)
        loss.backward()
        return loss.detach()


def test_a_training_step_that_goes_backward_itself_is_told_what_to_call(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = trainer_of(tmp_path, kind=GoesBackwardItself, num_train_epochs=1)
    probe = integration.attach(trainer, **BY_PIECES)
    with caplog.at_level(logging.ERROR):
        trainer.train()
    why = "no backward of the window went through self.accelerator.backward(loss): use it for each backward"
    assert caplog.text.count(why) == 1
    reading = probe.reading()
    assert (reading.windows, reading.reason) == (0, why)


class Saves(TrainerCallback):  # type: ignore[misc]
    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 6:
            control.should_save = True


@pytest.mark.parametrize("by_callback", [False, True])
def test_a_resumed_training_goes_on_with_its_averages(by_callback: bool, tmp_path: Path) -> None:
    """A callback that comes after sonde's may ask for the checkpoint."""
    options = {} if by_callback else {"save_strategy": "steps", "save_steps": 6}
    whole = trainer_of(tmp_path / "whole", **options)
    uninterrupted = integration.attach(whole, **BY_PIECES)
    if by_callback:
        whole.add_callback(Saves())
    whole.train()
    resumed = trainer_of(tmp_path / "resumed", restore_callback_states_from_checkpoint=True, **options)
    probe = integration.attach(resumed, **BY_PIECES)
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-6"))
    assert torch.equal(weights(resumed.model), weights(whole.model))
    assert same_numbers(probe.reading(), uninterrupted.reading())
    reading = probe.reading()
    assert reading.windows == 14


def test_a_new_accelerator_is_measured_too(tmp_path: Path) -> None:
    """As in a search of hyperparameters, where each run makes one."""
    trainer = trainer_of(tmp_path)
    probe = integration.attach(trainer, log=tmp_path / "log", **BY_PIECES)
    trainer.create_accelerator_and_postprocess()
    for n in (1, 2):
        trainer.train()
        reading = probe.reading()
        assert reading.windows == 14
        assert (tmp_path / "log" / "records.jsonl").read_text().count('{"kind":"header"') == n
    probe.close()
    assert "backward" not in vars(trainer.accelerator)


class Fails(TrainerCallback):  # type: ignore[misc]
    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 3:
            raise KeyError("of the user's own")


def test_a_training_that_fails_fails_as_without_sonde_and_may_be_started_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trainer = trainer_of(tmp_path, callbacks=[failing := Fails()])
    probe = integration.attach(trainer, every=1, log=tmp_path / "log")
    with pytest.raises(KeyError, match="of the user's own"):
        trainer.train()
    assert sonde.read_run(tmp_path / "log").ended == "stopped by KeyError"
    stopped = probe.reading()
    assert stopped.windows > 0
    assert capsys.readouterr().err.endswith(f"sonde: {stopped}\n")
    trainer.remove_callback(failing)
    trainer.train()
    reading = probe.reading()
    assert reading.windows == 14
    probe.close()
    probe.close()  # a second time: nothing happens
    assert "training_step" not in vars(trainer)
    assert "backward" not in vars(trainer.accelerator)


def test_an_error_of_the_probe_does_not_stop_training(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def units(inputs: Mapping[str, Any]) -> int:
        if len(inputs["input_ids"]) == 4 and int(inputs["input_ids"][0, 0]) % 3 == 0:
            raise KeyError("length")
        return 4

    trainer = trainer_of(tmp_path)
    probe = integration.attach(trainer, units=units, **BY_PIECES)
    with caplog.at_level(logging.ERROR):
        trainer.train()
    assert torch.equal(weights(trainer.model), trained(tmp_path))
    assert "a micro-batch is not measured, so its window is left out: KeyError: 'length'" in caplog.text
    reading = probe.reading()
    assert 0 < reading.windows < 14


def test_what_cannot_be_measured_trains_on_and_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The model that a DataParallel wraps, as on a machine with several GPUs that one process sees."""
    trainer = trainer_of(tmp_path)
    probe = integration.attach(trainer, verbose=False)
    trainer.model_wrapped = nn.DataParallel(trainer.model)
    with caplog.at_level(logging.ERROR):
        trainer.train()
    assert "this training is not measured: ValueError: nn.DataParallel copies the model" in caplog.text
    assert "start one process for each GPU" in caplog.text
    assert probe.reading() is None
    assert trainer.state.global_step == 14


def test_bad_arguments_are_refused_before_training(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(ValueError, match=r"trainer must be a transformers\.Trainer, got Linear"):
        integration.attach(nn.Linear(1, 1))
    trainer = trainer_of(tmp_path)
    with pytest.raises(TypeError, match="unexpected keyword argument 'budgt'"):
        integration.attach(trainer, budgt=3)
    with pytest.raises(ValueError, match="budget must be a part"):
        integration.attach(trainer, budget=0)
    integration.attach(trainer)
    with pytest.raises(ValueError, match="has a probe already: attach once, or close the first"):
        integration.attach(trainer)


def test_guard_the_order_of_the_trainers_calls(tmp_path: Path) -> None:
    """What the integration leans on: training steps, the clip, the event before the step, the step, then the log."""
    calls: list[str] = []

    class Notes(TrainerCallback):  # type: ignore[misc]
        def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
            calls.append(f"begin {trainer.optimizer is not None} {trainer.model_wrapped is not None}")

        def on_pre_optimizer_step(self, *args: Any, **kwargs: Any) -> None:
            norm = torch.cat([p.grad.flatten() for p in trainer.model.parameters()]).norm()
            calls.append(f"before the step {norm:.3f}")

    options = {"max_steps": 1, "logging_steps": 1, "max_grad_norm": 0.25, "save_strategy": "steps", "save_steps": 1}
    trainer = trainer_of(tmp_path, callbacks=[Notes()], **options)

    def noted(name: str, owner: Any, method: str) -> None:
        original = getattr(owner, method)

        def call(*args: Any, **kwargs: Any) -> Any:
            calls.append(name)
            return original(*args, **kwargs)

        setattr(owner, method, call)

    noted("training step", trainer, "training_step")
    noted("backward", trainer.accelerator, "backward")
    noted("log", trainer, "log")
    noted("save", trainer, "_save_checkpoint")
    trainer.train()
    micro_batch = ["training step", "backward"]
    assert calls == ["begin True True", *micro_batch * 3, "before the step 0.250", "log", "save", "log"]
