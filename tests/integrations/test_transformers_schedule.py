"""The batch schedule of transformers' Trainer on two ranks, beside the callback that anybody would write."""

from __future__ import annotations

import re
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.integrations.as_launched import NUMBERS, as_launched, free_port
from tests.integrations.plain_loop import BY_PIECES, Piece, plain_loop, same_numbers, whole_weights
from tests.ranks import Ranks

pytest.importorskip("transformers", reason="needs transformers: pip install '.[transformers]'")
pytestmark = [pytest.mark.filterwarnings("ignore")]

GROWS: dict[str, Any] = {"largest": 8, "ratio": 1e6, "pause": 0, "every": 3, "verbose": False, "rule": "none"}
"""It grows as soon as the noise scale has an interval."""
SMALLEST = 2


def _trained(port: int, how: str) -> dict[str, Any]:
    with as_launched(port):
        from types import SimpleNamespace

        from transformers import TrainerCallback

        from sonde.integrations import transformers as integration
        from sonde.integrations.transformers_schedule import schedule_batch
        from tests.integrations import hf_trainer

        class Obvious(TrainerCallback):  # type: ignore[misc]
            def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
                if state.global_step == 3:
                    args.gradient_accumulation_steps = 4

        options: dict[str, Any] = {"gradient_accumulation_steps": SMALLEST, "per_device_train_batch_size": 2}
        options |= {"train_dataset": hf_trainer.ragged_texts(118), "num_train_epochs": 2}
        trainer = hf_trainer.trainer_of(tempfile.mkdtemp(), **options)
        recorded = hf_trainer.record(trainer)
        probe = integration.attach(trainer, on_error="raise", **BY_PIECES)
        if how == "obvious":
            trainer.add_callback(Obvious())
        else:
            schedule_batch(probe, **(GROWS | {"counts": (2, 5, 8), "every": 1}))
        trainer.train()
        reading = probe.reading()
        assert reading is not None
        return {
            "weights": whole_weights(trainer.model_wrapped),
            "windows": recorded.windows,
            "reading": SimpleNamespace(**{name: getattr(reading, name) for name in NUMBERS}),
            "left": trainer.args.gradient_accumulation_steps,
        }


def test_ranks_keep_the_same_weights(ranks2: Ranks) -> None:
    """Every window is whole, ranks stay equal, and the reading is that of one process with all pieces by hand."""
    from tests.integrations.hf_trainer import gpt2

    first, second = ranks2(_trained, free_port(), "ours")
    assert torch.equal(first["weights"], second["weights"])
    sizes = [len(window) for window in first["windows"]]
    assert sizes == [len(window) for window in second["windows"]]
    n_batches = 30  # of an epoch on each rank: 118 texts, 2 in a batch on 2 ranks
    epoch, in_epoch = [], 0
    for size in sizes:
        epoch.append((in_epoch, size))
        in_epoch = (in_epoch + size) % n_batches
    # A window begins at a multiple of its size, and only an epoch's last one is shorter.
    for begin, size in epoch:
        assert size in (2, 5, 8) or begin + size == n_batches
        assert begin % size == 0 or begin + size == n_batches
    assert {2, 5, 8} <= set(sizes)
    assert first["left"] == SMALLEST

    both = zip(first["windows"], second["windows"], strict=True)
    windows = [[_by_tokens(*each) for each in (*one, *other)] for one, other in both]

    def loss_of(model: Any, piece: Piece) -> Any:
        return model(**piece.inputs).loss * piece.weight

    assert same_numbers(first["reading"], plain_loop(gpt2(), windows, loss_of))


def _by_tokens(inputs: Any, n_items: Any) -> Piece:
    tokens = [sum(label != -100 for label in row[1:]) for row in inputs["labels"].tolist()]
    return Piece(inputs, {"unit_weights": tokens}, sum(tokens) / n_items, torch.tensor(n_items))


def test_the_obvious_callback_lets_ranks_drift_apart(ranks2: Ranks) -> None:
    """What `schedule_batch` is for. If this fails, ranks keep together, and the schedule may be simpler."""
    first, second = ranks2(_trained, free_port(), "obvious")
    assert float((first["weights"] - second["weights"]).abs().max()) > 0.01


