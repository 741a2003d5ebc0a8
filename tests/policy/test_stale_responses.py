"""Responses that are not the policy's own: weighted by the log-probabilities that their sampler reported."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from sonde.policy.scoring.rollouts import Rollouts
from sonde.policy.scoring.token_statistics import CausalLMStatistics
from tests.policy.entropy_scene import Scene, stale
from tests.small_policy import drawn, policy


def test_stale_responses_give_the_change_of_the_policy_as_it_is() -> None:
    """Beside responses of its own; without the weights, the entropy is that of the older policy's prefixes."""
    scene = Scene(lr=2e-3)
    probe = scene.probe(micro_batch_prompts=400)
    own = probe.forecast(drawn(scene.model, 0, 400, seed=1))
    forecast = probe.forecast(stale(scene.model, 400, 2))
    error = (own.entropy_se**2 + forecast.entropy_se**2) ** 0.5
    assert abs(forecast.entropy - own.entropy) < 3 * error
    assert abs(forecast.delta - own.delta) < 3 * (own.se**2 + forecast.se**2) ** 0.5
    assert forecast.own_policy is None
    assert forecast.is_valid, forecast.reason
    assert forecast.support.ess_fraction < own.support.ess_fraction
    unweighted = probe.forecast(dataclasses.replace(stale(scene.model, 400, 2), log_prob=None))
    assert unweighted.own_policy.z > 5
    assert "or by another policy, such as older weights" in unweighted.reason


def test_derivatives_of_stale_responses_are_those_of_the_policy_as_it_is() -> None:
    scene = Scene("sgd", lr=1e-3)
    probe = scene.probe(micro_batch_prompts=200)
    own = probe.forecast(drawn(scene.model, 0, 200, seed=1), scene.U, causes=True)
    old = probe.forecast(stale(scene.model, 200, 2), scene.U, causes=True)
    for a, b in ((own.first_order, old.first_order), (own.finite_step, old.finite_step)):
        assert abs(a.delta - b.delta) < 3 * (a.se**2 + b.se**2) ** 0.5
    error = (own.first_order.se**2 + old.first_order.se**2) ** 0.5
    assert abs(own.causes.batch - old.causes.batch) < 3 * error
    assert old.causes.explained == pytest.approx(1.0, rel=2e-2)
    # Both at the same prefixes, with the same weights; 2 % allow for the step's bend.
    assert old.fixed_prefixes.linear_over_true == pytest.approx(1.0, abs=0.02)


def test_derivatives_of_the_entropy_of_sequences_need_the_policys_own_responses() -> None:
    scene = Scene()
    with pytest.raises(ValueError, match="and causes=True of objective='sequence' needs responses of the policy as it"):
        scene.probe(objective="sequence").forecast(stale(scene.model, 8, 2), scene.U, causes=True)


