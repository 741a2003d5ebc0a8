"""Packed rows give the scores of padded ones, by a model of transformers that tells sequences by their positions."""

from __future__ import annotations

import contextlib
import dataclasses
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from sonde.policy.entropy_change import EntropyChangeProbe
from sonde.policy.entropy_options import EntropyChangeOptions
from sonde.policy.policy_entropy import PolicyEntropyProbe
from sonde.policy.prompt_noise import PromptNoiseProbe
from sonde.policy.scoring import packed_statistics
from sonde.policy.scoring.packed_statistics import PackedLMStatistics
from sonde.policy.scoring.rollouts import Rollouts
from sonde.policy.scoring.token_statistics import CausalLMStatistics, statistics_of_logits
from tests.ranks import Ranks
from tests.small_policy import drawn, policy

transformers = pytest.importorskip("transformers", reason="needs transformers: pip install '.[trl]'")


def llama() -> Any:
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = transformers.LlamaForCausalLM(
            transformers.LlamaConfig(vocab_size=7, num_key_value_heads=2, **sizes)
        ).eval()
        with torch.no_grad():
            model.lm_head.weight.mul_(20.0)
    return model


def padded(first: int, n: int, *, on_the_left: bool) -> Rollouts:
    """Prompts of 1 or 2 tokens, padded before them or behind the response."""
    made = drawn(policy(), first, n, seed=1)
    lengths = made.mask.sum(1)
    rows = [made.inputs["input_ids"][i, i % 2 : 2 + n] for i, n in enumerate(lengths.tolist())]
    width = max(map(len, rows))

    def pad(row: Tensor) -> Tensor:
        missing = width - len(row)
        return torch.nn.functional.pad(row, (missing, 0) if on_the_left else (0, missing))

    ids, attention = (torch.stack([pad(part(r)) for r in rows]) for part in (lambda r: r, torch.ones_like))
    sampled = torch.stack([pad(torch.arange(len(r)) >= len(r) - n) for r, n in zip(rows, lengths, strict=True)])
    return dataclasses.replace(
        made, inputs={"input_ids": ids, "attention_mask": attention}, mask=sampled[:, 1:], advantage=made.advantage
    )


@pytest.mark.parametrize("on_the_left", [True, False])
def test_scores_are_those_of_padded_rows(on_the_left: bool) -> None:
    model, rollouts = llama(), padded(0, 8, on_the_left=on_the_left)
    temperature = 0.5 + torch.rand(rollouts.mask.shape, generator=torch.Generator().manual_seed(0))
    for given in (rollouts, dataclasses.replace(rollouts, temperature=temperature)):
        with torch.no_grad():
            expected, found = CausalLMStatistics()(model, given), PackedLMStatistics()(model, given)
        for a, b in zip(expected, found, strict=True):
            torch.testing.assert_close(b[given.mask], a[given.mask], rtol=1e-4, atol=1e-4)


def test_a_forecast_is_that_of_padded_rows() -> None:
    found = []
    for statistics in (CausalLMStatistics(), PackedLMStatistics()):
        model = llama()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model(input_ids=torch.tensor([[1, 2, 3, 4]])).logits.logsumexp(-1).sum().backward()
        probe = EntropyChangeProbe(
            model, optimizer, EntropyChangeOptions(first_order=True), token_statistics=statistics
        )
        found.append(probe.forecast(padded(0, 16, on_the_left=True)))
    plain, packed = found
    assert packed.delta == pytest.approx(plain.delta, rel=1e-3)
    assert packed.se == pytest.approx(plain.se, rel=1e-3)
    assert packed.first_order.delta == pytest.approx(plain.first_order.delta, rel=1e-2)


class Flat(nn.Module):
    """As a trainer's model of packed rows: it is told where sequences begin, and may score them itself."""

    def __init__(self, *, scores: bool) -> None:
        super().__init__()
        self.model, self.scores = llama(), scores

    def forward(self, ids: Tensor, positions: Tensor, cu_seqlens: Tensor) -> Any:
        assert [int(p) for p in positions[cu_seqlens[:-1].long()]] == [0] * (len(cu_seqlens) - 1)
        logits = self.model(input_ids=ids[None], position_ids=positions[None], use_cache=False).logits[0]
        if not self.scores:
            return logits
        s, h = statistics_of_logits(logits[None, :-1], ids[None, 1:])
        return tuple(torch.nn.functional.pad(part, (0, 1)) for part in (s, h))


