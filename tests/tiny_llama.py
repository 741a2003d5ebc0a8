"""A Llama of random weights, as transformers makes it; import it where transformers is installed."""

from __future__ import annotations

from typing import Any

from transformers import LlamaConfig, LlamaForCausalLM


def tiny_llama(**options: Any) -> Any:
    """Two layers of width 32 for 48 tokens; further or other options of its configuration."""
    usual = {"vocab_size": 48, "hidden_size": 32, "intermediate_size": 64, "max_position_embeddings": 64}
    usual |= {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    return LlamaForCausalLM(LlamaConfig(**(usual | options)))
