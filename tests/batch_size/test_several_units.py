"""Pieces that are counted in several units: the first is the independent sample, and the others convert the results."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import sonde
from sonde import NoiseScaleProbe
from sonde.runs.report.verdicts import batch_size_panel
from sonde.stats.sealed_state import sealed
from sonde.wording import number
from tests.batch_size.cuts import made
from tests.batch_size.loops import Recording, attached, batch, contents_of, mean_loss, small_model
from tests.batch_size.set_ups import Loop
from tests.ranks import Ranks

UNITS = ("rows", "tokens")
COUNTS = ((4, 10), (4, 31), (2, 7))
"""Rows and tokens of the pieces of each window."""


def train(probe: NoiseScaleProbe, model: Any, windows: int, *, seed: int = 0, as_tensors: bool = False) -> None:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(windows):
        for rows, n_tokens in COUNTS:
            counts: dict[str, Any] = {"tokens": n_tokens, "rows": rows}
            if as_tensors:
                counts = {name: torch.tensor(float(n)) for name, n in counts.items()}
            with probe.piece(units=counts if len(probe._tracker.further_units) else counts["rows"]):
                mean_loss(model, *batch(rows, generator)).backward()
        probe.step()
        model.zero_grad()


def known(reading: sonde.NoiseScaleReading) -> tuple[Any, ...]:
    return reading.b_simple, reading.low, reading.high, reading.trace_cov, reading.grad_sq, reading.units_per_window


@pytest.mark.parametrize("as_tensors", [False, True])
def test_the_estimate_is_that_of_the_first_unit_and_the_rest_is_converted(as_tensors: bool) -> None:
    model = small_model()
    with attached(model, unit="rows") as plain:
        train(plain, model, 20)
        alone = plain.reading()
    with attached(model, unit=UNITS) as several:
        train(several, model, 20, as_tensors=as_tensors)
        reading = several.reading()
        metrics = several.metrics()
    assert known(reading) == pytest.approx(known(alone), rel=1e-9)  # kernels round by where memory lies
    assert reading.status == "resolved"
    per_row = 48 / 10  # Σ tokens over Σ rows
    converted = reading.in_unit("tokens")
    assert converted.b_simple == pytest.approx(reading.b_simple * per_row, rel=1e-12)
    assert converted.low == pytest.approx(reading.low * per_row, rel=1e-12)
    assert converted.units_per_window == pytest.approx(48)
    assert metrics["gns/b_simple_tokens"] == pytest.approx(converted.b_simple, rel=1e-9)
    assert metrics["gns/b_simple_high_tokens"] == pytest.approx(converted.high, rel=1e-9)
    assert metrics["gns/units_per_window_tokens"] == pytest.approx(48)
    assert metrics["gns/units_per_window"] == pytest.approx(10)
    assert f"] = {number(converted.b_simple)} tokens" in str(reading)
    assert reading.in_unit("rows").b_simple == reading.b_simple
    with pytest.raises(ValueError, match="counted in rows, tokens, got 'words'"):
        reading.in_unit("words")


def test_the_log_declares_and_writes_each_unit(capsys: pytest.CaptureFixture[str]) -> None:
    model, sink = small_model(), Recording()
    with attached(model, unit=(*UNITS, "loss_tokens"), log=sonde.RunLog(sink, every=5), verbose=True) as probe:
        with pytest.raises(ValueError, match="units must be counted in rows, tokens, loss_tokens, got tokens, rows"):
            train(probe, model, 1)
        for _ in range(15):
            for _ in range(2):
                with probe.piece(units={"rows": 4, "tokens": 20, "loss_tokens": 10}):
                    mean_loss(model, *batch(4, torch.Generator().manual_seed(0))).backward()
            probe.step()
            model.zero_grad()
        reading = probe.reading()
    printed = capsys.readouterr().err
    assert "rows, also counted in tokens, loss_tokens" in printed
    assert "8 rows, 40 tokens, 20 loss_tokens in all" in printed
    (header,) = sink.of_kind("header")
    assert header["unit"] == "rows"
    assert header["metrics"]["gns/b_simple_loss_tokens"]["unit"] == "loss_tokens"
    last = sink.of_kind("reading")[-1]["metrics"]
    assert last["gns/units_per_window_tokens"] == pytest.approx(40)
    assert last["gns/units_per_window_loss_tokens"] == pytest.approx(20)
    assert set(reading.metrics()) <= set(header["metrics"])


def test_the_report_says_the_verdict_in_each_unit(tmp_path: Path) -> None:
    model = small_model()
    with attached(model, unit=UNITS, log=sonde.RunLog(sonde.JsonlSink(tmp_path), every=5)) as probe:
        train(probe, model, 20)
        b_simple = probe.reading().in_unit("tokens").b_simple
    basis = batch_size_panel(sonde.read_run(tmp_path)).basis
    assert basis.endswith(f" In tokens, the batch is 48, the noise scale {b_simple:.3g}.")


def test_each_way_to_count_a_piece() -> None:
    model = small_model()
    generator = torch.Generator().manual_seed(0)
    with attached(model, unit=UNITS, units_per_piece={"rows": 4, "tokens": 12}) as probe:
        for _ in range(2):
            mean_loss(model, *batch(4, generator)).backward()  # no piece() at all
        probe.step()
        model.zero_grad()
        assert probe.reading().further_units == {"tokens": pytest.approx(3.0)}
        for _ in range(2):
            with probe.piece():
                mean_loss(model, *batch(4, generator)).backward()
        probe.step()
        model.zero_grad()
        assert probe.reading().further_units == {"tokens": pytest.approx(3.0)}
        for _ in range(2):
            with probe.piece(units={"tokens": 24}, unit_weights=[1.0, 2.0, 1.0, 1.0]):
                mean_loss(model, *batch(4, generator)).backward()
        probe.step()
        # The mean of 3, 3 and 6, of which the last counts a little more.
        assert probe.reading().further_units == {"tokens": pytest.approx(4.02, abs=0.005)}
        assert not probe.reading().dropped
        counts = probe._pieces._counts_of(2, {"rows": [4, 2], "tokens": 9}, 1.0, None)
    assert [(c.units, c.further) for c in counts] == [(4.0, (9.0,)), (2.0, (9.0,))]


def _uneven() -> tuple[Mapping[str, float | None], float | None]:
    """Rank 0 has pieces of 4 rows and 8 tokens, rank 1 more of 2 rows and 10 tokens, and one of them no tokens."""
    rank, torch_model = dist.get_rank(), small_model()
    model = DistributedDataParallel(torch_model)
    with attached(model, unit=UNITS) as probe:
        for k in range(3):
            counts = {"rows": (4, 2)[rank], "tokens": (8, 10 + k)[rank]}
            if rank == 0 and k == 0:
                continue
            with model.no_sync() if k < 2 else torch.enable_grad(), probe.piece(units=counts):
                model(torch.randn(counts["rows"], 12)).square().mean().backward()
        probe.step()
        reading = probe.reading()
        assert not reading.dropped
        return reading.further_units, reading.units_per_window


def test_ranks_add_up(ranks2: Ranks) -> None:
    for further, units in ranks2(_uneven):
        assert units == 2 * 4 + 3 * 2
        assert further == {"tokens": pytest.approx((2 * 8 + 33) / 14)}


def _ranks_that_share_pieces() -> Mapping[str, float | None]:
    cut = made(Loop("tp"))
    with attached(cut.model, unit=UNITS) as probe:
        for k in range(2):
            with probe.piece(units={"rows": 4, "tokens": 24}):
                cut.loss(0, k).backward()
        probe.step()
        assert probe.reading().units_per_window == 8
        return probe.reading().further_units


def test_a_piece_that_ranks_share_counts_once(ranks2: Ranks) -> None:
    assert ranks2(_ranks_that_share_pieces) == [{"tokens": 6.0}] * 2


def test_the_state_keeps_the_counts() -> None:
    model = small_model()
    with attached(model, unit=UNITS) as probe:
        train(probe, model, 8)
        state, reading = contents_of(probe), probe.reading()
    with attached(model, unit=UNITS) as probe:
        probe.load_state_dict(sealed(state))
        assert probe.reading().in_unit("tokens") == reading.in_unit("tokens")


@pytest.mark.parametrize(
    ("units", "message"),
    [
        (8, "units must be counted in each of rows, tokens, got 8"),
        (None, "number of units in a piece is not known"),
        ({"tokens": 8}, "units must be counted in rows too"),
        ({"rows": 8}, "units must be counted in rows, tokens, got rows"),
        ({"rows": 8, "tokens": 0}, "units must be positive and finite, got 0"),
        ({"rows": 8, "tokens": 9, "words": 3}, "got rows, tokens, words"),
    ],
    ids=str,
)
@pytest.mark.parametrize("is_measured", [True, False])
def test_wrong_counts_are_refused_in_every_window(units: Any, message: str, is_measured: bool) -> None:
    model = small_model()
    with attached(model, unit=UNITS, every=1 if is_measured else 1000) as probe:
        if not is_measured:
            train(probe, model, 3)
            assert probe.reading().windows < 3
        with pytest.raises((ValueError, RuntimeError), match=message), probe.piece(units=units):
            pass


@pytest.mark.parametrize(
    "unit", [(), ("rows", "rows"), ("rows", "loss tokens"), ("rows", "low"), ("rows", ""), 3, ("rows", 3)], ids=str
)
def test_names_that_cannot_be_are_refused(unit: Any) -> None:
    with pytest.raises(ValueError, match=r"unit must name|further unit's name|name of its own"):
        attached(small_model(), unit=unit)
    with pytest.raises(ValueError, match="units_per_piece must be positive"):
        attached(small_model(), unit=UNITS, units_per_piece={"rows": 4, "tokens": -1})


@pytest.mark.parametrize("unit", ["tokens", "Tokens", ("tokens", "sequences")])
def test_tokens_are_no_independent_samples(unit: Any) -> None:
    with pytest.raises(ValueError, match=r"tokens of one sequence depend .* unit=\('sequences', 'tokens'\) with piece"):
        attached(small_model(), unit=unit)
    attached(small_model(), unit=("sequences", "tokens")).close()
