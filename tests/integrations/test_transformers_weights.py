"""How micro-batches of transformers' Trainer weigh in the loss, and how many samples they have."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("transformers", reason="needs transformers: pip install '.[transformers]'")
# transformers and what it imports cause various warnings.
pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("no_accelerate_state")]

from transformers import (  # noqa: E402
    BertConfig,
    BertForSequenceClassification,
    Trainer,
)

from sonde.integrations import transformers as integration  # noqa: E402
from sonde.integrations.transformers_batches import MicroBatches, is_divided_by, samples  # noqa: E402
from tests.integrations.hf_trainer import gpt2, padded, ragged_texts, record, trainer_of  # noqa: E402
from tests.integrations.plain_loop import BY_PIECES, Piece, plain_loop, same_numbers  # noqa: E402


class WeighsClasses(Trainer):
    """As in transformers' documentation of `compute_loss`: a mean over the micro-batch, whatever the window holds."""

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        labels = inputs.pop("labels")
        loss = nn.functional.cross_entropy(model(**inputs).logits, labels, torch.tensor([1.0, 3.0]))
        return (loss, None) if return_outputs else loss


class ScalesItself(WeighsClasses):
    """A mean over the micro-batch, which it divides by the number of micro-batches itself, and says so."""

    loss_is_scaled_for_ga = True

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        return super().compute_loss(*args, **kwargs) / 3


def classifier() -> BertForSequenceClassification:
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    no_dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return BertForSequenceClassification(BertConfig(vocab_size=29, num_labels=2, **sizes, **no_dropout))


