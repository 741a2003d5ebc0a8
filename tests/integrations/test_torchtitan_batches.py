"""Units of torchtitan's micro-batches, with a dim of rows and folded into one row. This needs no torchtitan."""

from __future__ import annotations

import pytest
import torch

from sonde.integrations.torchtitan_batches import counts_of, documents, rows

LABELS = torch.tensor([[-100, 1, 2, 3, -100, 4], [5, 6, 7, 8, 9, 10]])
POSITIONS = torch.tensor([[0, 1, 2, 3, 0, 1], [0, 1, 0, 1, 2, 3]])


def weights(labels: torch.Tensor, positions: torch.Tensor | None) -> list[float]:
    counts = counts_of(None, {"positions": positions}, labels)
    assert float(counts["weight"]) == labels.ne(-100).sum()
    of_each = counts["unit_weights"]
    assert int(counts["units"]) == (of_each > 0.5).sum()
    return [round(float(weight)) for weight in of_each if weight > 0.5]


def test_rows_weigh_by_their_loss_tokens() -> None:
    assert weights(LABELS, None) == [4, 6]
    assert rows({}, LABELS).tolist() == [4, 6]


def test_documents_of_a_folded_micro_batch_weigh_by_their_loss_tokens() -> None:
    """After 0.3, torchtitan has no dim of rows: `positions` show where one document ends and the next begins."""
    assert weights(LABELS.flatten(), POSITIONS.flatten()) == [3, 1, 2, 4]
    folded = documents({"positions": POSITIONS.flatten()}, LABELS.flatten())
    assert folded.tolist() == documents({"positions": POSITIONS}, LABELS).tolist() == [3, 1, 2, 4] + 8 * [0]


@pytest.mark.parametrize("positions", [None, torch.zeros(12, 3), torch.zeros(2, 6)])
def test_a_folded_micro_batch_without_positions_is_refused_with_the_way_out(positions: torch.Tensor | None) -> None:
    with pytest.raises(ValueError, match="pass units= to attach"):
        counts_of(None, {"positions": positions}, LABELS.flatten())
