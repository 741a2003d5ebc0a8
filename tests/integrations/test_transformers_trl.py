"""TRL's SFTTrainer and DPOTrainer, measured by the integration of transformers, against plain loops."""

from __future__ import annotations

import copy
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("trl", reason="needs trl: pip install '.[trl]'")
# TRL and what it imports cause various warnings.
pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("no_accelerate_state"), pytest.mark.slow]

from datasets import Dataset  # noqa: E402
from trl import KTOConfig, KTOTrainer  # noqa: E402

import sonde  # noqa: E402
from sonde.demos.arithmetic import task  # noqa: E402
from sonde.integrations import transformers as integration  # noqa: E402
from tests.integrations.grpo_trainer import trainer_of as grpo_trainer_of  # noqa: E402
from tests.integrations.hf_trainer import record  # noqa: E402
from tests.integrations.plain_loop import BY_PIECES, Piece, plain_loop, same_numbers, weights  # noqa: E402
from tests.integrations.trl_trainers import SUMS, dpo, options_of, reward, sft  # noqa: E402


def both(trainer_of: Any, folder: Path, **options: Any) -> tuple[Any, Any, Any, Any]:
    """Train without sonde and with it: the weights are the same. The model at the beginning, what it was trained on,
    the probe, and another trainer that computes the loss."""
    plain, trainer = trainer_of(folder, **options), trainer_of(folder, **options)
    plain.train()
    start, recorded = copy.deepcopy(trainer.model), record(trainer)
    probe = integration.attach(trainer, on_error="raise", **BY_PIECES)
    trainer.train()
    assert torch.equal(weights(plain.model), weights(trainer.model))
    return start, recorded.windows, probe, plain


def of_documents(labels: list[int], lengths: list[int]) -> list[int]:
    """Loss tokens of each packed document, the first of which is predicted by nothing."""
    places = [sum(lengths[:k]) for k in range(len(lengths) + 1)]
    return [sum(label != -100 for label in labels[a + 1 : b]) for a, b in itertools.pairwise(places)]


@pytest.mark.parametrize(
    "options",
    [{}, {"lora": True}, {"packing": True, "max_length": 24, "padding_free": True}],
    ids=["padded", "lora", "packed"],
)
def test_supervised_fine_tuning(tmp_path: Path, options: dict[str, Any]) -> None:
    start, recorded, probe, other = both(sft, tmp_path, **options)
    windows = []
    for window in recorded:
        pieces = []
        for inputs, n_items in window:
            if "packing" in options:
                (labels,), borders = inputs["labels"].tolist(), inputs["cu_seq_lens_q"].tolist()
                assert len(borders) > 5  # several documents in one row
                lengths = [b - a for a, b in itertools.pairwise(borders)]
                tokens = [n for n in of_documents(labels, lengths) if n]
            else:
                tokens = [sum(label != -100 for label in row[1:]) for row in inputs["labels"].tolist()]
            pieces.append(Piece(inputs, {"unit_weights": tokens}, sum(tokens) / n_items, torch.tensor(n_items)))
        windows.append(pieces)

    def loss_of(model: Any, piece: Piece) -> Any:
        return other.compute_loss(model, dict(piece.inputs), num_items_in_batch=piece.n_items)

    reading = probe.reading()
    assert (reading.windows, reading.unit) == (8, "sequences")
    assert same_numbers(reading, plain_loop(start, windows, loss_of))


@pytest.mark.parametrize("trainer_of", [dpo, reward])
def test_preferences_are_counted_in_pairs(tmp_path: Path, trainer_of: Any) -> None:
    start, recorded, probe, other = both(trainer_of, tmp_path)
    windows = [
        [Piece(inputs, {"units": len(inputs["input_ids"]) // 2}, 1 / len(window)) for inputs, _ in window]
        for window in recorded
    ]
    assert windows[0][0].counts["units"] == 4

    def loss_of(model: Any, piece: Piece) -> Any:
        return other.compute_loss(model, dict(piece.inputs)) * piece.weight

    reading = probe.reading()
    assert (reading.windows, reading.unit) == (8, "pairs")
    assert same_numbers(reading, plain_loop(start, windows, loss_of))


def test_trainers_whose_samples_depend_on_each_other(tmp_path: Path) -> None:
    grpo = grpo_trainer_of(tmp_path)
    with pytest.raises(ValueError, match=r"measured in prompts: use sonde\.integrations\.trl\.attach\(trainer, noise_"):
        integration.attach(grpo)
    sonde.integrations.trl.attach(grpo, None, noise_every=10).close()


def test_a_trainer_of_trl_whose_samples_are_not_known_needs_units(tmp_path: Path) -> None:
    rows = [{"prompt": sum_, "completion": right, "label": True} for sum_, right, _ in SUMS]
    kto = KTOTrainer(
        model=task.model(),
        ref_model=task.model(),
        args=KTOConfig(**options_of(tmp_path)),
        train_dataset=Dataset.from_list(rows),
        processing_class=task.tokenizer(),
    )
    with pytest.raises(ValueError, match=r"samples of TRL's KTOTrainer are not known: pass units="):
        integration.attach(kto)
    assert integration.attach(kto, unit="answers", units=lambda batch: 4).reading() is None
