"""Usual models need no question: in 50 of 51, the batch is proved to be the dim that it is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from sonde.batch_size.proved_units import Rule, prove, tensors_given

N, T = 6, 12
SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
SMALL_LM = SMALL | {"vocab_size": 64}
GROUPED = SMALL_LM | {"num_key_value_heads": 2, "pad_token_id": 0}


def ids(*shape: int, below: int = 60) -> Tensor:
    return torch.randint(2, below, shape)


def made(config: str, model: str, **options: Any) -> nn.Module:
    built: nn.Module = getattr(transformers, model)(getattr(transformers, config)(**options))
    return built.train()


def tokens(*, labels: Tensor | None = None) -> dict[str, Any]:
    mask = torch.ones(N, T, dtype=torch.long)
    return {"input_ids": ids(N, T), "attention_mask": mask, "labels": ids(N, T) if labels is None else labels}


def images(size: int, **more: Any) -> dict[str, Any]:
    return {"pixel_values": torch.randn(N, 3, size, size), "labels": ids(N) % 2} | more


CAUSAL = {
    **{name: GROUPED for name in ("Llama", "Qwen2", "Mistral", "Phi", "Olmo", "StableLm", "Cohere", "Starcoder2")},
    **{name: GROUPED | {"head_dim": 16} for name in ("Gemma", "Gemma2", "Qwen3", "Glm")},
    "Granite": GROUPED,
    "GPTNeoX": SMALL_LM,
    "OPT": {"vocab_size": 64, "hidden_size": 32, "ffn_dim": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    | {"word_embed_proj_dim": 32},
    "Bloom": {"vocab_size": 64, "hidden_size": 32, "n_layer": 2, "n_head": 2},
    "Mixtral": GROUPED | {"num_local_experts": 4, "output_router_logits": True},
    "Qwen2Moe": GROUPED
    | {"num_experts": 4, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32}
    | {"output_router_logits": True},
    "Mamba": {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 4},
    "Rwkv": {"vocab_size": 64, "hidden_size": 32, "attention_hidden_size": 32, "num_hidden_layers": 2}
    | {"context_length": 16},
}
MASKED = {
    "Bert": SMALL_LM,
    "DistilBert": {"vocab_size": 64, "dim": 32, "hidden_dim": 64, "n_layers": 2, "n_heads": 2},
    "DebertaV2": SMALL_LM,
    "Electra": SMALL_LM | {"embedding_size": 32},
    "Albert": SMALL_LM | {"embedding_size": 16},
    "ModernBert": SMALL_LM
    | {"pad_token_id": 0, "cls_token_id": 1, "sep_token_id": 1, "bos_token_id": 1, "eos_token_id": 1},
    "Funnel": {"vocab_size": 64, "d_model": 32, "n_head": 2, "d_head": 16, "d_inner": 64, "block_sizes": [1, 1]}
    | {"num_decoder_layers": 1},
}
SEQ2SEQ = {"vocab_size": 64, "d_model": 32}
VIT = SMALL | {"image_size": 16, "patch_size": 4}
WHISPER = (
    SEQ2SEQ
    | {"encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2, "decoder_attention_heads": 2}
    | {"encoder_ffn_dim": 32, "decoder_ffn_dim": 32, "num_mel_bins": 8, "max_source_positions": 20}
    | {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
    | {"suppress_tokens": None, "begin_suppress_tokens": None}
)
CLIP = {
    "text_config": SMALL_LM | {"eos_token_id": 63, "bos_token_id": 1, "pad_token_id": 0},
    "vision_config": VIT,
    "projection_dim": 16,
}


class LastStep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.head = nn.GRU(8, 8), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.rnn(x)[0][-1])  # type: ignore[no-any-return]


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Any]]] = {
    **{
        name: (lambda name=name, o=options: made(f"{name}Config", f"{name}ForCausalLM", **o), tokens)  # type: ignore[misc]
        for name, options in CAUSAL.items()
    },
    **{
        name: (lambda name=name, o=options: made(f"{name}Config", f"{name}ForMaskedLM", **o), tokens)  # type: ignore[misc]
        for name, options in MASKED.items()
    },
    "GPT2": (
        lambda: made("GPT2Config", "GPT2LMHeadModel", vocab_size=64, n_embd=32, n_layer=2, n_head=2),
        tokens,
    ),
    "XLNet": (
        lambda: made("XLNetConfig", "XLNetLMHeadModel", vocab_size=64, d_model=32, n_layer=2, n_head=2, d_inner=64),
        tokens,
    ),
    "a reward model": (
        lambda: made("LlamaConfig", "LlamaForSequenceClassification", **GROUPED, num_labels=1),
        lambda: {"input_ids": ids(N, T), "attention_mask": torch.ones(N, T, dtype=torch.long)},
    ),
    "classes": (
        lambda: made("BertConfig", "BertForSequenceClassification", **SMALL_LM),
        lambda: tokens(labels=ids(N) % 2),
    ),
    "choices": (
        lambda: made("BertConfig", "BertForMultipleChoice", **SMALL_LM),
        lambda: {"input_ids": ids(N, 4, T), "labels": ids(N) % 4},
    ),
    "answers": (
        lambda: made("BertConfig", "BertForQuestionAnswering", **SMALL_LM),
        lambda: {"input_ids": ids(N, T), "start_positions": ids(N, below=9), "end_positions": ids(N, below=9)},
    ),
    "tags": (
        lambda: made("RobertaConfig", "RobertaForTokenClassification", **SMALL_LM, num_labels=3),
        lambda: tokens(labels=ids(N, T) % 3),
    ),
    "T5": (
        lambda: made(
            *("T5Config", "T5ForConditionalGeneration"),
            **SEQ2SEQ | {"d_kv": 16, "d_ff": 64, "num_layers": 2, "num_heads": 2, "decoder_start_token_id": 0},
        ),
        lambda: {"input_ids": ids(N, T), "labels": ids(N, T - 3)},
    ),
    "Whisper": (
        lambda: made("WhisperConfig", "WhisperForConditionalGeneration", **WHISPER),
        lambda: {"input_features": torch.randn(N, 8, 40), "labels": ids(N, T)},
    ),
    "Wav2Vec2": (
        lambda: made(
            *("Wav2Vec2Config", "Wav2Vec2ForCTC"),
            **SMALL_LM
            | {"conv_dim": (16, 16), "conv_stride": (5, 4), "conv_kernel": (10, 8), "num_feat_extract_layers": 2}
            | {"num_conv_pos_embeddings": 8, "num_conv_pos_embedding_groups": 2},
        ),
        lambda: {"input_values": torch.randn(N, 2000), "labels": ids(N, 9)},
    ),
    "ViT": (lambda: made("ViTConfig", "ViTForImageClassification", **VIT), lambda: images(16)),
    "ResNet": (
        lambda: made(
            "ResNetConfig", "ResNetForImageClassification", embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1]
        ),
        lambda: images(32),
    ),
    "ConvNext": (
        lambda: made(
            "ConvNextConfig", "ConvNextForImageClassification", hidden_sizes=[8, 16], depths=[1, 1], num_stages=2
        ),
        lambda: images(32),
    ),
    "Swin": (
        lambda: made(
            *("SwinConfig", "SwinForImageClassification"),
            **{"image_size": 32, "embed_dim": 16, "depths": [2, 2], "num_heads": [2, 2], "window_size": 4},
        ),
        lambda: images(32),
    ),
    "Segformer": (
        lambda: made(
            *("SegformerConfig", "SegformerForSemanticSegmentation"),
            **{"hidden_sizes": [8, 16, 16, 16], "depths": [1] * 4, "num_attention_heads": [1, 2, 2, 2]},
            **{"decoder_hidden_size": 16, "num_labels": 3},
        ),
        lambda: images(64, labels=ids(N, 64, 64) % 3),
    ),
    "a masked autoencoder": (
        lambda: made(
            *("ViTMAEConfig", "ViTMAEForPreTraining"),
            **VIT | {"decoder_hidden_size": 32, "decoder_num_hidden_layers": 1, "decoder_num_attention_heads": 2},
            decoder_intermediate_size=32,
        ),
        lambda: {"pixel_values": torch.randn(N, 3, 16, 16)},
    ),
    "CLIP": (
        lambda: made("CLIPConfig", "CLIPModel", **CLIP),
        lambda: {"input_ids": ids(N, T), "pixel_values": torch.randn(N, 3, 16, 16), "return_loss": True},
    ),
    "time series": (
        lambda: made(
            *("PatchTSTConfig", "PatchTSTForPrediction"),
            **{"num_input_channels": 3, "context_length": 24, "patch_length": 4, "patch_stride": 4, "d_model": 16},
            **{"prediction_length": 4, "num_hidden_layers": 1, "num_attention_heads": 2, "ffn_dim": 16},
        ),
        lambda: {"past_values": torch.randn(N, 24, 3), "future_values": torch.randn(N, 4, 3)},
    ),
    "a perceptron": (
        lambda: nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3)),
        lambda: (torch.randn(N, 8),),
    ),
    "a U-Net": (
        lambda: nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.ConvTranspose2d(8, 3, 3, padding=1)),
        lambda: (torch.randn(N, 3, 16, 16),),
    ),
    "signals": (
        lambda: nn.Sequential(nn.Conv1d(3, 8, 5), nn.ReLU(), nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(8, 2)),
        lambda: (torch.randn(N, 3, 40),),
    ),
    "videos": (
        lambda: nn.Sequential(
            *(nn.Conv3d(3, 4, 3), nn.BatchNorm3d(4), nn.ReLU()),
            *(nn.AdaptiveAvgPool3d(1), nn.Flatten(), nn.Linear(4, 2)),
        ),
        lambda: (torch.randn(N, 3, 6, 9, 9),),
    ),
    "an LSTM": (lambda: nn.LSTM(8, 8, batch_first=True), lambda: (torch.randn(N, T, 8),)),
    "the last step of a GRU, time first": (LastStep, lambda: (torch.randn(T, N, 8),)),
}


@pytest.mark.parametrize("name", MODELS)
def test_the_units_of_usual_models_are_proved(name: str) -> None:
    torch.manual_seed(0)
    make, draw = MODELS[name]
    model, given = make(), draw()
    args, kwargs = ((), given) if isinstance(given, dict) else (given, {})
    with torch.no_grad():
        output = model(*args, **kwargs)
    rule = prove(model, args, kwargs)
    if name == "choices":  # before it has learnt, its loss hardly shows that choices compete
        assert isinstance(rule, str)
        return
    assert isinstance(rule, Rule), rule
    assert rule.count(tensors_given(args, kwargs), output).n == N