@pytest.mark.parametrize("scores", [False, True])
def test_a_model_of_flat_tokens_gives_logits_or_its_own_scores(scores: bool) -> None:
    rollouts = padded(0, 8, on_the_left=True)
    statistics = PackedLMStatistics(lambda model, ids, positions, cu: model(ids[0], positions[0], cu))
    with torch.no_grad():
        found, expected = statistics(Flat(scores=scores), rollouts), CausalLMStatistics()(llama(), rollouts)
    for a, b in zip(expected, found, strict=True):
        torch.testing.assert_close(b[rollouts.mask], a[rollouts.mask], rtol=1e-4, atol=1e-4)


def opt(scale: float) -> Any:
    """OPT attends to all earlier tokens of a row, whatever their positions."""
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "ffn_dim": 32}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = transformers.OPTForCausalLM(transformers.OPTConfig(vocab_size=7, word_embed_proj_dim=16, **sizes))
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(scale)
    return model.eval()


def with_gradients(model: nn.Module, **options: Any) -> EntropyChangeProbe:
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    model(input_ids=torch.tensor([[1, 2, 3, 4]])).logits.logsumexp(-1).sum().backward()
    return EntropyChangeProbe(model, optimizer, token_statistics=PackedLMStatistics(), **options)


@pytest.mark.parametrize("n", [4, 1])
def test_a_model_that_mixes_the_responses_of_a_row_is_refused(n: int) -> None:
    """One response alone is enough to tell."""
    rollouts = padded(0, 4, on_the_left=True).rows(torch.arange(n))
    for measure in (
        with_gradients(opt(5.0)).forecast,
        PolicyEntropyProbe(opt(5.0), token_statistics=PackedLMStatistics()).measure,
        PromptNoiseProbe(opt(5.0), token_statistics=PackedLMStatistics()).measure,
    ):
        with pytest.raises(
            ValueError, match=r"nats apart alone and behind another .* \(OPTForCausalLM\) does not tell"
        ):
            measure(rollouts)


def test_a_model_is_asked_again_as_long_as_its_scores_hardly_depend_on_what_comes_before() -> None:
    """A policy with a head of zeros, as many begin, tells nothing; and it is refused once it does."""
    model, rollouts = opt(5.0), padded(0, 4, on_the_left=True)
    head = model.lm_head.weight.detach().clone()
    model.lm_head.weight = nn.Parameter(torch.zeros_like(head))
    probe = with_gradients(model)
    assert not PackedLMStatistics().check_model(model, rollouts)
    probe.forecast(rollouts)
    with torch.no_grad():
        model.lm_head.weight.copy_(head)
    with pytest.raises(ValueError, match="does not tell the responses of a row apart"):
        probe.forecast(rollouts)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_parameters_of_16_bits_may_round_longer_rows_in_another_way(dtype: torch.dtype) -> None:
    """Whatever the type of the logits. This model's differ by some hundredths with the length of the row."""

    class Rounds(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model, self.one = llama(), nn.Parameter(torch.ones((), dtype=dtype))

        def forward(self, ids: Tensor, positions: Tensor) -> Tensor:
            logits: Tensor = self.model(input_ids=ids, position_ids=positions, use_cache=False).logits
            rounded = 0.05 * torch.arange(7) * self.one * ids.shape[1] / 10
            return logits + rounded.float()

    statistics = PackedLMStatistics(lambda model, ids, positions, cu_seqlens: model(ids, positions))
    refused = pytest.raises(ValueError, match="nats apart alone and behind another response of its row")
    with contextlib.nullcontext() if dtype == torch.bfloat16 else refused:
        statistics.check_model(Rounds(), padded(0, 8, on_the_left=True))


def test_a_model_that_tells_them_apart_is_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    check_model = PackedLMStatistics.check_model
    monkeypatch.setattr(PackedLMStatistics, "check_model", lambda *of: asked.append(check_model(*of)) or asked[-1])
    probe, rollouts = with_gradients(llama()), padded(0, 8, on_the_left=True)
    for _ in range(2):
        probe.forecast(rollouts)
    assert asked == [True]


def test_no_position_is_beyond_those_of_the_responses() -> None:
    """Of a model with as many positions as the longest response has tokens."""
    config = transformers.GPT2Config(
        vocab_size=7, n_embd=16, n_layer=1, n_head=2, bos_token_id=1, eos_token_id=1, n_positions=8
    )
    rollouts = padded(0, 8, on_the_left=True).rows(torch.tensor([4, 12]))
    assert bool(rollouts.inputs["attention_mask"].all())
    assert rollouts.inputs["attention_mask"].shape == (2, 8)
    PackedLMStatistics().check_model(transformers.GPT2LMHeadModel(config).eval(), rollouts)


def refused(case: str) -> str:
    """On two ranks with FSDP2, of which only the second one has what is refused."""
    rank, rollouts = dist.get_rank(), padded(0, 8, on_the_left=True)
    model = opt(5.0)
    if case == "one mixes" and not rank:  # nothing is to be told of two equal tokens at equal positions
        inputs = {"input_ids": torch.ones(8, 2, dtype=torch.long)}
        rollouts = Rollouts(inputs, torch.ones(8, 1, dtype=torch.bool), torch.arange(8))
    elif case != "one mixes" and rank:
        rollouts = dataclasses.replace(rollouts, mask=rollouts.inputs["attention_mask"][:, 1:].bool())
    fully_shard(model)
    try:
        with_gradients(model).forecast(rollouts)
    except (ValueError, RuntimeError) as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("one mixes", "does not tell the responses of a row apart"),
        ("a mask of one", "each sampled token needs a token before it"),
    ],
)
def test_what_one_rank_refuses_ends_the_measurement_on_all(ranks2: Ranks, case: str, message: str) -> None:
    found = ranks2(refused, case)
    assert found[0].startswith("rank 1 of the group failed"), found
    assert all(message in text for text in found), found


