"""The user's own scalars."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.batch_size.loops import (
    Recording,
    attached,
    piece_losses,
    small_model,
)


def test_scalars_of_a_window_are_averaged() -> None:
    model = small_model()
    sink = Recording()
    with attached(model, sinks=[sink], log_every=1) as probe:
        for loss, value in zip(piece_losses(model, [4, 4]), (torch.tensor(1.0), 4.0), strict=True):
            with probe.piece(units=4):
                loss().backward()
            probe.log(loss=value)
        probe.step()
    assert sink.of_kind("reading")[0]["metrics"]["loss"] == 2.5


def test_a_scalar_is_taken_as_it_is_when_it_is_logged() -> None:
    model = small_model()
    sink = Recording()
    running = torch.tensor(5.0)
    with attached(model, sinks=[sink], log_every=1) as probe:
        for loss in piece_losses(model, [4, 4]):
            with probe.piece(units=4):
                loss().backward()
        probe.log(loss=running)
        running.zero_()
        probe.step()
    assert sink.of_kind("reading")[0]["metrics"]["loss"] == 5.0


@pytest.mark.parametrize(
    ("scalars", "match"),
    [
        ({"a b": 1.0}, "letters, digits"),
        ({"z": torch.zeros((), dtype=torch.complex64)}, "real number"),
    ],
)
def test_scalars_that_no_tracker_takes_are_refused(scalars: dict[str, Any], match: str) -> None:
    with attached(small_model()) as probe, pytest.raises(ValueError, match=match):
        probe.log(**scalars)
