"""The user's own scalars."""

from __future__ import annotations

import gc
import itertools

import torch

from tests.batch_size.loops import Recording, attached, batch, mean_loss, piece_losses, small_model


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


def _n_single_numbers() -> int:
    """0-dim tensors that are alive."""
    return sum(issubclass(type(thing), torch.Tensor) and thing.dim() == 0 for thing in gc.get_objects())


def test_losses_of_windows_between_are_not_kept_one_by_one() -> None:
    model = small_model()
    sink = Recording()
    generator = torch.Generator().manual_seed(0)
    with attached(model, sinks=[sink], log_every=1, every=64) as probe:
        for step in range(1, 129):
            for _ in range(2):
                with probe.piece(units=4):
                    mean_loss(model, *batch(4, generator)).backward()
            probe.log(loss=torch.tensor(float(step)))
            probe.step()
            if step == 2:
                before = _n_single_numbers()
            if step == 60:
                assert _n_single_numbers() < before + 10
    windows = [record["window"] for record in sink.of_kind("reading")]
    means = [record["metrics"]["loss"] for record in sink.of_kind("reading")]
    ends = [0, *windows]
    assert means == [(first + 1 + last) / 2 for first, last in itertools.pairwise(ends)]


def test_numbers_and_tensors_of_one_name_are_averaged_together() -> None:
    model = small_model()
    sink = Recording()
    with attached(model, sinks=[sink], log_every=1) as probe:
        for value in (1.0, torch.tensor(2.0), torch.tensor(3, dtype=torch.int64), 4, torch.tensor([6.0]).bfloat16()):
            probe.log(loss=value)
        with torch.inference_mode():
            probe.log(loss=torch.tensor(8.0))
        probe.log(loss=torch.tensor(11.0))
        for loss in piece_losses(model, [4, 4]):
            with probe.piece(units=4):
                loss().backward()
        probe.step()
    assert sink.of_kind("reading")[0]["metrics"]["loss"] == 5.0
