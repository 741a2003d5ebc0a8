"""A real GRPO run with and without probes: the same weights, and correct numbers."""

from __future__ import annotations

import inspect
import math
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("trl", reason="needs trl: pip install '.[trl]'")
# Other packages cause various warnings when they are imported and run.
pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.slow]

from transformers import Trainer, TrainerCallback  # noqa: E402
from trl import GRPOTrainer  # noqa: E402

from sonde.integrations import trl as integration  # noqa: E402
from sonde.integrations.trl_rollouts import GROUP, USED  # noqa: E402
from sonde.log.sinks import JsonlSink  # noqa: E402
from sonde.parallel.unwrap import unwrap_optimizer  # noqa: E402
from sonde.policy.entropy_options import EntropyChangeOptions  # noqa: E402
from sonde.records import RunLog  # noqa: E402
from sonde.runs.reader import read_run  # noqa: E402
from tests.integrations.grpo_trainer import trainer_of, weights  # noqa: E402
from tests.step_meter import StepMeter  # noqa: E402


@pytest.mark.parametrize(
    "options",
    [
        {"loss_type": "grpo"},
        {"loss_type": "dapo"},
        {"loss_type": "bnpo"},
        {"loss_type": "grpo", "importance_sampling_level": "sequence"},
        {"loss_type": "dr_grpo", "importance_sampling_level": "sequence"},  # a ratio of the response at each token
        {"num_iterations": 2},
        {"steps_per_generation": 4},
        {"bf16": True},
    ],
    ids=str,
)
def test_training_is_the_same_to_the_bit_and_its_causes_are_explained(tmp_path: Path, options: dict[str, Any]) -> None:
    plain = trainer_of(tmp_path / "plain", steps=4, **options)
    plain.train()
    watched = trainer_of(tmp_path / "watched", steps=4, **options)
    holds = options == {"loss_type": "grpo"}
    probes = integration.attach(watched, EntropyChangeOptions(every=3), causes=True, coefficient_to_hold=holds)
    watched.train()
    assert torch.equal(weights(plain), weights(watched))
    assert [step for step, _ in probes.forecasts] == [1, 4]
    for _, forecast in probes.forecasts:
        assert forecast.n_evaluation == 16
        assert (forecast.coefficient_to_hold is not None) == holds
        assert forecast.se > 0
        assert forecast.causes is not None
        if "bf16" not in options:  # bf16 rounds the gradients
            # The loss is the mean of weight × advantage × log-probability that causes assume.
            assert forecast.causes.explained == pytest.approx(1.0, abs=0.1)
    probes.close()
    assert not unwrap_optimizer(watched.optimizer)._optimizer_step_pre_hooks


class Watching(TrainerCallback):  # type: ignore[misc]
    """Measures the steps that are taken, and the order of events."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.sizes: list[float] = []

    def on_step_begin(self, *_: Any, **kwargs: Any) -> None:
        self.events.append("step_begin")

    def on_substep_end(self, *_: Any, **kwargs: Any) -> None:
        self.events.append("substep_end")

    def on_pre_optimizer_step(self, *_: Any, **kwargs: Any) -> None:
        self.events.append("pre_optimizer_step")
        self.meter = StepMeter(kwargs["model"].parameters())

    def on_optimizer_step(self, *_: Any, **kwargs: Any) -> None:
        self.events.append("optimizer_step")
        self.sizes.append(float(sum(s.square().sum() for s in self.meter.step().values())))

    def on_step_end(self, *_: Any, **kwargs: Any) -> None:
        self.events.append("step_end")


WRAPPED = ("_generate_and_score_completions", "_compute_loss")
"""Methods of the trainer that `attach` wraps."""


def test_upstream_has_the_methods_and_events_that_sonde_needs(tmp_path: Path) -> None:
    """Fails if TRL or transformers rename a method or change the order of callbacks."""
    for name in (*WRAPPED, *USED):
        assert callable(getattr(GRPOTrainer, name)), name
    assert list(inspect.signature(GRPOTrainer._generate_and_score_completions).parameters) == ["self", "inputs"]
    assert list(inspect.signature(GRPOTrainer._compute_loss).parameters) == ["self", "model", "inputs"]
    turn = list(inspect.signature(GRPOTrainer._generate_single_turn).parameters)
    assert turn[:5] == ["self", "prompt_ids", "images", "multimodal_fields", "num_generations"]
    assert issubclass(GRPOTrainer, Trainer)
    watching = Watching()
    trainer_of(tmp_path, steps=2, callbacks=[watching]).train()
    one = ["step_begin", "substep_end", "pre_optimizer_step", "optimizer_step", "step_end"]
    assert watching.events == 2 * one
    assert all(size > 0 for size in watching.sizes)


def test_guard_trl_logs_what_its_metrics_hold(tmp_path: Path) -> None:
    """sonde adds its numbers to lists by name; TRL logs the mean of each list, and starts anew."""
    trainer = trainer_of(tmp_path, steps=1)
    trainer._metrics["train"]["entropy/of_this_test"] += [1.0, 3.0]
    trainer.log({"loss": 0.5})
    assert trainer.state.log_history[-1]["entropy/of_this_test"] == 2.0
    assert not trainer._metrics["train"]["entropy/of_this_test"]


def test_each_completion_keeps_its_prompt_through_shuffle_and_split(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, steps=3)
    integration.attach(trainer, EntropyChangeOptions(every=10))
    tokens = trainer.processing_class
    seen: dict[int, set[str]] = {}
    counted: dict[int, int] = {}
    compute_loss = trainer._compute_loss

    def look(model: Any, inputs: Any) -> Any:
        for number, ids, mask in zip(inputs[GROUP].tolist(), inputs["prompt_ids"], inputs["prompt_mask"], strict=True):
            seen.setdefault(number, set()).add(tokens.decode(ids[mask.bool()]))
            counted[number] = counted.get(number, 0) + 1
        return compute_loss(model, inputs)

    trainer._compute_loss = look
    trainer.train()
    assert len(seen) == 3 * 4
    assert all(len(prompts) == 1 for prompts in seen.values())
    assert set(counted.values()) == {8}


def test_scores_agree_with_the_trainers_own(tmp_path: Path) -> None:
    """With padding on both sides: log-probabilities and entropies beside TRL's fused head."""
    trainer = trainer_of(tmp_path, steps=1, temperature=0.7)
    probes = integration.attach(trainer)
    trainer.train()
    rollouts = probes._rollouts.window()
    with torch.no_grad():
        s, h = probes._statistics(trainer.model, rollouts)
        of_trl, entropies, _ = trainer._get_per_token_logps_and_entropies(
            trainer.model,
            rollouts.inputs["input_ids"],
            rollouts.inputs["attention_mask"],
            rollouts.mask.shape[1],
            compute_entropy=True,
        )
    mask = rollouts.mask.bool()
    assert torch.allclose(s[mask], of_trl[mask], atol=1e-4)
    assert torch.allclose(h[mask], entropies[mask], atol=1e-4)


