"""The bodies of the tests on a GPU are right: on a CPU, they pass. (`tests/gpu/` is skipped without a GPU.)"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.gpu.set_ups import ON_RANKS, SETUPS, WINDOWS, compared, entropy_forecast
from tests.mutants import Mutant
from tests.ranks import Ranks

CPU = torch.device("cpu")


@pytest.mark.parametrize("name", SETUPS)
def test_one_process(name: str) -> None:
    reading, is_untouched = compared(CPU, SETUPS[name])
    assert is_untouched
    of_pairs = SETUPS[name].get("allow_biased", False)
    least = {"one window in three": 2, "Adam's metric": WINDOWS - 1}.get(name, WINDOWS // 2 if of_pairs else WINDOWS)
    assert reading.windows >= least
    assert reading.is_biased == of_pairs
    assert reading.grad_sq > 0


def all_on_rank() -> dict[str, tuple[Any, bool]]:
    return {name: compared(CPU, setup) for name, setup in ON_RANKS.items()}


def test_ranks(ranks2: Ranks) -> None:
    for of_rank in ranks2(all_on_rank):
        for name, (reading, is_untouched) in of_rank.items():
            assert is_untouched, name
            assert reading.windows == WINDOWS, name
            assert reading.grad_sq > 0, name


def test_entropy() -> None:
    assert entropy_forecast(CPU) != 0


def test_a_changed_run_is_noticed() -> None:
    """The comparison with a run without a probe can fail."""
    mutant = Mutant(
        "a hook changes the gradient that it reads",
        "sonde.batch_size.taps.piece_gradient:PieceGradient._keep",
        "self._parts.append((indices, roots))",
        "self._parts.append((indices, roots)); [g.mul_(1.001) for g in grads]",
    )
    with mutant.applied():
        _, is_untouched = compared(CPU, {})
    assert not is_untouched
