"""How the samples of a micro-batch weigh in the losses of transformers' models, against exact weights in float64."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

transformers = pytest.importorskip("transformers", reason="needs transformers: pip install '.[transformers]'")
pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("no_accelerate_state")]

from transformers import Trainer  # noqa: E402

from sonde.integrations.transformers_batches import MicroBatches, is_over_tokens  # noqa: E402
from tests.integrations.hf_trainer import gpt2, padded, ragged_texts, trainer_of  # noqa: E402

N = 4
SMALL = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
Batch = dict[str, Tensor]


def bert(kind: str, **options: Any) -> nn.Module:
    return getattr(transformers, f"BertFor{kind}")(transformers.BertConfig(vocab_size=29, **SMALL, **options))


def speech(reduction: str) -> nn.Module:
    sizes = {"conv_dim": (8, 8), "conv_stride": (4, 2), "conv_kernel": (8, 4), "num_feat_extract_layers": 2}
    positions = {"num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2, "vocab_size": 11, "pad_token_id": 0}
    config = transformers.Wav2Vec2Config(**SMALL, **sizes, **positions, ctc_loss_reduction=reduction)
    return transformers.Wav2Vec2ForCTC(config)


def t5() -> nn.Module:
    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2, "vocab_size": 29}
    return transformers.T5ForConditionalGeneration(
        transformers.T5Config(**sizes, decoder_start_token_id=0, pad_token_id=0)
    )


def whisper() -> nn.Module:
    layers = {f"{part}_{size}": 1 for part in ("encoder", "decoder") for size in ("layers", "attention_heads")}
    widths = {
        "encoder_ffn_dim": 16,
        "decoder_ffn_dim": 16,
        "d_model": 16,
        "num_mel_bins": 5,
        "max_source_positions": 10,
    }
    tokens = {name: 0 for name in ("bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id")}
    config = transformers.WhisperConfig(vocab_size=29, max_target_positions=20, **layers, **widths, **tokens)
    return transformers.WhisperForConditionalGeneration(config)


def texts() -> Batch:
    return padded(ragged_texts(9)[5:])


def labelled(labels: Callable[[Batch], Tensor]) -> Callable[[], Batch]:
    def draw() -> Batch:
        batch = texts()
        return batch | {"labels": labels(batch)}

    return draw


def masked(batch: Batch) -> Tensor:
    every_third = torch.arange(batch["input_ids"].shape[1]) % 3 == 0
    return batch["input_ids"].where(every_third & batch["attention_mask"].bool(), -100)


def ragged_labels(n_classes: int) -> Tensor:
    labels = torch.randint(1, n_classes, (N, 9))
    return labels.where(torch.arange(9) < torch.tensor([[2], [9], [5], [3]]), -100)


def translations() -> Batch:
    """With what the decoder reads, as a collator gives it where the trainer takes the labels away."""
    labels = ragged_labels(29)
    return texts() | {"labels": labels, "decoder_input_ids": labels.clamp(min=0).roll(1, 1)}


CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[], Batch], dict[str, Any]]] = {
    "causal LM": (gpt2, texts, {}),
    "masked LM": (lambda: bert("MaskedLM"), labelled(masked), {}),
    "classification": (
        lambda: bert("SequenceClassification", num_labels=3),
        labelled(lambda b: torch.arange(N) % 3),
        {},
    ),
    "seq2seq, smoothed labels": (t5, translations, {"label_smoothing_factor": 0.1}),
    "speech, CTC, mean": (
        lambda: speech("mean"),
        lambda: {"input_values": torch.randn(N, 400).double(), "labels": ragged_labels(11)},
        {},
    ),
    "speech, seq2seq": (
        whisper,
        lambda: {"input_features": torch.randn(N, 5, 20).double(), "labels": ragged_labels(29)},
        {},
    ),
}
BY_TOKENS = {"causal LM", "masked LM", "seq2seq, smoothed labels", "speech, seq2seq"}


def gradient(trainer: Trainer, batch: Mapping[str, Any]) -> Tensor:
    trainer.model.zero_grad()
    trainer.compute_loss(trainer.model, dict(batch)).backward()
    return torch.cat([p.grad.flatten() for p in trainer.model.parameters() if p.grad is not None])


def exact_weights(trainer: Trainer, batch: Batch) -> Tensor:
    """The weights by which the gradients of single samples add up to the batch's, their sum 1."""
    whole = gradient(trainer, batch)
    each = torch.stack([gradient(trainer, {k: v[b : b + 1] for k, v in batch.items()}) for b in range(N)], 1)
    weights = torch.linalg.lstsq(each, whole[:, None], driver="gelsd").solution[:, 0]
    # Losses of transformers compute in fp32 in a float64 model too.
    torch.testing.assert_close(each @ weights, whole, rtol=0.0, atol=1e-6 * float(whole.abs().max()))
    return weights / weights.sum()


