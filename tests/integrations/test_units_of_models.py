"""Which dim is the batch in calls of transformers' models: counted, or asked."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

transformers = pytest.importorskip("transformers", reason="needs transformers: pip install '.[transformers]'")
pytestmark = pytest.mark.filterwarnings("ignore")

import sonde  # noqa: E402

N, T = 3, 12
ASKED = None
SMALL = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}


def ids(*shape: int) -> Tensor:
    return torch.randint(5, 29, shape or (N, T))


def of(name: str, config: str, **options: Any) -> Callable[[], nn.Module]:
    return lambda: getattr(transformers, name)(getattr(transformers, config)(**options))


def text(**others: Any) -> dict[str, Any]:
    tokens = ids()
    return {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "labels": tokens} | others


def pictured_text() -> dict[str, Any]:
    """Two images of 16 patches in each text, which become 4 tokens each; pixels have a row for each patch."""
    tokens = ids(N, T)
    tokens[:, 1:5] = tokens[:, 6:10] = 3
    kinds = (tokens == 3).long()
    return {
        "pixel_values": torch.randn(2 * N * 16, 3 * 2 * 4 * 4),
        "image_grid_thw": torch.tensor([[1, 4, 4]]).expand(2 * N, 3),
        "input_ids": tokens,
        "attention_mask": torch.ones_like(tokens),
        "mm_token_type_ids": kinds,
        "labels": tokens,
    }


def qwen_vl() -> nn.Module:
    text_config = {
        **SMALL,
        "num_key_value_heads": 2,
        "vocab_size": 29,
        "rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 1e4},
    }
    vision = {
        "depth": 1,
        "embed_dim": 16,
        "hidden_size": 16,
        "num_heads": 2,
        "patch_size": 4,
        "in_channels": 3,
        "mlp_ratio": 1,
    }
    config = transformers.Qwen2VLConfig(
        text_config=text_config, vision_config=vision, image_token_id=3, video_token_id=4, vision_start_token_id=1
    )
    return transformers.Qwen2VLForConditionalGeneration(config)


llama = of("LlamaForCausalLM", "LlamaConfig", **SMALL, vocab_size=29)
speech = of(
    "Wav2Vec2ForCTC", "Wav2Vec2Config", **SMALL, vocab_size=29, conv_dim=(8, 8), conv_stride=(4, 2), conv_kernel=(8, 4),
    num_feat_extract_layers=2, num_conv_pos_embeddings=4, num_conv_pos_embedding_groups=2, mask_time_prob=0.0,
)  # fmt: skip
clip = of(
    "CLIPModel", "CLIPConfig", text_config={**SMALL, "vocab_size": 29, "eos_token_id": 2},
    vision_config={**SMALL, "image_size": 8, "patch_size": 4},
)  # fmt: skip

CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[], dict[str, Any]], int | None]] = {
    "Llama": (llama, text, N),
    "Llama, positions that rows share": (llama, lambda: text(position_ids=torch.arange(T)[None]), N),
    "Llama, a causal mask": (
        llama,
        lambda: text(attention_mask=torch.zeros(N, 1, T, T).masked_fill(torch.ones(T, T).triu(1) > 0, -1e9)),
        N,
    ),
    "packed, with positions": (
        llama,
        lambda: {"input_ids": ids(1, T), "position_ids": torch.arange(T // 2).repeat(2)[None], "labels": ids(1, T)},
        1,
    ),
    "packed, with borders": (
        llama,
        lambda: {
            "input_ids": ids(1, T),
            "labels": ids(1, T),
            "cu_seq_lens_q": torch.tensor([0, 5, T], dtype=torch.int32),
            "cu_seq_lens_k": torch.tensor([0, 5, T], dtype=torch.int32),
            "max_length_q": 7,
            "max_length_k": 7,
        },
        1,  # this attention does not heed the borders, so the row is one unit
    ),
    "CLIP": (clip, lambda: {"input_ids": ids(), "pixel_values": torch.randn(N, 3, 8, 8), "return_loss": True}, N),
    "Wav2Vec2": (speech, lambda: {"input_values": torch.randn(N, 400), "labels": ids(N, 7)}, N),
    "Qwen2-VL, patches of images first": (qwen_vl, pictured_text, N),
}


@pytest.mark.parametrize("case", CASES)
def test_units_of_calls(case: str) -> None:
    make, draw, expected = CASES[case]
    torch.manual_seed(0)
    model = make()
    with sonde.attach(
        model, unit="rows", units_per_piece="first dim", per_example="never", every=1, verbose=False
    ) as probe:
        for _ in range(2):
            output = model(**draw())
            loss = output[0] if isinstance(output, tuple) else output.get("loss")
            (output.logits.square().mean() if loss is None else loss).backward()
        probe.step()
        reading, alerts = probe.reading(), dict(probe.alerts)
    if expected is ASKED:
        assert reading.windows == 0
        assert "cu_seq_lens_q int32 [3]" in alerts["units"]
    else:
        assert (reading.units_per_window, reading.dropped) == (2 * expected, {}), alerts
        assert "units" not in alerts