def test_each_token_may_have_its_own_temperature() -> None:
    """Half of the responses sampled at 0.7: all together have the mean of the two changes."""
    scene = Scene()
    rows = torch.arange(len(scene.E))
    cold = (rows // 4 % 2 == 0).nonzero()[:, 0]
    temperature = torch.ones(len(scene.E), scene.E.mask.shape[1])
    temperature[cold] = 0.7
    mixed = dataclasses.replace(scene.E, temperature=temperature)
    s, h = CausalLMStatistics()(scene.model, mixed)
    s_cold, h_cold = CausalLMStatistics()(scene.model, dataclasses.replace(scene.E.rows(cold), temperature=0.7))
    torch.testing.assert_close(s[cold], s_cold)
    torch.testing.assert_close(h[cold], h_cold)
    per_response = dataclasses.replace(scene.E, temperature=temperature[:, 0])
    torch.testing.assert_close(CausalLMStatistics()(scene.model, per_response)[0], s)
    assert scene.probe().forecast(mixed).delta == scene.probe().forecast(per_response).delta


def test_packed_rows_are_scored_as_padded_ones() -> None:
    """By a model that heeds padding, as those of transformers do."""
    transformers = pytest.importorskip("transformers", reason="needs transformers: pip install '.[trl]'")
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=7, num_key_value_heads=2, **sizes)).eval()
    E = drawn(policy(), 0, 8, seed=1)
    lengths = E.mask.sum(1).tolist()
    attention = torch.cat([torch.ones(len(E), 2, dtype=torch.bool), E.mask], 1).long()
    padded = dataclasses.replace(E, inputs={**E.inputs, "attention_mask": attention})
    ids = torch.cat([E.inputs["input_ids"][i, : 2 + n] for i, n in enumerate(lengths)])
    sampled = torch.cat([torch.tensor([False, False, *[True] * n]) for n in lengths])
    positions = torch.cat([torch.arange(2 + n) for n in lengths])
    starts = torch.tensor([0, *(torch.tensor(lengths) + 2).cumsum(0)])
    by_bounds = Rollouts.from_packed({"input_ids": ids[None]}, sampled[None], E.prompt, cu_seqlens=starts)
    by_positions = Rollouts.from_packed(
        {"input_ids": ids, "position_ids": positions},
        sampled,
        E.prompt,
        advantage=E.advantage,
        log_prob=-1.0 * positions,
    )
    assert torch.equal(by_positions.advantage, E.advantage)
    assert by_positions.log_prob[by_positions.mask].max() == -2.0  # the first sampled token is the third
    with torch.no_grad():
        expected = CausalLMStatistics()(model, padded)
        for packed in (by_bounds, by_positions):
            for found, value in zip(CausalLMStatistics()(model, packed), expected, strict=True):
                torch.testing.assert_close(found[packed.mask], value[E.mask])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"inputs": {"input_ids": torch.zeros(7)}}, "nothing says where packed responses begin"),
        ({"inputs": {"ids": torch.zeros(7)}}, "packed rows need 'input_ids'"),
        ({"inputs": {"input_ids": [1, 2]}}, r"input_ids of packed rows must be a tensor, .* got a list"),
        ({"inputs": [1, 2]}, "inputs must map names to tensors, got a list"),
        ({"mask": [0, 1]}, r"mask of packed rows must be a tensor, \[7\] or .* got a list"),
        ({"log_prob": [0.1]}, r"log_prob of packed rows must be a tensor, \[7\] or .* got a list"),
        (
            {"weight": torch.ones(2)},
            r"weight of packed rows must be a tensor, \[7\] or \[1, 7\], as input_ids, got \[2\]",
        ),
        ({"terms": {"KL": 0.1}}, r"terms must map names to tensors, \[tokens\], got"),
        ({"advantage": [0.1]}, r"advantage must be a tensor, .* got a list"),
        ({"cu_seqlens": [0, 4, 7]}, r"cu_seqlens must be a tensor, \[responses \+ 1\], got a list"),
        (
            {"cu_seqlens": torch.tensor([0.0, 4, 7])},
            r"cu_seqlens must be whole numbers, .* of torch\.float32",
        ),
        ({"cu_seqlens": torch.tensor(7)}, r"cu_seqlens must be whole numbers, \[responses \+ 1\], got \[\]"),
        ({"temperature": None}, "temperature must be a number or a tensor, got None"),
        ({"temperature": torch.ones(5)}, r"temperature of packed rows must be a tensor, \[7\] or \[1, 7\]"),
        ({"cu_seqlens": torch.tensor([0, 4, 8])}, r"must rise from 0 to the row's 7 tokens, got \[0, 4, 8\]"),
        ({"prompt": torch.tensor([3])}, "the row holds 2 responses, and prompt 1 numbers"),
        ({"mask": torch.tensor([1, 0, 1, 1, 0, 0, 1])}, "response 0 of the row has no token before its first"),
        ({"mask": torch.tensor([0, 0, 1, 1, 0, 0, 0])}, "response 1 of the row has no sampled token"),
        ({"mask": torch.zeros(6)}, r"mask of packed rows must be a tensor, \[7\] or \[1, 7\], as input_ids, got \[6\]"),
    ],
)
def test_packed_rows_that_cannot_be_cut(changes: dict[str, object], message: str) -> None:
    given: dict[str, object] = {
        "inputs": {"input_ids": torch.arange(7)},
        "mask": torch.tensor([0, 0, 1, 1, 0, 0, 1]),
        "prompt": torch.tensor([3, 3]),
        "cu_seqlens": None if "inputs" in changes else torch.tensor([0, 4, 7]),
    } | changes
    with pytest.raises(ValueError, match=message):
        Rollouts.from_packed(**given)  # type: ignore[arg-type]


def test_packed_rows_carry_what_each_token_has_and_leave_out_their_padding() -> None:
    """As a collator pads the row's end, with positions of 0."""
    made = Rollouts.from_packed(
        {
            "input_ids": torch.tensor([5, 6, 7, 2, 5, 6, 2, 0, 0]),
            "position_ids": torch.tensor([0, 1, 2, 3, 0, 1, 2, 0, 0]),
            "expert": torch.arange(9),
        },
        torch.tensor([0, 0, 1, 1, 0, 0, 1, 0, 0]),
        torch.tensor([3, 3]),
        temperature=torch.tensor([0.0, 0, 1, 0.5, 0, 0, 0.7, 0, 0]),
    )
    assert made.inputs["input_ids"].tolist() == [[5, 6, 7, 2], [5, 6, 2, 0]]
    assert made.inputs["expert"].tolist() == [[0, 1, 2, 3], [4, 5, 6, 0]]
    assert made.per_token("temperature")[made.mask].tolist() == pytest.approx([1.0, 0.5, 0.7])
    by_response = Rollouts.from_packed(
        {"input_ids": torch.tensor([5, 6, 7, 2, 5, 6, 2])},
        torch.tensor([0, 0, 1, 1, 0, 0, 1]),
        torch.tensor([3, 3]),
        cu_seqlens=torch.tensor([0, 4, 7], dtype=torch.int32),
        temperature=torch.tensor([1.0, 0.5]),
        weight=None,
        terms=None,
    )
    assert by_response.per_token("temperature").tolist() == [[1.0, 1.0], [0.5, 0.5]]
