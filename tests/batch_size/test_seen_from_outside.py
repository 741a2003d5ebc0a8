"""What a probe is told from outside a loop: zeroed gradients, the clip of the loop itself, weights by forward."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sonde
from sonde.batch_size.forward_units import CountsOfForward
from tests.batch_size.loops import attached, batch, mean_loss, small_model

PIECES = (4, 7, 2)


def parts(probe: sonde.NoiseScaleProbe) -> list[float]:
    reading = probe.reading()
    assert reading.trace_cov is not None
    assert reading.grad_sq is not None
    return [reading.windows, reading.trace_cov, reading.grad_sq]


def window(model: nn.Module, generator: torch.Generator) -> None:
    for n in PIECES:
        mean_loss(model, *batch(n, generator)).backward()


@pytest.mark.parametrize("wrong_units", [False, True])
def test_a_discarded_window_leaves_nothing_behind(wrong_units: bool) -> None:
    """Nor does a backward whose units were not clear."""
    numbers = []
    for n_extra in (0, 1):
        model, generator = small_model(), torch.Generator().manual_seed(0)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.005)
        with attached(model, optimizer, units_per_piece="first dim") as probe:
            for _ in range(4):
                for _ in range(n_extra):
                    window(model, torch.Generator().manual_seed(9))
                    if wrong_units:
                        other = torch.Generator().manual_seed(1)
                        (mean_loss(model, *batch(3, other)) + mean_loss(model, *batch(3, other))).backward()
                    assert probe.n_pieces == 3
                    model.zero_grad()
                    probe.discard()
                    assert probe.n_pieces == 0
                window(model, generator)
                probe.step()
                optimizer.step()
                optimizer.zero_grad()
            assert probe.reading().dropped == {}
            numbers.append(parts(probe))
    assert numbers[0] == numbers[1]


def test_a_forward_that_waits_for_its_backward_is_kept() -> None:
    """Lightning zeroes gradients between the two."""
    model = small_model()
    with attached(model, units_per_piece="first dim") as probe:
        for _ in range(3):
            for n in PIECES:
                loss = mean_loss(model, *batch(n, torch.Generator().manual_seed(n)))
                if n == PIECES[0]:
                    model.zero_grad()
                    probe.discard()
                loss.backward()
            probe.step()
        assert (probe.reading().windows, probe.reading().dropped) == (3, {})


def test_the_loops_own_clip_is_logged_as_the_probes(tmp_path: Path) -> None:
    logged = []
    for own in (False, True):
        model, generator = small_model(), torch.Generator().manual_seed(0)
        folder = tmp_path / str(own)
        with sonde.attach(model, unit="rows", units_per_piece="first dim", log=folder, verbose=False) as probe:
            for k in range(5):
                window(model, generator)
                max_norm = 1e-3 if k < 2 else 1e6
                if own:
                    probe.note_clip(nn.utils.clip_grad_norm_(model.parameters(), max_norm), max_norm)
                    probe.step()
                else:
                    probe.clip_grad_norm_(max_norm)
                model.zero_grad()
        logged.append(sonde.read_run(folder).readings[-1].metrics)
    for name in ("grad/norm", "grad/clip_fraction"):
        assert logged[0][name] == pytest.approx(logged[1][name], rel=1e-6)
    assert logged[1]["grad/clip_fraction"] == pytest.approx(0.4)


def test_a_forward_may_show_weights_too() -> None:
    """As `piece(weight=..., unit_weights=...)`, whose equations have oracles of their own."""

    def weights(x: Tensor) -> Tensor:
        return 1 + x[:, 0].abs()

    def counts(x: Tensor) -> CountsOfForward:
        return CountsOfForward(None, weights(x).sum(), weights(x))

    def loss(model: nn.Module, x: Tensor, y: Tensor) -> Any:
        return ((model(x) - y).square().mean(1) * weights(x)).sum()

    numbers = []
    for declares in (False, True):
        model, generator = small_model(), torch.Generator().manual_seed(0)
        with attached(model, units_per_piece=1 if declares else counts) as probe:
            for _ in range(4):
                for n in PIECES:
                    x, y = batch(n, generator)
                    if declares:
                        with probe.piece(weight=weights(x).sum(), unit_weights=weights(x)):
                            loss(model, x, y).backward()
                    else:
                        loss(model, x, y).backward()
                probe.step()
                model.zero_grad()
            numbers.append(parts(probe))
    assert numbers[0] == pytest.approx(numbers[1], rel=1e-12)
