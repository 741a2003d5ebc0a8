"""Over the zoo of conventions, no number of units is wrong in silence."""

from __future__ import annotations

import pytest
import torch

from tests.batch_size.conventions import SEEN, convention
from tests.batch_size.loops import attached
from tests.batch_size.usual_calls import mean_of

ASKED = {
    *("[C, T, B], batch last", "[H, W, C, B], batch last", "a sparse matrix of rows"),
    *("[members, B, C], one ensemble", "[members, B, C], the same samples for all"),
    *("[B, T, C], each step alone", "[T, B, C], each step alone", "[B, T], each token alone"),
    *(name for name in SEEN if name.startswith("packed")),
    *("a flattening collator's row", "nodes of one graph", "nodes, with a dense matrix of edges"),
    *("statistics of the batch", "a group of completions for each prompt", "coordinates and functions"),
}
"""Where only the user knows, or sonde cannot try. All others are counted."""


@pytest.mark.parametrize("name", SEEN)
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_units_are_right_or_asked_about(name: str) -> None:
    model, draw, n = convention(name)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with attached(model, optimizer) as probe:
        for _ in range(2):
            for _ in range(2):
                given = draw()
                mean_of(model(**given) if isinstance(given, dict) else model(*given)).backward()
            optimizer.step()
            optimizer.zero_grad()
        reading = probe.reading()
    if name in ASKED:
        assert reading.windows == 0
        assert "the batch has" in probe.alerts["units"]
    else:
        assert (reading.units_per_window, reading.windows) == (2 * n, 2)
        assert "units" not in probe.alerts
