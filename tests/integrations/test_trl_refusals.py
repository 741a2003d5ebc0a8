"""What `attach` refuses before a GRPO run begins."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("trl", reason="needs trl: pip install '.[trl]'")
# Other packages cause various warnings when they are imported and run.
pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.slow]

from sonde.integrations import trl as integration  # noqa: E402
from sonde.policy.entropy_options import EntropyChangeOptions  # noqa: E402
from tests.integrations.grpo_trainer import trainer_of  # noqa: E402


@pytest.mark.parametrize(
    ("options", "arguments", "message"),
    [
        ({"top_p": 0.9}, {"causes": True}, "causes=True needs derivatives, .* samples with top_p=0.9"),
        ({"top_k": 1}, {"coefficient_to_hold": True}, "coefficient_to_hold=True needs derivatives, .* with top_k=1"),
        (
            {"gradient_accumulation_steps": 1, "per_device_train_batch_size": 8},
            {"options": None, "noise_every": 10},
            "at least 2 groups in a window, got 8 completions on each of 1 ranks in groups of 8: change per_device",
        ),
        ({}, {"options": None}, "nothing would be measured: pass"),
        ({}, {"options": {"every": 10}}, "options must be a sonde.EntropyChangeOptions, got"),
        ({}, {"noise_every": 0}, "noise_every must be a whole number of steps from 1 up, got 0"),
        ({}, {"options": EntropyChangeOptions(update="gradient")}, "is not TRL's step"),
        (
            {"top_entropy_quantile": 0.2},
            {"causes": True},
            "causes=True does not know the token weights of top_entropy_quantile",
        ),
        (
            {"top_entropy_quantile": 0.2},
            {"coefficient_to_hold": True},
            "TRL's bonus is on some of them: leave one of the two out",
        ),
        ({"repetition_penalty": 1.1}, {}, "repetition_penalty=1.1"),
        ({"generation_kwargs": {"typical_p": 0.9}}, {}, "generation_kwargs has typical_p"),
        (
            {"steps_per_generation": 4},
            {"noise_every": 10},
            "needs windows of whole groups, got steps_per_generation=4 and gradient_accumulation_steps=2",
        ),
        ({}, {"evaluation": "other"}, "evaluation must be 'fresh' or 'same'"),
        ({}, {"evaluation_prompts": 1}, "multiple of the 1 ranks and at least 2 for each, got 1: pass 2"),
    ],
)
def test_bad_input(tmp_path: Path, options: dict[str, Any], arguments: dict[str, Any], message: str) -> None:
    trainer = trainer_of(tmp_path, **options)
    before = trainer._compute_loss
    with pytest.raises(ValueError, match=message):
        integration.attach(trainer, **arguments)
    assert trainer._compute_loss == before


def test_other_trainers_that_cannot_be_measured_are_refused(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path)
    for name, value, message in (
        ("use_vllm", True, "vLLM samples by random numbers of its own"),
        ("use_transformers_continuous_batching", True, "continuous batching moves the model"),
    ):
        setattr(trainer.args, name, value)
        with pytest.raises(ValueError, match=message):
            integration.attach(trainer)
        setattr(trainer.args, name, False)
    trainer.rollout_func = lambda *_: None
    with pytest.raises(ValueError, match="with tools or a rollout_func"):
        integration.attach(trainer)
    integration.attach(trainer, evaluation="same").close()
    trainer.rollout_func = None
    data = trainer.train_dataset
    trainer.train_dataset = data.add_column("image", [0] * len(data))
    with pytest.raises(ValueError, match="the dataset has the column 'image'"):
        integration.attach(trainer)
    trainer.train_dataset = data.to_iterable_dataset()
    with pytest.raises(ValueError, match="can only be read in order"):
        integration.attach(trainer)
    trainer.train_dataset = data
    trainer.is_fsdp_enabled = True
    with pytest.raises(ValueError, match="is not measured in TRL's trainer under FSDP"):
        integration.attach(trainer, None, noise_every=10)


def test_many_ranks_need_no_number_of_evaluation_prompts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step of 12 ranks learns from 48 of the 100 prompts. 16, the default of fewer ranks, is no multiple of 12."""
    trainer = trainer_of(tmp_path)
    monkeypatch.setattr(trainer.accelerator.state, "num_processes", 12)
    assert trainer.accelerator.num_processes == 12
    integration.attach(trainer).close()
    unused: dict[str, Any]
    for unused in ({"options": None, "noise_every": 10}, {"evaluation": "same"}):
        integration.attach(trainer, **unused, evaluation_prompts=16).close()  # no fresh response is sampled
    with pytest.raises(ValueError, match="a multiple of the 12 ranks and at least 2 for each, got 16: pass 24"):
        integration.attach(trainer, evaluation_prompts=16)
    with pytest.raises(ValueError, match="the dataset has 100 prompts, of which a step learns from some, fewer than"):
        integration.attach(trainer, evaluation_prompts=108)