@pytest.mark.parametrize("evaluation", ["fresh", "same"])
def test_evaluation_takes_other_prompts_or_the_windows_own(tmp_path: Path, evaluation: Any) -> None:
    trainer = trainer_of(tmp_path, steps=2)
    probes = integration.attach(
        trainer,
        EntropyChangeOptions(),
        evaluation=evaluation,
        evaluation_prompts=6,
    )
    fresh, seen = probes._rollouts.fresh, []

    def look(seed: int) -> Any:
        rollouts = fresh(seed)
        window = probes._rollouts
        learned = {window._texts[int(n)] for i in window._window for n in i[GROUP].unique()}
        seen.append((set(rollouts.texts.values()), learned))
        return rollouts

    probes._rollouts.fresh = look  # type: ignore[method-assign]
    trainer.train()
    assert len(seen) == (2 if evaluation == "fresh" else 0)
    for evaluated, learned in seen:
        assert (len(evaluated), len(learned)) == (6, 4)
        assert not evaluated & learned
    for _, forecast in probes.forecasts:
        numbers = [share.prompt for share in forecast.shares]
        if evaluation == "fresh":
            assert len(numbers) == 6
            assert all(number < 0 for number in numbers)
        else:
            assert len(numbers) == 4
            assert all(number >= 0 for number in numbers)


def test_completions_whose_mask_trl_empties_are_left_out(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, steps=3, max_completion_length=2, mask_truncated_completions=True)
    probes = integration.attach(trainer, EntropyChangeOptions(), causes=True)
    sizes = []
    rollouts_of_window = probes._rollouts.window

    def look() -> Any:
        rollouts = rollouts_of_window()
        assert rollouts is not None
        sizes.append(len(rollouts))
        return rollouts

    probes._rollouts.window = look  # type: ignore[method-assign]
    trainer.train()
    assert len(probes.forecasts) == 3
    assert all(0 < size < 32 for size in sizes)


@pytest.mark.parametrize("evaluation", ["fresh", "same"])
def test_a_window_with_empty_masks_has_a_forecast_if_its_own_responses_are_not_needed(
    tmp_path: Path, evaluation: Any
) -> None:
    trainer = trainer_of(tmp_path, steps=2, max_completion_length=1, mask_truncated_completions=True)
    with torch.no_grad():
        trainer.model.lm_head.weight[trainer.processing_class.eos_token_id] = -10.0  # so no completion ends
        trainer.model.model.norm.weight.mul_(3.0)
    generate = trainer._generate_and_score_completions

    def emptied(inputs: Any) -> Any:
        output = generate(inputs)
        output["completion_mask"] = torch.zeros_like(output["completion_mask"])
        return output

    trainer._generate_and_score_completions = emptied
    probes = integration.attach(trainer, EntropyChangeOptions(), causes=True, evaluation=evaluation, on_error="raise")
    trainer.train()
    assert len(probes.forecasts) == (2 if evaluation == "fresh" else 0)
    for _, forecast in probes.forecasts:
        assert forecast.entropy > 0
        assert "all gradients were 0, as where the advantages of a whole batch are" in forecast.reason