def test_only_sampled_tokens_are_scored(monkeypatch: pytest.MonkeyPatch) -> None:
    """One long response beside short ones: [responses, tokens, vocabulary] would be many times the row's logits."""
    scored = []

    def noted(logits: Tensor, tokens: Tensor, **options: Any) -> Any:
        scored.append(logits.shape)
        return statistics_of_logits(logits, tokens, **options)

    monkeypatch.setattr(packed_statistics, "statistics_of_logits", noted)
    mask = torch.arange(30)[None] >= torch.tensor([0] + [28] * 15)[:, None]
    attention = torch.cat([mask[:, :1] | False, mask], 1)
    attention[:, 0] = mask[:, 0]
    attention[1:, 28] = True  # the prompt of the short ones
    attention[0, 0] = True
    ids = torch.randint(7, attention.shape, generator=torch.Generator().manual_seed(0))
    rollouts = Rollouts({"input_ids": ids, "attention_mask": attention.long()}, mask, torch.arange(16))
    with torch.no_grad():
        found, expected = PackedLMStatistics()(llama(), rollouts), CausalLMStatistics()(llama(), rollouts)
    assert scored == [(1, int(mask.sum()), 7)]
    for a, b in zip(expected, found, strict=True):
        torch.testing.assert_close(b[mask], a[mask], rtol=1e-4, atol=1e-4)
        assert not b[~mask].any()


def test_what_cannot_be_scored_is_refused() -> None:
    rollouts = padded(0, 4, on_the_left=True)
    with pytest.raises(ValueError, match=r"must return the logits of \d+ tokens, .* got \[3, 3\]"):
        PackedLMStatistics(lambda *_: torch.zeros(3, 3))(llama(), rollouts)
    with pytest.raises(ValueError, match=r"or a pair of log-probability and entropy, .* got NoneType"):
        PackedLMStatistics(lambda *_: None)(llama(), rollouts)
    with pytest.raises(ValueError, match=r"forward must be a function of the model, input_ids, .* got 3"):
        PackedLMStatistics(3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="temperature must be positive"):
        PackedLMStatistics(temperature=0.0)
    with pytest.raises(ValueError, match="or a pair of log-probability and entropy, got 3 values"):
        PackedLMStatistics(lambda *_: (1, 2, 3))(llama(), rollouts)
    ids = rollouts.inputs["input_ids"]
    for inputs, message in (
        ({"input": ids}, "inputs need 'input_ids' for a causal language model, got"),
        ({"input_ids": ids[:, 0]}, r"input_ids must be \[responses, length\], got \[16\]"),
        ({"input_ids": ids, "attention_mask": torch.ones(16, 2)}, "attention_mask must be .* as input_ids"),
        ({"input_ids": ids.float()}, "input_ids must be whole numbers, .* got torch.float32"),
        ({"input_ids": ids, "token_type_ids": ids}, r"attention_mask alone, got also \['token_type_ids'\]"),
    ):
        with pytest.raises(ValueError, match=message):
            PackedLMStatistics()(llama(), dataclasses.replace(rollouts, inputs=inputs))
    first = dataclasses.replace(rollouts, mask=rollouts.inputs["attention_mask"][:, 1:].bool())
    with pytest.raises(ValueError, match="each sampled token needs a token before it"):
        PackedLMStatistics()(llama(), first)
