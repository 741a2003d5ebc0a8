"""The text that the demo learns from, its model, and its learning rate."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from sonde.demos.byte_lm.task import (
    N_BYTES,
    ByteTransformer,
    draw_windows,
    find_sources,
    window_generator,
)
from sonde.demos.byte_lm.train import next_byte_loss

CONTEXT = 96


def test_missing_source_files_are_an_error_that_says_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "only.py").write_text("pass\n")
    with pytest.raises(FileNotFoundError, match=rf"got 5 bytes .* in {tmp_path}, expected at least 1,000,000: use"):
        find_sources(tmp_path)


def test_windows_are_cut_from_the_whole_corpus() -> None:
    corpus = torch.arange(10, dtype=torch.uint8)
    windows = draw_windows(corpus, 200, 7, window_generator(0, 0, 0))
    assert windows.dtype == torch.int64
    assert (windows[:, 1:] - windows[:, :-1] == 1).all()
    assert set(windows[:, 0].tolist()) == {0, 1, 2}, "10 bytes hold 3 windows of 7 + 1"


@pytest.fixture(scope="module")
def model() -> ByteTransformer:
    torch.manual_seed(0)
    return ByteTransformer(context=CONTEXT)


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


def test_loss_is_the_mean_of_minus_log_probabilities(model: ByteTransformer) -> None:
    windows = _bytes(2, 6)
    with torch.no_grad():
        loss = next_byte_loss(model, windows)
        log_probs = model(windows[:, :-1]).double().log_softmax(-1)
    by_hand = [-log_probs[i, t, windows[i, t + 1]].item() for i in range(2) for t in range(5)]
    assert loss.item() == pytest.approx(sum(by_hand) / 10, rel=1e-5)  # float32 against float64
