"""Gradient checkpointing during a measurement: the same numbers, and fewer activations kept."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from sonde.contrib.hold_entropy import HoldEntropy
from sonde.policy.entropy_change import EntropyChangeProbe
from sonde.policy.entropy_options import EntropyChangeOptions
from sonde.policy.scoring.rollouts import Rollouts
from sonde.policy.scoring.token_statistics import CausalLMStatistics

pytest.importorskip("transformers", reason="needs transformers: pip install '.[trl]'")


def model_of_transformers() -> Any:
    from tests.tiny_llama import tiny_llama

    torch.manual_seed(0)
    return tiny_llama(vocab_size=40, num_hidden_layers=3, num_attention_heads=2)


def checkpoints(model: Any) -> bool:
    return any(getattr(module, "gradient_checkpointing", False) for module in model.modules())


def responses(first: int) -> Rollouts:
    torch.manual_seed(first)
    ids = torch.randint(2, 40, (8, 24))
    prompt = torch.arange(first, first + 4).repeat_interleave(2)
    return Rollouts({"input_ids": ids}, torch.ones(8, 16, dtype=torch.bool), prompt, advantage=torch.randn(8))


def measured(model: Any) -> tuple[int, Any]:
    """Bytes of activations that the backwards keep, and the forecast."""
    total = 0

    def pack(t: Tensor) -> Tensor:
        nonlocal total
        total += 0 if t.is_leaf else t.nbytes
        return t

    def same(t: Tensor) -> Tensor:
        return t

    probe = EntropyChangeProbe(
        model,
        torch.optim.SGD(model.parameters(), lr=1e-3),
        EntropyChangeOptions(update="gradient"),
        token_statistics=CausalLMStatistics(),
    )
    with torch.autograd.graph.saved_tensors_hooks(pack, same):
        forecast = probe.forecast(responses(0), responses(100))
    return total, forecast


def test_checkpointing_gives_the_same_numbers_with_fewer_activations() -> None:
    """A training that checkpoints is measured in the same way, and goes on so."""
    model = model_of_transformers()
    plain_bytes, plain = measured(model)
    model.activation_checkpointing_enable({"use_reentrant": False})
    bytes_, forecast = measured(model)
    assert forecast.delta == pytest.approx(plain.delta, rel=1e-4)
    assert forecast.se == pytest.approx(plain.se, rel=1e-4)
    assert bytes_ < 0.4 * plain_bytes, (bytes_, plain_bytes)
    assert checkpoints(model)


@pytest.mark.parametrize("is_reentrant", [False, True])
def test_layers_that_a_training_checkpoints_are_scored_without_a_warning(is_reentrant: bool) -> None:
    """Reentrant checkpoints warn of passes without a backward."""
    found = []
    for is_on in (False, True):
        model = model_of_transformers()
        if is_on:
            model.activation_checkpointing_enable({"use_reentrant": is_reentrant})
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model(input_ids=torch.arange(8)[None]).logits.square().sum().backward()
        model.train()
        probe = EntropyChangeProbe(model, optimizer, EntropyChangeOptions())
        found.append(probe.forecast(responses(0), causes=True))
        assert checkpoints(model) == is_on
    plain, checkpointed = found
    assert (checkpointed.delta, checkpointed.first_order.delta) == (plain.delta, plain.first_order.delta)


def test_parameters_of_16_bits_are_widened_again_where_checkpointing_computes_again() -> None:
    """transformers checkpoints a layer's forward, without the layer's hooks."""
    found = []
    for is_on in (False, True):
        model = model_of_transformers().bfloat16()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        model(input_ids=torch.arange(8)[None]).logits.float().square().sum().backward()
        if is_on:
            model.activation_checkpointing_enable({"use_reentrant": False})
        found.append(EntropyChangeProbe(model, optimizer, beside=HoldEntropy()).forecast(responses(0), causes=True))
    plain, checkpointed = found
    assert checkpointed.precision == "float32"
    assert checkpointed.delta == plain.delta
    assert checkpointed.first_order.delta == pytest.approx(plain.first_order.delta, rel=1e-5)
    slopes = [f.coefficient_to_hold.change_per_unit for f in found]
    assert slopes[1] == pytest.approx(slopes[0], rel=1e-5)
