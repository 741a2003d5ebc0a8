"""No batch is judged while the learning rate rises; a verdict comes once it stays."""

from __future__ import annotations

import pytest
import torch

from tests.batch_size.loops import attached, batch, mean_loss, small_model


@pytest.mark.parametrize("is_given", [True, False])
def test_the_rate_of_the_optimizer_decides(is_given: bool) -> None:
    """Also of an optimizer that is found by its steps."""
    model, generator = small_model(), torch.Generator().manual_seed(0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    kinds = {}
    with attached(model, optimizer if is_given else None) as probe:
        for window in range(1, 301):
            optimizer.param_groups[0]["lr"] = 1e-9 * min(window, 160)  # so small that the weights stay
            for _ in range(2):
                with probe.piece(units=4):
                    mean_loss(model, *batch(4, generator)).backward()
            probe.step()
            optimizer.step()
            optimizer.zero_grad()
            if window in (150, 300):
                reading = probe.reading()
                kinds[window] = reading.warms_up, reading.verdict.kind == "unknown", probe.metrics()["gns/warms_up"]
                if window == 150:
                    assert "learning rate is still rising" in reading.verdict.detail
    assert kinds == {150: (True, True, 1.0), 300: (False, False, 0.0)}
