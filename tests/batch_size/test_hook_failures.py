"""An error inside a hook of sonde's never ends the user's backward or step: the window is dropped, with the reason."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import sonde
from sonde.batch_size import hooks
from sonde.batch_size.per_example.piece import PieceSums
from sonde.batch_size.step_watch import StepWatch
from sonde.batch_size.taps.leaf_hooks import PieceGradient
from sonde.batch_size.taps.tap import Tap
from tests.batch_size.loops import attached, batch, mean_loss, small_model
from tests.ranks import Ranks

DROPPED = "sonde failed while it read a gradient: the logger 'sonde' has shown the error with its traceback"


@pytest.fixture(autouse=True)
def _logged_nothing_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hooks, "_logged", set())


def _trained(
    model: nn.Module, probe: sonde.NoiseScaleProbe | None, *, declared: bool, n_pieces: int = 2, windows: int = 3
) -> dict[str, Tensor]:
    optimizer, generator = torch.optim.AdamW(model.parameters(), lr=1e-2), torch.Generator().manual_seed(1)
    for _ in range(windows):
        for _ in range(n_pieces):
            with probe.piece(units=4) if probe is not None and declared else contextlib.nullcontext():
                mean_loss(model, *batch(4, generator)).backward()
        if probe is not None:
            probe.step()
        optimizer.step()
        optimizer.zero_grad()
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def _assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert all(torch.equal(found[name], value) for name, value in expected.items())


@contextlib.contextmanager
def _failing(owner: type, method: str) -> Any:
    """The method of that class raises, as a bug would, or a GPU without memory."""
    with mock.patch.object(owner, method, side_effect=torch.OutOfMemoryError("no memory left")) as failing:
        yield failing
    assert failing.called


@pytest.mark.parametrize("declared", [True, False])
@pytest.mark.parametrize(("owner", "method"), [(PieceGradient, "take"), (Tap, "_opens_backward")])
def test_leaf_hooks(owner: type, method: str, declared: bool, caplog: pytest.LogCaptureFixture) -> None:
    expected = _trained(small_model(), None, declared=False)
    model = small_model()
    with attached(model, units_per_piece=4, per_example="never") as probe, _failing(owner, method):
        _assert_same(_trained(model, probe, declared=declared), expected)
        assert probe.reading().dropped == {DROPPED: 3}
    (logged,) = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert logged.getMessage().endswith("without what it was to measure: OutOfMemoryError: no memory left")
    assert logged.exc_info is not None


def test_measuring_goes_on_with_the_next_window() -> None:
    model = small_model()
    with attached(model, units_per_piece=4, per_example="never") as probe:
        with _failing(Tap, "_opens_backward"):
            _trained(model, probe, declared=True, windows=1)
        _trained(model, probe, declared=True, windows=2)
        reading = probe.reading()
    assert (reading.windows, reading.dropped) == (2, {DROPPED: 1})


def _raises(layer: nn.Module, inputs: tuple[Any, ...], grad: Tensor) -> dict[str, Tensor]:
    raise KeyError("a mistake in the rule")


def _bug() -> Any:
    return _failing(PieceSums, "add_use")


@pytest.mark.parametrize(
    ("failing", "rules", "said"),
    [
        (_bug, None, "reading them failed (OutOfMemoryError: no memory left)"),
        (contextlib.nullcontext, {nn.Linear: _raises}, "reading them failed (KeyError: 'a mistake in the rule')"),
    ],
    ids=["bug", "rule"],
)
@pytest.mark.parametrize("declared", [True, False])
def test_single_examples(
    failing: Callable[[], Any], rules: Any, said: str, declared: bool, caplog: pytest.LogCaptureFixture
) -> None:
    expected = _trained(small_model(), None, declared=False, n_pieces=1)
    model = small_model()
    options = {"units_per_piece": 4, "per_example": "always", "rules": rules}
    with attached(model, **options) as probe, failing():
        _assert_same(_trained(model, probe, declared=declared, n_pieces=1), expected)
        reading = probe.reading()
    assert reading.windows == 0
    assert said in str(reading.reason)
    assert len([record for record in caplog.records if record.exc_info]) == 1


def test_a_step_of_the_optimizer(caplog: pytest.LogCaptureFixture) -> None:
    expected = _trained(small_model(), None, declared=False)
    model = small_model()
    with _failing(StepWatch, "_before_step"), attached(model) as probe:
        _assert_same(_trained(model, probe, declared=True), expected)
        assert probe.reading().windows == 3
    assert "sonde failed inside a hook" in caplog.text


def _on_ranks(owner: type, method: str) -> tuple[bool, dict[str, int]]:
    model = DistributedDataParallel(small_model())
    expected = _trained(model, None, declared=False, n_pieces=1)
    model = DistributedDataParallel(small_model())
    probe = sonde.attach(model, unit="rows", units_per_piece=4, every=1, verbose=False)
    # Only one of the ranks fails, and the other must not wait for it.
    with probe, _failing(owner, method) if dist.get_rank() == 0 else contextlib.nullcontext():
        found = _trained(model, probe, declared=False, n_pieces=1)
        return all(torch.equal(found[name], value) for name, value in expected.items()), dict(probe.reading().dropped)


@pytest.mark.parametrize(("owner", "method"), [(PieceGradient, "summary"), (Tap, "_opens_backward")])
def test_one_rank_fails(ranks2: Ranks, owner: type, method: str) -> None:
    for is_same, dropped in ranks2(_on_ranks, owner, method):
        assert is_same
        assert dropped == {DROPPED: 3}
