"""Pieces that are counted in several units: the first is the independent sample, and the others convert the results."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import sonde
from sonde.runs.report.verdicts import batch_size_panel
from sonde.stats.sealed_state import sealed
from sonde.wording import number
from tests.batch_size.cuts import made
from tests.batch_size.loops import Recording, attached, batch, contents_of, mean_loss, small_model
from tests.batch_size.set_ups import Loop
from tests.batch_size.unit_loops import known, rows, train
from tests.ranks import Ranks

UNITS = ("rows", "tokens")


def in_both(n: int) -> dict[str, Any]:
    """48 tokens of 13 rows in a window."""
    return {"units": {"tokens": {4: 10, 7: 31, 2: 7}[n], "rows": n}}


def in_tensors(n: int) -> dict[str, Any]:
    return {"units": {name: torch.tensor(float(count)) for name, count in in_both(n)["units"].items()}}


@pytest.mark.parametrize("declares", [in_both, in_tensors])
def test_the_estimate_is_that_of_the_first_unit_and_the_rest_is_converted(declares: Any, tmp_path: Path) -> None:
    model = small_model()
    with attached(model) as probe:
        train(probe, model, windows=20, declares=rows)
        alone = probe.reading()
    model, log = small_model(), sonde.RunLog(sonde.JsonlSink(tmp_path), every=5)
    with attached(model, unit=UNITS, log=log) as probe:
        train(probe, model, windows=20, declares=declares)
        reading, metrics, state = probe.reading(), probe.metrics(), contents_of(probe)
    assert known(reading) == pytest.approx(known(alone), rel=1e-9)  # kernels round by where memory lies
    assert reading.status == "resolved"
    converted, per_row = reading.in_unit("tokens"), 48 / 13
    assert (converted.b_simple, converted.low) == pytest.approx((reading.b_simple * per_row, reading.low * per_row))
    assert converted.units_per_window == pytest.approx(48)
    assert metrics["gns/b_simple_tokens"] == pytest.approx(converted.b_simple, rel=1e-9)
    assert metrics["gns/b_simple_high_tokens"] == pytest.approx(converted.high, rel=1e-9)
    assert metrics["gns/units_per_window_tokens"] == pytest.approx(48)
    assert f"] = {number(converted.b_simple)} tokens" in str(reading)
    assert reading.in_unit("rows").b_simple == reading.b_simple
    with pytest.raises(ValueError, match="counted in rows, tokens, got 'words'"):
        reading.in_unit("words")
    basis = batch_size_panel(sonde.read_run(tmp_path)).basis
    assert basis.endswith(f" In tokens, the batch is 48, the noise scale {converted.b_simple:.3g}.")
    with attached(small_model(), unit=UNITS) as again:
        again.load_state_dict(sealed(state))
        assert again.reading().in_unit("tokens") == converted


def test_the_log_declares_and_writes_each_unit(capsys: pytest.CaptureFixture[str]) -> None:
    model, sink = small_model(), Recording()
    with attached(model, unit=(*UNITS, "loss_tokens"), log=sonde.RunLog(sink, every=5), verbose=True) as probe:
        train(probe, model, windows=15, declares=lambda n: {"units": {"rows": 4, "tokens": 20, "loss_tokens": 10}})
        reading = probe.reading()
    printed = capsys.readouterr().err
    assert "rows, also counted in tokens, loss_tokens" in printed
    assert "12 rows, 60 tokens, 30 loss_tokens in all" in printed
    (header,) = sink.of_kind("header")
    assert header["unit"] == "rows"
    assert header["metrics"]["gns/b_simple_loss_tokens"]["unit"] == "loss_tokens"
    last = sink.of_kind("reading")[-1]["metrics"]
    assert (last["gns/units_per_window_tokens"], last["gns/units_per_window_loss_tokens"]) == pytest.approx((60, 30))
    assert set(reading.metrics()) <= set(header["metrics"])


def test_each_way_to_count_a_piece_in_several_units() -> None:
    model, generator = small_model(), torch.Generator().manual_seed(0)
    with attached(model, unit=UNITS, units_per_piece={"rows": 4, "tokens": 12}) as probe:
        # The mean of 3, 3 and 6 at last, of which the last counts a little more.
        weights = {"units": {"tokens": 24}, "unit_weights": [1.0, 2.0, 1.0, 1.0]}
        for given, expected in ((None, 3.0), ({}, 3.0), (weights, 4.02)):
            for _ in range(2):
                with probe.piece(**given) if given is not None else contextlib.nullcontext():  # type: ignore[arg-type]
                    mean_loss(model, *batch(4, generator)).backward()
            probe.step()
            model.zero_grad()
            assert probe.reading().further_units == {"tokens": pytest.approx(expected, abs=0.005)}
        assert not probe.reading().dropped
        counts = probe._pieces._counts_of(2, {"rows": [4, 2], "tokens": 9}, 1.0, None)
    assert [(c.units, c.further) for c in counts] == [(4.0, (9.0,)), (2.0, (9.0,))]


def uneven_on_ranks() -> tuple[Mapping[str, float | None], float | None]:
    """Rank 0 has two pieces of 4 rows and 8 tokens, rank 1 three of 2 rows and 10, 11 and 12 tokens."""
    rank, model = dist.get_rank(), DistributedDataParallel(small_model())
    with attached(model, unit=UNITS) as probe:
        for k in range(3):
            counts = {"rows": (4, 2)[rank], "tokens": (8, 10 + k)[rank]}
            if (rank, k) == (0, 0):
                continue
            with model.no_sync() if k < 2 else torch.enable_grad(), probe.piece(units=counts):
                model(torch.randn(counts["rows"], 12)).square().mean().backward()
        probe.step()
        reading = probe.reading()
        assert not reading.dropped
        return reading.further_units, reading.units_per_window


def shared_by_ranks() -> tuple[Mapping[str, float | None], float | None]:
    cut = made(Loop("tp"))
    with attached(cut.model, unit=UNITS) as probe:
        for k in range(2):
            with probe.piece(units={"rows": 4, "tokens": 24}):
                cut.loss(0, k).backward()
        probe.step()
        return probe.reading().further_units, probe.reading().units_per_window


def test_ranks_add_up_and_a_piece_that_ranks_share_counts_once(ranks2: Ranks) -> None:
    assert ranks2(uneven_on_ranks) == [({"tokens": pytest.approx((2 * 8 + 33) / 14)}, 2 * 4 + 3 * 2)] * 2
    assert ranks2(shared_by_ranks) == [({"tokens": 6.0}, 8)] * 2


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
            train(probe, model, windows=3, declares=in_both)
        with pytest.raises((ValueError, RuntimeError), match=message), probe.piece(units=units):
            pass


@pytest.mark.parametrize(
    "unit", [(), ("rows", "rows"), ("rows", "loss tokens"), ("rows", "low"), ("rows", ""), 3, ("rows", 3)], ids=str
)
def test_names_that_cannot_be_are_refused(unit: Any) -> None:
    with pytest.raises(ValueError, match=r"unit must name|further unit's name|name of its own"):
        attached(small_model(), unit=unit)


@pytest.mark.parametrize("unit", ["tokens", "Tokens", ("tokens", "sequences")])
def test_tokens_are_no_independent_samples(unit: Any) -> None:
    with pytest.raises(ValueError, match=r"tokens of one sequence depend .* unit=\('sequences', 'tokens'\) with piece"):
        attached(small_model(), unit=unit)
    attached(small_model(), unit=("sequences", "tokens")).close()