def classified(rows: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
    batch = padded(rows)
    return batch | {"labels": batch["input_ids"].sum(1) % 2}


@pytest.mark.parametrize("kind", [Trainer, WeighsClasses, ScalesItself])
def test_a_loss_that_ignores_the_windows_tokens_is_not_weighed_by_them(tmp_path: Path, kind: Any) -> None:
    """BERT's own loss is a mean over the micro-batch, and the trainer adds these up. The last one has 2 rows."""
    options = {"kind": kind, "train_dataset": ragged_texts(42), "data_collator": classified, "max_grad_norm": 0.5}
    trainer = trainer_of(tmp_path, model=classifier(), **options)
    start, recorded = copy.deepcopy(trainer.model), record(trainer)
    probe = integration.attach(trainer, **BY_PIECES)
    trainer.train()
    assert recorded.windows[-1][-1][1] is not None  # the trainer counts items, and nobody uses them
    weight = 1 / 3 if kind is ScalesItself else 1.0
    windows = [[Piece(i, {"units": len(i["labels"])}, weight) for i, _ in window] for window in recorded.windows]
    assert [piece.counts["units"] for piece in windows[-1]] == [4, 2]

    def loss_of(model: Any, piece: Piece) -> Any:
        labels = piece.inputs["labels"]
        logits = model(**{name: value for name, value in piece.inputs.items() if name != "labels"}).logits
        weights = torch.tensor([1.0, 3.0]) if kind is not Trainer else None
        return piece.weight * nn.functional.cross_entropy(logits, labels, weights)

    assert same_numbers(probe.reading(), plain_loop(start, windows, loss_of))


class SumsRows(Trainer):
    """Its loss is a sum over rows, which no division shows."""

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        labels = inputs.pop("labels")
        loss = nn.functional.cross_entropy(model(**inputs).logits, labels, reduction="sum")
        return (loss, None) if return_outputs else loss


def test_the_user_weighs_micro_batches(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = {"kind": SumsRows, "train_dataset": ragged_texts(42), "data_collator": classified, "max_grad_norm": 0.5}
    trainer = trainer_of(tmp_path, model=classifier(), **options)
    start, recorded = copy.deepcopy(trainer.model), record(trainer)
    probe = integration.attach(trainer, weight=lambda batch: len(batch["labels"]), **(BY_PIECES | {"verbose": True}))
    trainer.train()
    assert "pieces weigh" not in (said := capsys.readouterr().err)
    assert "each piece weighs" not in said
    windows = [
        [Piece(i, {"units": len(i["labels"])}, float(len(i["labels"]))) for i, _ in window]
        for window in recorded.windows
    ]
    assert {piece.weight for window in windows for piece in window} == {2.0, 4.0}

    def loss_of(model: Any, piece: Piece) -> Any:
        labels = piece.inputs["labels"]
        logits = model(**{name: value for name, value in piece.inputs.items() if name != "labels"}).logits
        return nn.functional.cross_entropy(logits, labels, reduction="sum")

    assert same_numbers(probe.reading(), plain_loop(start, windows, loss_of))


def test_guard_a_division_by_the_windows_items_is_seen_in_the_graph() -> None:
    model, ids, n_items = gpt2(), torch.arange(12).view(2, 6), torch.tensor(44)
    over_window = model(input_ids=ids, labels=ids, num_items_in_batch=n_items).loss
    assert is_divided_by(over_window / 3, n_items)
    assert not is_divided_by(over_window, torch.tensor(43))
    assert not is_divided_by(model(input_ids=ids, labels=ids).loss / 3, n_items)
    compiled = torch.compile(model, backend="aot_eager")
    assert is_divided_by(compiled(input_ids=ids, labels=ids, num_items_in_batch=n_items).loss, n_items) is None


def test_a_compiled_loss_of_the_users_own_is_asked_about() -> None:
    """The graph shows nothing. transformers' own loss is known by its code."""
    compiled, batch, n_items = torch.compile(gpt2(), backend="aot_eager"), padded(ragged_texts(2)), torch.tensor(44)
    loss = compiled(**batch, num_items_in_batch=n_items).loss
    counts = MicroBatches(trainer_of("unused"), None).count(batch, loss, n_items)
    assert float(counts["weight"]) == pytest.approx(float(batch["labels"][:, 1:].ne(-100).sum()) / 44)
    of_the_user = trainer_of("unused", kind=WeighsClasses)
    with pytest.raises(ValueError, match="does not show whether samples weigh by their tokens"):
        MicroBatches(of_the_user, None).count(batch, loss, n_items)
    with pytest.raises(ValueError, match="does not show how micro-batches weigh: pass weight= to attach"):
        MicroBatches(of_the_user, lambda batch: 2).count(batch, loss, n_items)
    counts = MicroBatches(of_the_user, lambda batch: 2, lambda batch: 2.0).count(batch, loss, n_items)
    assert counts == {"units": 2, "weight": 2.0}


def test_equal_shares_leave_it_open_how_micro_batches_weigh() -> None:
    """A mean times 1/4 and a mean times its share of the tokens are the same there. The next batch tells."""
    batches, weight = MicroBatches(trainer_of("unused"), None), torch.ones(3, requires_grad=True)
    rows = {"input_ids": torch.ones(2, 6, dtype=torch.long), "labels": torch.ones(2, 6, dtype=torch.long)}
    equal, n_items = (weight * 2).mean() * (10 / 40), torch.tensor(40)
    assert float(batches.count(rows, equal, n_items)["weight"]) == 0.25
    assert batches.weighting is None
    ragged = rows | {"labels": torch.tensor([[1] * 6, [1, 1, -100, -100, -100, -100]])}
    assert "weight" not in batches.count(ragged, equal, n_items)
    assert "each piece weighs the same" in str(batches.weighting)
    by_share = MicroBatches(trainer_of("unused"), None)
    by_share.count(rows, equal, n_items)
    by_share.count(ragged, (weight * 2).mean() * (6 / 40), n_items)
    assert "weigh by their loss tokens" in str(by_share.weighting)


PACKED = {"input_ids": torch.zeros(1, 7, dtype=torch.long), "labels": torch.tensor([[-100, 3, 4, -100, 5, -100, -100]])}


@pytest.mark.parametrize(
    "borders",
    [
        {"position_ids": torch.tensor([[0, 1, 2, 0, 1, 0, 0]])},
        {"cu_seq_lens_q": torch.tensor([0, 3, 5, 6, 7], dtype=torch.int32)},
    ],
    ids=lambda borders: next(iter(borders)),
)
def test_packed_documents(borders: dict[str, Tensor]) -> None:
    """Three and two tokens, then padding, which position ids show as documents of one token."""
    n_units, tokens = samples(PACKED | borders, shifts=True)
    assert n_units == 2
    assert [round(float(n), 3) for n in tokens[tokens > 0.1]] == [2.0, 1.0]


def test_rows_of_padded_batches_are_not_taken_for_packed_documents() -> None:
    batch = padded(ragged_texts(3)) | {"position_ids": torch.zeros(3, 12, dtype=torch.long)}
    n_units, tokens = samples(batch, shifts=True)
    assert n_units == 3
    assert tokens.tolist() == batch["labels"][:, 1:].ne(-100).sum(1).tolist()
