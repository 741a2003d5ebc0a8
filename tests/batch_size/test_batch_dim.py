"""Which dim of what a model is called with is the batch, in usual ways to call models: counted, or asked."""

from __future__ import annotations

from collections import UserDict
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sonde.batch_size.batch_dim import UnclearUnitsError, count_units, units_in_batch
from sonde.batch_size.taps.problems import Problem
from tests.batch_size.loops import attached
from tests.batch_size.single_units import SINGLE
from tests.batch_size.usual_calls import ASKED, CALLS, LOSS, N, T, causal, giving, ids, images, mean_of, state

USUAL = CALLS | SINGLE
CASES = USUAL | {
    "labels, a loss and scores": (
        giving(LOSS, (N, T, 11)),
        lambda: {"input_ids": ids(N, T), "attention_mask": ids(N, T), "labels": ids(N, T)},
        N,
    ),
    "choices": (giving(LOSS, (N, 4)), lambda: {"input_ids": ids(N, 4, T), "labels": ids(N)}, N),
    "pairs of texts": (giving((N, 1), (N, 1)), lambda: {"chosen": ids(N, T), "rejected": ids(N, T + 2)}, N),
    "one token, with the keys of those before": (
        giving((N, 1, 11)),
        lambda: (ids(N, 1), [(torch.randn(N, 4, 20, 16),) * 2] * 3),
        N,
    ),
    "a loss of each token": (giving(LOSS, (N * (T - 1),)), lambda: (ids(N, T),), N),
    "scores of all tokens but the first": (giving((N * (T - 1), 11)), lambda: (ids(N, T),), ASKED),
    "scores of masked tokens": (giving((37, 11)), lambda: (ids(N, T), ids(N, T)), ASKED),
    "rotations of all positions": (giving((N, T, 11)), lambda: (ids(N, T), torch.randn(T, 32)), N),
    "a mask and positions of all rows, a loss": (giving(LOSS), lambda: (ids(N, T), causal(T), ids(1, T)), N),
    "weights of classes": (giving(LOSS), lambda: (torch.randn(N, 16), ids(N), torch.ones(5)), N),
    "two views in a list": (giving((2 * N, 10)), lambda: ([torch.randn(N, 3, 22, 22)] * 2,), ASKED),
    "triplets": (giving(*[(N, 4)] * 3), lambda: tuple(torch.randn(3, N, 10)), N),
    "rays of a camera": (giving((1024, 3)), lambda: (torch.randn(1024, 3), torch.randn(3, 3), torch.randn(4, 4)), 1024),
    "features in a list": (giving((N, 1)), lambda: ([ids(N)] * 4,), N),
    "frames of videos": (giving((5 * N, 10)), lambda: (torch.randn(N, 5, 3, 9, 9),), N),
    "CTC, a loss": (giving(LOSS), lambda: (torch.randn(N, 80, 200), ids(N), ids(37), ids(N)), N),
    "CTC, with positions": (giving((80, N, 30)), lambda: (torch.randn(N, 80, 200), torch.randn(80, 200)), ASKED),
    # States handed through.
    "a state, and scores": (giving((N, T, 11), (2, N, 16)), lambda: (ids(N, T), state()), N),
    "a state alone": (giving((2, N, 16)), lambda: (torch.randn(N, T, 10), state()), ASKED),
    # The first tensor is shared by all units.
    "one latent": (giving((N, 1)), lambda: (torch.randn(1, 32), torch.randn(N, 10)), N),
    "latent queries": (giving((N, 64, 32)), lambda: (torch.randn(64, 32), torch.randn(N, 100, 32)), ASKED),
    "positions first": (giving((N, T, 11)), lambda: (torch.arange(T), ids(N, T)), ASKED),
    "coordinates and functions": (giving((N, 64, 1)), lambda: (torch.rand(64, 2), torch.randn(N, 20)), ASKED),
}


@pytest.mark.parametrize("case", CASES)
def test_units_of_usual_calls(case: str) -> None:
    model, draw, expected = CASES[case]
    with attached(model, units_per_piece="first dim", per_example="never") as probe:
        for _ in range(2):
            given = draw()
            mean_of(model(**given) if isinstance(given, dict) else model(*given)).backward()
        probe.step()
        reading, alerts = probe.reading(), dict(probe.alerts)
    model.zero_grad()
    if expected is ASKED:
        assert reading.windows == 0
        assert Problem.UNITS_ASKED.message in str(reading.reason)
        assert "the batch has" in alerts["units"]
    else:
        assert (reading.units_per_window, reading.dropped) == (2 * expected, {})
        assert "units" not in alerts


@dataclass
class Batch:
    number: int
    images: Tensor


@pytest.mark.parametrize(
    ("batch", "n"),
    [
        ((torch.tensor(7.0), torch.zeros(3, 5)), 3),  # a tensor without dims has no rows
        ({"scale": 2.0, "images": torch.zeros(3, 5)}, 3),
        ([None, ("text", [torch.zeros(3, 5)])], 3),
        (UserDict(input_ids=torch.zeros(3, 5)), 3),
        (Batch(9, torch.zeros(3, 5)), 3),
        ([torch.zeros(3, 5), torch.zeros(3, 5)], 3),  # inputs and targets of the same shape are columns
        ([{"image": torch.zeros(5, 8, 8)}] * 3, 3),
        ([images(3), [{"boxes": torch.zeros(2, 4)}] * 3], 3),
        (torch.zeros(3, 5), 3),
        ([torch.zeros(7, 3, 5), torch.zeros(3)], ASKED),
        ({"pixel_values": torch.zeros(70, 5), "input_ids": torch.zeros(3, 5), "labels": torch.zeros(3, 5)}, ASKED),
    ],
)
def test_units_of_a_loaders_batch(batch: Any, n: int | None) -> None:
    if n is ASKED:
        with pytest.raises(UnclearUnitsError, match=r"not clear: the batch has .*: pass units="):
            units_in_batch(batch, "pass units=")
    else:
        assert units_in_batch(batch, "pass units=") == n


def test_what_an_encoder_of_images_returns_beside_the_scores_is_no_witness() -> None:
    batch = {"pixel_values": torch.zeros(70, 5), "input_ids": torch.zeros(3, 5), "labels": torch.zeros(3, 5)}
    output = {"loss": torch.tensor(1.0), "logits": torch.zeros(3, 5, 11), "images": {"states": torch.zeros(70, 16)}}
    counted = count_units(batch, output)
    assert counted is not None
    assert counted.n == 3
    assert count_units({"x": torch.zeros(70, 5)}, {"images": output["images"]}) == count_units(
        {"x": torch.zeros(70, 5)}
    )


@pytest.mark.parametrize("batch", [1, "text", None, {}, [], Batch, nn.Linear(2, 2)])
def test_a_batch_without_rows(batch: object) -> None:
    assert count_units({"batch": batch}) is None
    with pytest.raises(ValueError, match="the batch has no tensor with rows: pass units="):
        units_in_batch(batch, "pass units=")
