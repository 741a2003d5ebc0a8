"""What all trainers share: the end of a training that fails."""

from __future__ import annotations

import contextlib
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from sonde.integrations.guarded import GuardedProbe, warn_if_untested
from tests.batch_size.loops import batch, mean_loss, small_model
from tests.integrations.plain_loop import optimizer_of
from tests.ranks import Ranks


def _fails_alone() -> int | None:
    """The windows of rank 0, which fails in the fourth, whose sum its peer never joins; None on the peer."""
    group = dist.new_group(timeout=timedelta(seconds=20))
    model = DistributedDataParallel(small_model(), process_group=group)
    optimizer, generator = optimizer_of(model), torch.Generator().manual_seed(dist.get_rank())
    probe = GuardedProbe({"unit": "rows", "every": 1}, verbose=False, on_error="raise")
    probe.begin(model, optimizer)
    for window in range(4):
        for _ in range(2):
            with probe.piece(lambda: {"units": 4}):
                mean_loss(model, *batch(4, generator)).backward()
        if window == 3 and dist.get_rank() == 1:
            dist.barrier()  # until rank 0 has failed; if that waited for this rank, the sum would run into its timeout
            return None
        probe.step()
        optimizer.step()
        optimizer.zero_grad()
    probe.fail(KeyError("of the user's own"))
    reading = probe.reading()
    dist.barrier()
    assert probe.averages() is not None
    return reading.windows


def test_a_rank_that_fails_keeps_its_reading_and_waits_for_nobody(ranks2: Ranks) -> None:
    assert ranks2(_fails_alone) == [3, None]


def test_a_log_that_takes_no_records_is_refused_before_training() -> None:
    with pytest.raises(ValueError, match="a log needs places for records, got 5"):
        GuardedProbe({"unit": "rows"}, log=5)


def test_a_backward_that_the_trainer_did_not_count_is_no_piece() -> None:
    """Its rows would count without the weights and the scale that only the trainer knows."""
    model = small_model()
    probe = GuardedProbe({"unit": "rows", "every": 1}, verbose=False)
    probe.backward = "trainer.backward(loss)"
    probe.begin(model, optimizer_of(model))
    assert not model._forward_pre_hooks
    for _ in range(2):
        mean_loss(model, *batch(4, torch.Generator())).backward()
    probe.step()
    probe.end("training ended")
    reading = probe.reading()
    assert (reading.windows, reading.reason) == (
        0,
        "no backward of the window went through trainer.backward(loss): use it for each backward",
    )


def test_units_are_counted_in_measured_windows_alone() -> None:
    """A second backward of a micro-batch joins its piece."""
    model, n_counted = small_model(), 0

    def count() -> dict[str, int]:
        nonlocal n_counted
        n_counted += 1
        return {"units": 4}

    optimizer, generator = optimizer_of(model), torch.Generator().manual_seed(0)
    probe = GuardedProbe({"unit": "rows", "every": 2}, verbose=False, on_error="raise")
    probe.begin(model, optimizer)
    for _ in range(8):
        for _ in range(3):
            with probe.piece(count), probe.piece(count):
                mean_loss(model, *batch(4, generator)).backward()
        probe.step()
        optimizer.step()
        optimizer.zero_grad()
    reading = probe.reading()
    assert 0 < reading.windows < 8
    assert (reading.dropped, reading.units_per_window, n_counted) == ({}, 12, 3 * reading.windows)


def test_an_error_of_the_training_inside_a_piece_is_raised_as_it_is() -> None:
    model = small_model()
    optimizer, generator = optimizer_of(model), torch.Generator().manual_seed(0)
    probe = GuardedProbe({"unit": "rows", "every": 1}, verbose=False, on_error="raise")
    probe.begin(model, optimizer)
    for window in range(3):
        for _ in range(2):
            with contextlib.suppress(KeyError), probe.piece(lambda: {"units": 4}):
                if window == 1:
                    raise KeyError("of the user's own")
                mean_loss(model, *batch(4, generator)).backward()
        probe.step()
        optimizer.step()
        optimizer.zero_grad()
    reading = probe.reading()
    assert reading.windows == 2


def test_a_version_that_was_not_tested_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    warn_if_untested("trainer", "1.15.3", ("1.15", "1.16"))
    assert caplog.text == ""
    for version in ("1.14.9", "1.16.0"):
        warn_if_untested("trainer", version, ("1.15", "1.16"))
        said = f"trainer {version} is not a version that sonde was tested with, which are those from 1.15 to below 1.16"
        assert said in caplog.text
