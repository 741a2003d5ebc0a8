"""The message that attach prints."""

from __future__ import annotations

from typing import Any

import numpy
import pytest
import torch
from torch import nn

import sonde
from sonde.batch_size.setup import NoiseScaleOptions
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


@pytest.mark.parametrize("three", [3, numpy.int64(3), torch.tensor(3)])
def test_a_whole_number_may_be_of_another_type(three: int) -> None:
    log = sonde.RunLog(every=three)
    options = NoiseScaleOptions("rows", every=three)
    assert [(n, type(n)) for n in (log.every, options.every)] == [(3, int)] * 2
    of_policy = sonde.EntropyChangeOptions(every=three, micro_batch_prompts=three)
    assert [(n, type(n)) for n in (of_policy.every, of_policy.micro_batch_prompts)] == [(3, int)] * 2


@pytest.mark.parametrize("wrong", [True, numpy.float64(3.0), torch.tensor(3.0), numpy.int64(0), [3], "3"])
def test_what_is_no_whole_number_is_refused(wrong: Any) -> None:
    for make in (lambda: attached(small_model(), every=wrong), lambda: sonde.RunLog(every=wrong)):
        with pytest.raises(ValueError, match="every must be a whole number of windows from 1 up, got"):
            make()


class WithScale(nn.Module):
    """A parameter of the model itself, besides those of a layer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.scale = nn.Parameter(torch.ones(6))
        self.layer = nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.layer(x * self.scale)
        return out


def test_a_group_without_a_name_leaves_the_whole_models_reading_alone() -> None:
    readings = []
    for groups in (None, lambda name: name.rpartition(".")[0]):
        model, generator = WithScale(), torch.Generator().manual_seed(0)
        with attached(model, groups=groups) as probe:
            for _ in range(40):
                for _ in range(4):
                    x = torch.randn(8, 6, generator=generator)
                    with probe.piece(units=8):
                        (model(x) - x[:, :3] - torch.randn(8, 3, generator=generator)).square().mean().backward()
                probe.step()
                model.zero_grad()
            readings.append(probe.reading())
    whole, split = readings
    assert split.b_simple == pytest.approx(whole.b_simple, rel=1e-6)
    assert split.trace_cov == pytest.approx(whole.trace_cov, rel=1e-6)
    assert set(split.groups) == {"", "layer"}
    assert sum(g.trace_cov or 0.0 for g in split.groups.values()) == pytest.approx(whole.trace_cov, rel=1e-6)


def test_the_message_about_group_names_shows_the_one_that_is_wrong() -> None:
    with pytest.raises(ValueError, match=r"a str, for each parameter, got 3 for '3.weight': return"):
        attached(small_model(), groups=lambda name: 3 if name.startswith("3") else name)
