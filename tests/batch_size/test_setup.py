"""The message that attach prints."""

from __future__ import annotations

import pytest
import torch

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
