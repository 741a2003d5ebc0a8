"""A device without fp64 keeps sums in fp32: it reads what fp64 reads, up to rounding, or says why it cannot.

`test_host_reads.py` has whole runs there: pieces, examples, metrics, clips, a GradScaler.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from sonde.batch_size.taps.leaf_hooks import GradientSummary
from sonde.batch_size.taps.metric import Euclidean, add_parts
from sonde.batch_size.taps.window_sums import WindowSums, read_rows
from sonde.batch_size.taps.witness import Witness
from sonde.batch_size.units import piece_counts
from sonde.gradient_norm import global_norm
from sonde.parallel import devices
from sonde.parallel.data_ranks import DataRanks
from tests.batch_size.cut_loops import assert_near, train
from tests.batch_size.loops import Recording, attached, batch, mean_loss, small_model
from tests.batch_size.set_ups import Loop
from tests.pretend_device import DEVICE, PretendDevice
from tests.ranks import Ranks


@contextlib.contextmanager
def no_float64() -> Iterator[None]:
    """sonde takes the CPU for a device without fp64; ranks of gloo have no other device."""
    with contextlib.ExitStack() as patches:
        for module in (devices, global_norm):
            patches.enter_context(mock.patch.object(module, "has_float64", return_value=False))
        yield


def test_pieces_that_fp32_cannot_tell_apart_give_a_reason() -> None:
    """In fp64, the same data in all pieces show as differences of rounding only. In fp32, noise could be as small."""
    with PretendDevice(has_float64=False):
        model = small_model().to(DEVICE)
        with attached(model) as probe:
            x, y = (t.to(DEVICE) for t in batch(4, torch.Generator(device="cpu").manual_seed(0)))
            for _ in range(2):
                for _ in range(3):
                    with probe.piece(units=4):
                        mean_loss(model, x, y).backward()
                probe.step()
                model.zero_grad()
            reading = probe.reading()
    assert (reading.windows, reading.b_simple) == (0, None)
    (reason,) = reading.dropped
    assert "too little for sums in fp32, and this device has no fp64: do they hold the same data?" in reason


def test_numbers_that_the_host_knows_are_not_rounded() -> None:
    sink = Recording()
    with PretendDevice(has_float64=False):
        model = small_model().to(DEVICE)
        with attached(model, sinks=[sink], log_every=1) as probe:
            for _ in range(2):
                x, y = (t.to(DEVICE) for t in batch(4, torch.Generator(device="cpu").manual_seed(0)))
                with probe.piece(units=4):
                    mean_loss(model, x, y).backward()
                probe.log(rate=0.1, on_device=torch.tensor(3.0, device="cpu").to(DEVICE))
            probe.step()
    metrics = sink.of_kind("reading")[0]["metrics"]
    assert (metrics["rate"], metrics["on_device"]) == (0.1, 3.0)


def squares_of(n_parameters: int, n_pieces: int) -> tuple[float, float]:
    """S and B of one group of parameters whose sizes differ by 1e4, by the probe's own sums."""
    generator = torch.Generator().manual_seed(0)
    truth = 10.0 ** (4.0 * torch.rand(n_parameters, 1, generator=generator) - 3.0) * torch.ones(4)
    owners, total, cpu = tuple(range(n_parameters)), torch.zeros(n_parameters, 4).double(), torch.device("cpu")
    witness = Witness([()])
    sums = WindowSums(
        [0] * n_parameters, n_groups=1, metrics=[Euclidean()], witness=witness, device=cpu, data=DataRanks()
    )
    no_elements = torch.zeros(witness.size).double()
    for _ in range(n_pieces):
        piece = truth * (1.0 + torch.randn(truth.shape, generator=generator))
        total += piece
        squares = add_parts(n_parameters, [(owners, piece.norm(dim=1))], cpu)
        sums.add(GradientSummary(squares[None], no_elements.to(squares)), piece_counts(2.0, 1.0, None))
    big = sums.per_group(add_parts(n_parameters, [(owners, total.norm(dim=1).float())], cpu)[None])
    [row] = read_rows(sums.end_window({}) | {"sq_norm_big": big, "witness_final": no_elements}, ["squares"], {})
    return row.small, row.big


@pytest.mark.parametrize(("n_parameters", "n_pieces"), [(1000, 300), (10_000, 4), (10, 3000)])
def test_squares_lose_a_hundred_thousandth(n_parameters: int, n_pieces: int) -> None:
    """docs/limits.md: 1e-5 for 10,000 parameters, added up one after another. 2e-5 leaves room for another order."""
    exact = squares_of(n_parameters, n_pieces)
    with no_float64():
        assert squares_of(n_parameters, n_pieces) == pytest.approx(exact, rel=2e-5)


def on_ranks(loop: Loop) -> dict[str, Any]:
    with no_float64():
        return train(loop, probed=True)


@pytest.mark.parametrize("loop", [Loop("ddp", clips=False), Loop(clips=False)], ids=str)
def test_ranks_sum_in_fp32(ranks2: Ranks, loop: Loop) -> None:
    results = ranks2(on_ranks, loop)
    for result in results:
        assert result["alerts"] == {}
        for window, exact in zip(result["windows"], results[0]["by hand"], strict=True):
            # Sums of a few squares lose 1e-7 each, and tr Σ and |G|² are a tenth of what they are differences of.
            assert_near(loop, "fp32", window["euclidean"], exact["euclidean"], 1.0)


def a_clip_on_ranks() -> str:
    with no_float64(), pytest.raises(ValueError, match="fp64") as refused:
        train(Loop(), probed=True)
    return str(refused.value)


def test_a_norm_over_ranks_without_fp64_is_refused(ranks2: Ranks) -> None:
    """The ranks are compared by whole numbers that fp32 cannot add exactly: a false alarm would stop a run."""
    for message in ranks2(a_clip_on_ranks):
        assert "a norm over several ranks needs fp64, which cpu has not: clip by torch.nn.utils" in message


class Scalars(nn.Module):
    """Four parameters of one element; the gradient of each is the mean of the input."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(1, 1, bias=False) for _ in range(4)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return sum(layer(x) for layer in self.layers)  # type: ignore[return-value]


def windows_of(device: torch.device, size: float, weight: float) -> tuple[int, list[str]]:
    """Windows that were read, and why others were dropped; each parameter has gradients of about this size."""
    model = Scalars().to(device)
    with attached(model) as probe:
        for x in torch.linspace(0.9, 1.1, 8, device="cpu").tolist():
            with probe.piece(units=1, weight=weight):
                (model(torch.full((1, 1), x, device=device)).sum() * size).backward()
        probe.step()
        reading = probe.reading()
    return reading.windows, list(reading.dropped)


@pytest.mark.parametrize(
    ("size", "weight", "match"),
    [
        (1e19, 1.0, "so large (above 1e19) that its squares overflow fp32"),
        (1e18, 1e-3, "so large (above 1e19) that its squares overflow fp32"),
        (2.65e18, 1.0, "squares of the gradient leave the range of fp32: scale the loss"),
    ],
    ids=["one piece's", "over small weights", "the window's"],
)
def test_sums_of_squares_that_overflow_fp32_give_a_reason(size: float, weight: float, match: str) -> None:
    """The square of each parameter's gradient in each piece is within fp32, and a sum of them is not."""
    assert windows_of(torch.device("cpu"), size, weight) == (1, [])
    with PretendDevice(has_float64=False):
        n_windows, reasons = windows_of(DEVICE, size, weight)
    assert n_windows == 0
    assert match in " ".join(reasons)
