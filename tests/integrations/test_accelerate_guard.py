"""What sonde takes from Accelerate."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn

pytest.importorskip("accelerate", reason="needs accelerate: pip install '.[accelerate]'")
# Accelerate and what it imports cause various warnings.
pytestmark = pytest.mark.filterwarnings("ignore")

from accelerate import Accelerator  # noqa: E402
from accelerate.state import AcceleratorState  # noqa: E402


@pytest.fixture
def accelerator() -> Iterator[Accelerator]:
    """In bf16. Accelerate holds one state for the process, and refuses another precision while it is there."""
    AcceleratorState._reset_state(reset_partial_state=True)
    yield Accelerator(mixed_precision="bf16", cpu=True)
    AcceleratorState._reset_state(reset_partial_state=True)


def test_guard_accelerate_keeps_the_forward_that_it_wraps(accelerator: Accelerator) -> None:
    """FullPrecision scores by this forward, since the wrapped one casts to 16 bits."""
    model = nn.Linear(3, 2)
    with torch.no_grad():
        model.weight.fill_(1.0)
        model.bias.fill_(2.0**-12)  # bf16 has 8 bits: 3 + 2⁻¹² is 3 there
    prepared = accelerator.prepare(model)
    assert prepared(torch.ones(1, 3)).tolist() == [[3.0, 3.0]]
    assert prepared._original_forward(torch.ones(1, 3)).tolist() == [[3.0 + 2.0**-12] * 2]
