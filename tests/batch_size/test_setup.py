"""The message that attach prints."""

from __future__ import annotations

from typing import Any

import numpy
import pytest
import torch

import sonde
from sonde.batch_size.setup import NoiseScaleOptions
from tests.batch_size.loops import (
    attached,
    small_model,
    train,
)


def test_the_message_of_attach(capsys: pytest.CaptureFixture[str]) -> None:
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with attached(model, optimizer, verbose=True) as probe:
        printed = capsys.readouterr()
        assert printed.out == ""
        for part in ("plain", "28,", "1 data-parallel", "rows", "4: 0, 2, 3, 4", "leaf hooks"):
            assert part in printed.err
        train(model, probe, optimizer, windows=1)
        probe.reading()
        assert "3 pieces per window, 12 rows in all" in capsys.readouterr().err


@pytest.mark.parametrize("three", [3, numpy.int64(3), torch.tensor(3)])
def test_a_whole_number_may_be_of_another_type(three: int) -> None:
    log = sonde.RunLog(every=three)
    options = NoiseScaleOptions("rows", every=three)
    assert [(n, type(n)) for n in (log.every, options.every)] == [(3, int)] * 2
    of_policy = sonde.EntropyChangeOptions(every=three, micro_batch_prompts=three)
    assert [(n, type(n)) for n in (of_policy.every, of_policy.micro_batch_prompts)] == [(3, int)] * 2


@pytest.mark.parametrize("wrong", [True, numpy.float64(3.0), torch.tensor(3.0), numpy.int64(0), [3], "3"])
def test_what_is_no_whole_number_is_refused(wrong: Any) -> None:
    for make in (lambda: attached(small_model(), every=wrong), lambda: sonde.RunLog(every=wrong)):
        with pytest.raises(ValueError, match="every must be a whole number of windows from 1 up, got"):
            make()