def test_records_go_to_sinks_and_rollouts_are_an_independent_truth(tmp_path: Path) -> None:
    """With everything on: the log, the third truth, and the same weights as without probes."""
    plain = trainer_of(tmp_path / "plain", steps=4)
    plain.train()
    trainer = trainer_of(tmp_path / "watched", steps=4)
    log = RunLog(JsonlSink(tmp_path / "log"), run="mine")
    options = EntropyChangeOptions(every=2)
    probes = integration.attach(trainer, options, noise_every=1, causes=True, rollouts=True, log=log)
    trainer.train()
    assert torch.equal(weights(plain), weights(trainer))
    run = read_run(tmp_path / "log")
    assert (run.name, run.header.unit, run.ended) == ("mine", "prompts", "training ended")
    assert [reading.window for reading in run.policy] == [1, 2, 3, 4]
    assert [reading.point.is_independent for reading in run.policy] == [True, False, True, False]
    for (step, forecast), reading in zip(probes.forecasts, run.policy[::2], strict=True):
        assert (step, forecast.delta) == (
            reading.window,
            pytest.approx(reading.metrics["entropy/delta_forecast"], rel=1e-6),
        )
        assert forecast.rollouts is not None
        assert forecast.rollouts.delta == pytest.approx(reading.metrics["entropy/delta_rollouts"], rel=1e-6)
        # Both truths estimate the same change: they agree within 5 standard errors.
        assert forecast.importance is not None
        apart = abs(forecast.rollouts.delta - forecast.importance.delta)
        assert apart < 5 * (forecast.rollouts.se**2 + forecast.importance.se**2) ** 0.5
        assert {share.prompt for share in reading.shares} <= set(trainer.train_dataset["prompt"])
    trainer.train()  # once more: the log has ended, and nothing fails
    assert len(probes.forecasts) > 2
    assert read_run(tmp_path / "log").policy == run.policy


def test_closing_restores_the_trainer(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, steps=1)
    n = len(trainer.callback_handler.callbacks)
    before = (trainer._compute_loss, trainer._generate_and_score_completions)
    probes = integration.attach(trainer)
    assert trainer._compute_loss != before[0]
    probes.close()
    probes.close()
    assert (trainer._compute_loss, trainer._generate_and_score_completions) == before
    assert len(trainer.callback_handler.callbacks) == n
    trainer.train()
    assert probes.forecasts == []


def test_the_log_probabilities_that_a_sampler_reports_are_compared_with_the_policys(tmp_path: Path) -> None:
    """As vLLM reports them; here all are too high by 0.1, and one is not known."""
    trainer = trainer_of(tmp_path, steps=2)
    original = trainer._generate_and_score_completions

    def reporting(inputs: Any) -> Any:
        output = original(inputs)
        ids = torch.cat([output["prompt_ids"], output["completion_ids"]], 1)
        mask = torch.cat([output["prompt_mask"], output["completion_mask"]], 1)
        with torch.no_grad():
            s = trainer._get_per_token_logps_and_entropies(trainer.model, ids, mask, output["completion_ids"].shape[1])[
                0
            ]
        output["sampling_per_token_logps"], output["old_per_token_logps"] = s + 0.1, s
        output["sampling_per_token_logps"][0, 0] = torch.nan
        return output

    trainer._generate_and_score_completions = reporting
    probes = integration.attach(trainer, EntropyChangeOptions(), evaluation="same", on_error="raise")
    trainer.train()
    [first, second] = (forecast.sampler for _, forecast in probes.forecasts)
    assert first.departure == pytest.approx(math.expm1(-0.1), rel=0.02)
    assert first.kl == pytest.approx(math.expm1(-0.1) + 0.1, rel=0.02)
    assert second.z < -5
    assert "log_prob= is not that of the sampler" in probes.alerts["not_of_sampler"]
    assert any("entropy/sampler_kl" in entry for entry in trainer.state.log_history)


def test_steps_that_learn_again_from_older_responses_weigh_them(tmp_path: Path) -> None:
    """Four optimizer steps learn from each generation: without weights, the policy seems to be another one."""
    trainer = trainer_of(tmp_path, steps=8, num_iterations=4)
    probes = integration.attach(trainer, EntropyChangeOptions(), evaluation="same", on_error="raise")
    trainer.train()
    forecasts = dict(probes.forecasts)
    assert all(forecast.own_policy is None for forecast in forecasts.values())  # weighted, so not tested
    support = [forecasts[step].support.ess_fraction for step in range(1, 9)]
    assert support[0] > support[3]  # the older the samples
    assert support[4] > support[7]
    assert min(support) > 0.4


def test_forecasts_keep_to_their_budget_at_the_steps_of_every(tmp_path: Path) -> None:
    """The first two take more than 1 % of this run; before the second, the length of a step is not known."""
    trainer = trainer_of(tmp_path, steps=12)
    probes = integration.attach(trainer, EntropyChangeOptions(every=3, budget=0.01), on_error="raise")
    trainer.train()
    assert [step for step, _ in probes.forecasts] == [1, 4]
    spent = sum(sum(f.seconds.values()) for _, f in probes.forecasts)
    assert probes._pace._spent > spent  # around the step, and before it: sampling and scoring too
