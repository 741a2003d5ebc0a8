"""What `attach` refuses before a GRPO run begins."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("trl", reason="needs trl: pip install '.[trl]'")
# Other packages cause various warnings when they are imported and run.
pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.slow]

from sonde.integrations import trl as integration  # noqa: E402
from tests.integrations.grpo_trainer import trainer_of  # noqa: E402


@pytest.mark.parametrize(
    ("options", "arguments", "message"),
    [
        ({"top_p": 0.9}, {}, "samples with top_p=0.9"),
        ({"top_k": 5}, {}, "top_k=5"),
        (
            {"gradient_accumulation_steps": 1, "per_device_train_batch_size": 8},
            {"config": {"gns_probe": {"enabled": True}}},
            "at least 2 groups in a window, got 8 completions on each of 1 ranks in groups of 8: change per_device",
        ),
        ({}, {"config": {"gns_probe": {"enabled": True, "metric": "adam"}}}, "gns_probe: metric does nothing with TRL"),
        ({}, {"config": {"entropy_probe": {"temperature": 3.0}}}, "entropy_probe: temperature does nothing"),
        ({}, {"config": {"entropy_probe": {"enabled": True, "update": "gradient"}}}, "is not TRL's step"),
        ({}, {"config": {"entropy_probe": {"enabled": True, "budget": 0.2}}}, "entropy_probe: budget does nothing"),
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
            {"config": {"gns_probe": {"enabled": True}}},
            "needs windows of whole groups, got steps_per_generation=4 and gradient_accumulation_steps=2",
        ),
        ({}, {"evaluation": "other"}, "evaluation must be 'fresh' or 'same'"),
        ({}, {"evaluation_prompts": 1}, "multiple of the 1 ranks and at least 2 for each, got 1: pass 2"),
        ({}, {"config": {"entropy": {"enabled": True}}}, "did you mean 'entropy_probe'"),
        (
            {"mask_truncated_completions": True},
            {"config": {"entropy_probe": {"enabled": True, "objective": "sequence"}}, "evaluation": "same"},
            "may leave a prompt of the step with one response: pass evaluation='fresh'",
        ),
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
        integration.attach(trainer, {"gns_probe": {"enabled": True}})


@pytest.mark.parametrize(
    ("options", "n_learned", "most"),
    [
        ({}, 4, 96),
        ({"steps_per_generation": 4}, 8, 92),  # a window's 32 completions may come from all 8 groups of a generation
        ({"steps_per_generation": 1, "num_iterations": 2}, 4, 96),  # two generations of 2 groups
        ({"steps_per_generation": 3, "per_device_train_batch_size": 8}, 6, 94),  # parts of two generations of 3 groups
    ],
    ids=str,
)
def test_too_many_evaluation_prompts_are_refused_before_training(
    tmp_path: Path, options: dict[str, Any], n_learned: int, most: int
) -> None:
    """The dataset has 100 prompts. A window that cannot leave enough of them may come late in a run."""
    trainer = trainer_of(tmp_path, **options)
    on = {"entropy_probe": {"enabled": True}}
    message = rf"100 different prompts, .* {n_learned} of them.* leaves {most} .*: pass evaluation_prompts={most}, or"
    with pytest.raises(ValueError, match=message):
        integration.attach(trainer, on, evaluation_prompts=most + 1)
    integration.attach(trainer, on, evaluation_prompts=most).close()
    with pytest.raises(ValueError, match="fewer than evaluation_prompts"):
        integration.attach(trainer, on, evaluation="same", rollouts=True, evaluation_prompts=most + 1)
    integration.attach(trainer, on, evaluation="same", evaluation_prompts=most + 1).close()


def test_many_ranks_need_no_number_of_evaluation_prompts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step of 12 ranks learns from 48 of the 100 prompts. 16, the default of fewer ranks, is no multiple of 12."""
    trainer = trainer_of(tmp_path)
    monkeypatch.setattr(trainer.accelerator.state, "num_processes", 12)
    assert trainer.accelerator.num_processes == 12
    integration.attach(trainer).close()
    for unused in ({"config": {"gns_probe": {"enabled": True}}}, {"evaluation": "same"}):
        integration.attach(trainer, **unused, evaluation_prompts=16).close()  # no fresh response is sampled
    with pytest.raises(ValueError, match="a multiple of the 12 ranks and at least 2 for each, got 16: pass 24"):
        integration.attach(trainer, evaluation_prompts=16)
    with pytest.raises(ValueError, match=r"leaves 52 .* fewer than evaluation_prompts=60: pass evaluation_prompts=48"):
        integration.attach(trainer, evaluation_prompts=60)


def test_prompts_of_the_same_text_count_once(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path)
    trainer.train_dataset = trainer.train_dataset.select([0, 1, 2, 3, 4] * 20)
    with pytest.raises(ValueError, match=r"5 different prompts, .* leaves 1 .*: pass evaluation='same' without"):
        integration.attach(trainer, evaluation_prompts=2)


@pytest.mark.parametrize(("n_slices", "most"), [(2, 92), (4, 84)])
def test_as_many_evaluation_prompts_as_are_allowed_last_to_the_end(tmp_path: Path, n_slices: int, most: int) -> None:
    """A window has 16 completions, 2 to a prompt; in shuffled generations, up to 16 prompts."""
    trainer = trainer_of(
        tmp_path, steps=7, per_device_train_batch_size=8, num_generations=2, steps_per_generation=n_slices
    )
    probes = integration.attach(trainer, {"entropy_probe": {"enabled": True, "every": 1}}, evaluation_prompts=most)
    trainer.train()
    assert len(probes.forecasts) == 7


@pytest.mark.parametrize("config", [{}, {"entropy_probe": {"every": 5}}])
def test_a_configuration_that_turns_nothing_on_is_pointed_out(tmp_path: Path, config: dict[str, Any]) -> None:
    with pytest.warns(UserWarning, match="the configuration turns on no probe, so nothing is measured"):
        integration.attach(trainer_of(tmp_path), config).close()