@pytest.mark.parametrize("case", CASES)
def test_weights_of_samples(case: str, tmp_path: Path) -> None:
    make, draw, options = CASES[case]
    torch.manual_seed(0)
    trainer = trainer_of(tmp_path, model=make().double(), **options)
    trainer.model.eval()  # no dropout, and no masks of speech
    batch = draw()
    exact = exact_weights(trainer, batch)
    assert (exact.std() > 0.02) == (case in BY_TOKENS)
    for n_items in (None, torch.tensor(97)):
        loss = trainer.compute_loss(trainer.model, dict(batch), num_items_in_batch=n_items)
        counts = MicroBatches(trainer, None).count(batch, loss, n_items)
        weights = counts.get("unit_weights", torch.ones(int(counts["units"]))).double()
        assert len(weights) == N
        torch.testing.assert_close(weights / weights.sum(), exact, rtol=0.0, atol=1e-6)


def rows_of_losses(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none").view(N, -1)


@pytest.mark.parametrize(
    ("loss_of", "is_over"),
    [
        (lambda logits, labels: rows_of_losses(logits, labels).sum() / 19, True),
        (lambda logits, labels: rows_of_losses(logits, labels).sum() / 97, True),
        (lambda logits, labels: rows_of_losses(logits, labels).sum() / 20, None),
        (lambda logits, labels: rows_of_losses(logits, labels).mean(), None),
        (lambda logits, labels: (rows_of_losses(logits, labels).sum(1) / labels.ne(-100).sum(1)).mean(), None),
        (lambda logits, labels: (logits.log_softmax(-1)[..., 0].mean(1)).mean(), None),
        (lambda logits, labels: F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum"), True),
        (lambda logits, labels: F.cross_entropy(logits.mT, labels), True),
        (lambda logits, labels: F.cross_entropy(logits[:, 0], labels[:, 0]), False),
        (lambda logits, labels: F.mse_loss(logits, torch.zeros_like(logits)), False),
    ],
)
def test_what_a_loss_shows(loss_of: Callable[[Tensor, Tensor], Tensor], is_over: bool | None) -> None:
    labels = ragged_labels(29)
    logits = torch.randn(N, 9, 29, requires_grad=True) * 1.0
    assert is_over_tokens(loss_of(logits, labels), N, labels.ne(-100).sum(), torch.tensor(97)) is is_over


class MeanOfRows(Trainer):
    """A mean over samples of each sample's mean, which no single operation shows."""

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        labels = inputs.pop("labels")
        each = rows_of_losses(model(**inputs).logits, labels).sum(1) / labels.ne(-100).sum(1)
        return (each.mean(), None) if return_outputs else each.mean()


def test_a_loss_that_does_not_show_the_weights_is_asked_about(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, kind=MeanOfRows)
    loss, batch = trainer.compute_loss(trainer.model, texts()), texts()
    with pytest.raises(ValueError, match=r"does not show whether samples .*: pass units= to attach"):
        MicroBatches(trainer, None).count(batch, loss, None)
    assert MicroBatches(trainer, lambda batch: len(batch["labels"])).count(batch, loss, None) == {"units": N}
