"""A restart goes on with pieces or examples as the run before had chosen, and compares again if pieces are others."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn

import sonde
from tests.batch_size.loops import attached, batch, mean_loss, small_model


def run(model: nn.Module, probe: sonde.NoiseScaleProbe, windows: Sequence[int], sizes: Sequence[int]) -> None:
    for window in windows:
        generator = torch.Generator().manual_seed(window)
        for n in sizes:
            with probe.piece(units=n):
                mean_loss(model, *batch(n, generator)).backward()
        probe.step()
        model.zero_grad()


def numbers(reading: sonde.NoiseScaleReading) -> tuple[float | None, ...]:
    return reading.trace_cov, reading.grad_sq, reading.low, reading.high, reading.u


@pytest.mark.parametrize(("sizes", "choice"), [((32, 32), "examples"), ((1,) * 8, "pieces"), ((24,), "examples")])
def test_a_restart_equals_the_run_that_was_not_interrupted(
    sizes: tuple[int, ...], choice: str, capsys: pytest.CaptureFixture[str]
) -> None:
    model = small_model()
    with attached(model, per_example="auto", log_every=1) as whole:
        run(model, whole, range(24), sizes)
        state = json.loads(json.dumps(whole.state_dict()))
        run(model, whole, range(24, 40), sizes)
        expected = whole.reading()
    assert json.loads(state["json"])["mechanism"] == [choice, len(sizes)]
    with attached(model, per_example="auto", log_every=1, verbose=True) as resumed:
        resumed.load_state_dict(state)
        assert any(m._forward_hooks for m in model.modules() if m is not model) == (choice == "examples")
        run(model, resumed, range(24, 40), sizes)
        assert resumed._mechanism.choice == (choice, len(sizes))
        # The witness looks at other elements after a restart, so κ differs in the last bits.
        assert numbers(resumed.reading()) == pytest.approx(numbers(expected), rel=1e-6)
    assert "from now on" not in capsys.readouterr().err


@pytest.mark.parametrize("choice", ["pieces", "examples"])
def test_windows_with_other_pieces_are_compared_again(choice: str, capsys: pytest.CaptureFixture[str]) -> None:
    model = small_model()
    before, after = ((1,) * 8, (32, 32)) if choice == "pieces" else ((32, 32), (1,) * 8)
    with attached(model, per_example="auto", log_every=1) as probe:
        run(model, probe, range(24), before)
        state = probe.state_dict()
    with attached(model, per_example="auto", log_every=1, verbose=True) as resumed:
        resumed.load_state_dict(state)
        run(model, resumed, range(24, 50), after)
        resumed.reading()
        other = "examples" if choice == "pieces" else "pieces"
        assert resumed._mechanism.choice == (other, len(after))
    assert f"{'single ' * (other == 'examples')}{other} are read from now on" in capsys.readouterr().err


def test_a_choice_means_nothing_to_a_probe_that_may_not_choose() -> None:
    model = small_model()
    with attached(model, per_example="auto", log_every=1) as probe:
        run(model, probe, range(24), (32, 32))
        state = probe.state_dict()
    with attached(model, per_example="never", log_every=1) as resumed:
        resumed.load_state_dict(state)
        run(model, resumed, range(24, 30), (32, 32))
        assert resumed.reading().windows == 30


@pytest.mark.parametrize(
    "damage", [["pieces"], ["both", 2], ["pieces", 0], ["pieces", 2.0], "pieces", 3, ["pieces", True]]
)
def test_a_damaged_choice_is_refused(damage: Any) -> None:
    model = small_model()
    with attached(model, per_example="auto", log_every=1) as probe:
        run(model, probe, range(4), (4, 4))
        state = probe.state_dict()
        text = json.loads(state["json"]) | {"mechanism": damage}
        with pytest.raises(ValueError, match="mechanism must be 'pieces' or 'examples' and a number of pieces"):
            probe.load_state_dict({**state, "json": json.dumps(text)})