def test_the_schedule_of_the_rate_ends_where_it_would(tmp_path: Path) -> None:
    """Linear to 0 after all smallest batches, whatever windows they made; the rate of a step follows its batch."""
    from transformers import TrainerCallback

    from sonde.integrations import transformers as integration
    from sonde.integrations.transformers_schedule import schedule_batch
    from tests.integrations import hf_trainer

    options: dict[str, Any] = {"gradient_accumulation_steps": SMALLEST, "lr_scheduler_type": "linear"}
    trainer = hf_trainer.trainer_of(tmp_path, train_dataset=hf_trainer.ragged_texts(256), **options)
    recorded = hf_trainer.record(trainer)
    schedule_batch(integration.attach(trainer, on_error="raise", **BY_PIECES), **(GROWS | {"rule": "sqrt"}))
    rates: list[float] = []

    class Look(TrainerCallback):  # type: ignore[misc]
        def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if not state.epoch:  # after the schedule has its own hooks
                trainer.optimizer.optimizer.register_step_pre_hook(lambda o, *_: rates.append(o.param_groups[0]["lr"]))

    trainer.add_callback(Look())
    trainer.train()
    sizes = [len(window) for window in recorded.windows]
    assert sum(sizes) == 128
    assert {2, 4, 8} <= set(sizes)
    assert trainer.lr_scheduler.last_epoch == 64
    before = [sum(sizes[:k]) // 2 for k in range(len(sizes))]
    expected = [1e-2 * (1 - n / 64) * (size / 2) ** 0.5 for n, size in zip(before, sizes, strict=True)]
    assert rates == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize(
    ("options", "of_schedule", "words"),
    [
        ({"max_steps": 4}, {}, "max_steps= counts optimizer steps"),
        ({}, {"monotone": False}, "monotone=False is for loops of your own"),
        ({}, {"largest": 1}, "largest must be at least the present 2 micro-batches"),
    ],
)
def test_what_is_refused(tmp_path: Path, options: dict[str, Any], of_schedule: dict[str, Any], words: str) -> None:
    from sonde.integrations import transformers as integration
    from sonde.integrations.transformers_schedule import schedule_batch
    from tests.integrations import hf_trainer

    trainer = hf_trainer.trainer_of(tmp_path, gradient_accumulation_steps=SMALLEST, **options)
    probe = integration.attach(trainer, on_error="raise", **BY_PIECES)
    with pytest.raises(ValueError, match=re.escape(words)):
        _begin(trainer, probe, schedule_batch, GROWS | of_schedule)


def test_a_training_that_fails_leaves_the_trainer_as_it_was(tmp_path: Path) -> None:
    """Also one that trains again, without the probe."""
    from transformers import TrainerCallback

    from sonde.integrations import transformers as integration
    from sonde.integrations.transformers_schedule import schedule_batch
    from tests.integrations import hf_trainer

    class Fails(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if args.gradient_accumulation_steps > SMALLEST:
                raise KeyboardInterrupt

    options: dict[str, Any] = {"gradient_accumulation_steps": SMALLEST, "num_train_epochs": 1}
    trainer = hf_trainer.trainer_of(tmp_path, train_dataset=hf_trainer.ragged_texts(128), **options)
    probe = integration.attach(trainer, on_error="raise", **BY_PIECES)
    schedule_batch(probe, **GROWS)
    trainer.add_callback(Fails())
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    assert trainer.args.gradient_accumulation_steps == SMALLEST
    trainer.pop_callback(Fails)
    probe.close()
    trainer.train()
    assert trainer.state.global_step == 16


def _begin(trainer: Any, probe: Any, schedule_batch: Any, options: dict[str, Any]) -> None:
    schedule_batch(probe, **options)
    trainer.train()


def test_a_training_that_resumes_is_refused(tmp_path: Path) -> None:
    from sonde.integrations import transformers as integration
    from sonde.integrations.transformers_schedule import schedule_batch
    from tests.integrations import hf_trainer

    options: dict[str, Any] = {"save_strategy": "steps", "save_steps": 2, "gradient_accumulation_steps": SMALLEST}
    hf_trainer.trainer_of(tmp_path, **options, max_steps=2).train()
    trainer = hf_trainer.trainer_of(tmp_path, **options)
    schedule_batch(integration.attach(trainer, on_error="raise", **BY_PIECES), **GROWS)
    with pytest.raises(ValueError, match="this training resumes, and transformers works out where the data go on"):
        trainer.train(resume_from_checkpoint=True)
