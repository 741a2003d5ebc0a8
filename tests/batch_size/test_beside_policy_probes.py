"""The noise scale of a training beside probes that run backwards of their own: they are no pieces of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import sonde
from sonde.contrib.hold_entropy import HoldEntropy
from sonde.parallel.model_state import is_in_own_pass
from tests.small_policy import STATISTICS, drawn, loss, optimizer_of, policy

PROBES: dict[str, Callable[[Any, Any, Any, Any], Any]] = {
    "coefficient": lambda model, optimizer, E, U: sonde.EntropyChangeProbe(
        model, optimizer, token_statistics=STATISTICS, beside=HoldEntropy()
    ).forecast(E),
    "causes": lambda model, optimizer, E, U: sonde.EntropyChangeProbe(
        model, optimizer, token_statistics=STATISTICS
    ).forecast(E, U, causes=True),
    "prompt noise": lambda model, optimizer, E, U: sonde.PromptNoiseProbe(model, token_statistics=STATISTICS).measure(
        U
    ),
}


def reading(name: str | None, per_example: Any, dtype: torch.dtype) -> tuple[Any, ...]:
    model = policy(dtype=dtype)
    optimizer = optimizer_of(model, "momentum", 1e-2)
    noise = sonde.attach(model, optimizer, unit="responses", every=1, per_example=per_example, units_per_piece=32)
    E = drawn(policy(), 0, 8, seed=1)
    for step in range(3):
        optimizer.zero_grad()
        for piece in range(2):
            U = drawn(policy(), 200 + 8 * piece, 8, seed=10 * step + piece)
            (loss(model, U) / 2).backward()
        if name is not None:
            PROBES[name](model, optimizer, E, U)
        noise.step()
        optimizer.step()
    found = noise.reading()
    noise.close()
    assert not found.dropped, found.dropped
    return found.windows, found.trace_cov, found.grad_sq, found.units_per_window


@pytest.mark.parametrize(
    ("name", "per_example", "dtype"),
    [
        ("coefficient", "never", torch.float32),
        ("causes", "always", torch.bfloat16),
        ("prompt noise", "never", torch.float32),
        ("prompt noise", "always", torch.bfloat16),
    ],
)
def test_passes_of_other_probes_are_no_pieces(name: str, per_example: Any, dtype: torch.dtype) -> None:
    assert reading(name, per_example, dtype) == reading(None, per_example, dtype)


def test_nothing_is_in_a_pass_of_sondes_own_afterwards_whatever_fails() -> None:
    model = policy()

    def fails(scored: Any, rollouts: Any) -> Any:
        assert is_in_own_pass(scored.hidden)
        assert is_in_own_pass(scored.hidden.weight)
        assert not is_in_own_pass(policy().hidden)
        raise MemoryError

    with pytest.raises(MemoryError):
        sonde.PolicyEntropyProbe(model, token_statistics=fails).measure(drawn(policy(), 0, 4, seed=1))
    assert not any(map(is_in_own_pass, (*model.modules(), *model.parameters())))
