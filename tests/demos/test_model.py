from __future__ import annotations

import math

import pytest
import torch

from sonde.demos.byte_lm.model import N_BYTES, ByteTransformer
from sonde.demos.byte_lm.options import DemoOptions
from sonde.demos.byte_lm.train import next_byte_loss, rate_at
from sonde.parallel.wrappers import block_of


@pytest.fixture(scope="module")
def model() -> ByteTransformer:
    torch.manual_seed(0)
    return ByteTransformer(context=DemoOptions().context)


def _bytes(*shape: int) -> torch.Tensor:
    return torch.randint(N_BYTES, shape, generator=torch.Generator().manual_seed(1))


def test_a_byte_changes_no_logits_before_it(model: ByteTransformer) -> None:
    window = _bytes(1, 20)
    changed = window.clone()
    changed[0, 12] ^= 1
    with torch.no_grad():
        before, after = model(window)[0], model(changed)[0]
    # Not bitwise: kernels may round positions together differently.
    torch.testing.assert_close(after[:12], before[:12], rtol=0, atol=1e-6)
    assert ((after[12:] - before[12:]).abs().amax(dim=-1) > 1e-4).all(), "a byte must reach all positions from its own"


def test_logits_depend_on_the_position(model: ByteTransformer) -> None:
    torch.manual_seed(0)
    own = ByteTransformer(context=8)
    torch.nn.init.normal_(own.embed.position)
    same_bytes = torch.full((1, 8), 65)
    with torch.no_grad():
        logits = own(same_bytes)[0]
    assert (logits[0] - logits[5]).abs().max() > 1e-3


def test_size_and_groups(model: ByteTransformer) -> None:
    assert 1e6 < sum(p.numel() for p in model.parameters()) < 3e6
    groups = list(dict.fromkeys(block_of(name) for name, _ in model.named_parameters()))
    assert groups == ["embed", *(f"blocks.{i}" for i in range(5)), "norm", "head"]


def test_first_guess_is_nearly_uniform(model: ByteTransformer) -> None:
    with torch.no_grad():
        loss = next_byte_loss(model, _bytes(4, DemoOptions().context + 1))
    # Logits start with a standard deviation near 0.02·√128 = 0.23, which costs about half its square, 0.026 nats.
    assert loss.item() == pytest.approx(math.log(N_BYTES), abs=0.1)


def test_loss_is_the_mean_of_minus_log_probabilities(model: ByteTransformer) -> None:
    windows = _bytes(2, 6)
    with torch.no_grad():
        loss = next_byte_loss(model, windows)
        log_probs = model(windows[:, :-1]).double().log_softmax(-1)
    by_hand = [-log_probs[i, t, windows[i, t + 1]].item() for i in range(2) for t in range(5)]
    assert loss.item() == pytest.approx(sum(by_hand) / 10, rel=1e-5)  # float32 against float64


def test_learning_rate_warms_up_then_decays() -> None:
    rates = [rate_at(step, 300) for step in range(300)]
    assert rates[0] == pytest.approx(1 / 20)
    assert rates[19] == rates[20] == 1.0
    assert rates[160] == pytest.approx(0.55)  # half-way down from 1 to 0.1
    assert rates[299] == pytest.approx(0.1, abs=1e-3)
    assert rate_at(0, 5) == pytest.approx(1 / 20), "a run shorter than the warm-up"
