"""How many units a piece has: counted in forward, or given; and backwards that have no forward of their own."""

from __future__ import annotations

import contextlib
import copy
import logging
import pickle
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import sonde
from sonde.batch_size.forward_units import CountsOfForward
from sonde.batch_size.taps.problems import HOW_TO_COUNT, Problem
from tests.batch_size.loops import attached, batch, mean_loss, small_model
from tests.batch_size.unit_loops import SIZES, known, rows, train
from tests.ranks import Ranks

BY_DEFAULT = object()


def reading_of(
    units_per_piece: Any, make: Callable[[], nn.Module] = small_model, **options: Any
) -> tuple[sonde.NoiseScaleReading, list[Tensor], dict[str, str]]:
    model = make()
    with attached(model, **({} if units_per_piece is BY_DEFAULT else {"units_per_piece": units_per_piece})) as probe:
        train(probe, model, **options)
        reading, alerts = probe.reading(), dict(probe.alerts)
    assert not model._forward_pre_hooks
    return reading, [p.detach().clone() for p in model.parameters()], alerts


@pytest.mark.parametrize(
    ("units", "declares"),
    [(BY_DEFAULT, None), (len, None), (lambda x: torch.tensor(float(len(x))), None), ("first dim", lambda n: {})],
)
def test_a_piece_has_the_units_of_its_forward(units: Any, declares: Any) -> None:
    """Whether each backward is a piece, or a declared piece leaves its units to its forward."""
    declared, weights, _ = reading_of(None, declares=rows)
    reading, weights_too, alerts = reading_of(units, declares=declares)
    assert known(reading) == pytest.approx(known(declared), rel=1e-9)
    assert reading.units_per_window == sum(SIZES)
    assert alerts == {}
    assert all(map(torch.equal, weights, weights_too))


class Reads(nn.Module):
    """The rows of the first part or of the second, as it is told."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.reads_second = nn.Linear(3, 1), False

    def forward(self, x: Tensor, other: Tensor) -> Tensor:
        return self.layer(other if self.reads_second else x)


def test_what_is_kept_in_mind_of_a_call_is_not_taken_for_another() -> None:
    """Calls of one form are tried once; here the model returns the rows of another part from the fourth window on."""
    model = Reads()
    with attached(model) as probe:
        for _ in range(6):
            model.reads_second = probe.reading().windows >= 3
            for _ in range(3):
                model(torch.randn(4, 3), torch.randn(8, 3)).square().mean().backward()
            probe.step()
            model.zero_grad()
        assert (probe.reading().windows, probe.window().effective_units) == (5, 24.0)  # type: ignore[union-attr]
        assert "does not return as many units as it has got" in probe.alerts["units"]


@pytest.mark.parametrize(
    ("declared", "n"), [({}, 4), ({"units": 2}, 2), ({"unit_weights": [1.0, 1.0, 1.0]}, 3)], ids=str
)
def test_by_default_a_declared_count_goes_first_and_takes_the_hooks_off(declared: Any, n: int) -> None:
    model, generator, n_hooks = small_model(), torch.Generator().manual_seed(0), []
    with attached(model) as probe:
        for of_piece in (declared, {}):
            for _ in range(2):
                with probe.piece(**of_piece):
                    n_hooks.append(len(model._forward_pre_hooks))
                    mean_loss(model, *batch(4, generator)).backward()
            probe.step()
            model.zero_grad()
            if of_piece is declared:
                assert probe.reading().units_per_window == 2 * n
        assert probe.reading().dropped == {}
    assert n_hooks == [n == 4, n == 4, 1, 1]


# Loops whose rows cannot be counted are told what to pass.


def in_parts(model: Any, generator: torch.Generator) -> None:
    """The model itself is not called."""
    for _ in range(2):
        x, y = batch(4, generator)
        for layer in model:
            x = layer(x)
        (x - y).square().mean().backward()


def two_forwards(model: Any, generator: torch.Generator) -> None:
    (mean_loss(model, *batch(4, generator)) + mean_loss(model, *batch(4, generator))).backward()
    mean_loss(model, *batch(4, generator)).backward()


def second_backward(model: Any, generator: torch.Generator) -> None:
    loss = mean_loss(model, *batch(4, generator))
    loss.backward(retain_graph=True)
    (2 * loss).backward()


def two_tasks(model: Any, generator: torch.Generator) -> None:
    """Two losses of one batch, each with a forward and a backward of its own."""
    x, y = batch(4, generator)
    mean_loss(model, x, y).backward()
    model(x).square().mean().backward()


@pytest.mark.parametrize(
    ("loop", "said"),
    [
        (two_tasks, "two backwards of a window are of the same rows, so they are no two pieces. Add the two"),
        (in_parts, "no forward of the model was seen before a backward"),
        (two_forwards, "a backward follows 2 forwards of the model. Pass units_per_piece= a n"),
        (second_backward, "a forward of the model had a second backward. Put all backwards of"),
    ],
)
def test_a_loop_whose_rows_cannot_be_counted_is_told_what_to_pass(loop: Callable[..., None], said: str) -> None:
    model, generator = small_model(), torch.Generator().manual_seed(0)
    with attached(model) as probe:
        for _ in range(2):
            loop(model, generator)
            probe.step()
            model.zero_grad()
        assert probe.reading().dropped == {Problem.UNITS_ASKED.message: 2}
        assert probe.alerts["units"].startswith(said)


@pytest.mark.parametrize("is_declared", [False, True])
def test_a_call_that_is_not_clear_leaves_out_the_window(is_declared: bool) -> None:
    """What the model returns has no rows of the batch."""
    model = nn.Sequential(small_model(), nn.Flatten(0), nn.Unflatten(0, (6, 2)))
    with attached(model, units_per_piece="first dim") as probe:
        for _ in range(2):
            with probe.piece() if is_declared else contextlib.nullcontext():
                model(batch(4, torch.Generator())[0]).square().mean().backward()
        probe.step()
        assert probe.reading().dropped == {(Problem.BAD_COUNTS if is_declared else Problem.UNITS_ASKED).message: 1}
        assert probe.alerts["units"] == (
            "rows depend on each other in the model: one that is changed in float32 [4, 12] moves 2: the batch has "
            "input float32 [4, 12], and the model returned [6, 2]. " + HOW_TO_COUNT
        )


@pytest.mark.parametrize("is_training", [False, True])
def test_a_forward_without_a_backward_does_not_count(is_training: bool) -> None:
    """An evaluation with a graph; a loss in train mode that is only logged, and kept; a copy of the model."""
    model, logged = small_model(), []

    def forward(x: Tensor) -> None:
        model.train(is_training)
        logged.append(model(x.repeat(5, 1)).square().mean())
        model.train()
        for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            copied(x)

    with attached(model) as probe:
        train(probe, model, before_window=forward)
        reading = probe.reading()
    assert (reading.windows, reading.dropped, reading.units_per_window) == (6, {}, sum(SIZES))


def test_forwards_may_come_before_all_backwards() -> None:
    """Each backward counts the units of its own forward, also in another order."""
    model, generator = small_model(), torch.Generator().manual_seed(0)
    with attached(model, units_per_piece="first dim") as probe:
        losses = [mean_loss(model, *batch(n, generator)) for n in (4, 12)]
        for loss, units in ((losses[1], 12), (losses[0], 16)):
            loss.backward()
            assert probe._reader._sums._counts[-1] == units


def test_forwards_are_counted_in_measured_windows_alone() -> None:
    calls: list[int] = []
    model = small_model()
    with attached(model, units_per_piece=lambda x: calls.append(len(x)) or len(x), every=4) as probe:  # type: ignore[func-returns-value]
        train(probe, model, windows=40)
        reading = probe.reading()
    assert 0 < reading.windows < 20
    assert reading.units_per_window == sum(SIZES)
    # A window is found to be measured when the one before ends, so the count is exact but for the last one.
    assert reading.windows <= len(calls) / len(SIZES) <= reading.windows + 1


@pytest.mark.parametrize(("units", "why"), [(lambda x: 1 / 0, "ZeroDivisionError"), (lambda x: 0, "must be positive")])
def test_a_function_that_cannot_count_is_named(units: Any, why: str, caplog: pytest.LogCaptureFixture) -> None:
    model = small_model()
    with attached(model, units_per_piece=units) as probe:
        mean_loss(model, *batch(4, torch.Generator().manual_seed(0))).backward()
        probe.step()
        assert probe.reading().reason == Problem.NOT_COUNTED.message
    assert re.search(f"units_per_piece= could not count a piece: .*{why}", caplog.text)


def a_function_that_fails() -> tuple[int, str, str | None]:
    fails = dist.get_rank() == 0
    model, said = DistributedDataParallel(small_model()), list[str]()
    handler = logging.Handler(logging.ERROR)
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("sonde").addHandler(handler)
    with attached(model, units_per_piece=lambda x: 1 / 0 if fails else len(x)) as probe:
        train(probe, model, windows=3)
        reading = probe.reading()
    logging.getLogger("sonde").removeHandler(handler)
    return reading.windows, "".join(said), reading.reason


def test_a_function_that_fails_on_one_rank_is_named_there_and_no_rank_waits(ranks2: Ranks) -> None:
    (windows, said, reason), (peers_windows, peer_said, peers_reason) = ranks2(a_function_that_fails)
    assert (windows, peers_windows, peer_said) == (0, 0, "")
    assert said == "sonde: units_per_piece= could not count a piece: ZeroDivisionError: division by zero"
    assert Problem.NOT_COUNTED.message in str(reason)
    assert reason == peers_reason


class OnFrozenFeatures(nn.Module):
    """Rows, after an encoder that is not trained: torch computes it in one kernel while no module in it has a hook."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.encoder = nn.TransformerEncoderLayer(12, 2, 24, 0.0, batch_first=True).requires_grad_(False).eval()
        self.conv, self.head = nn.Conv1d(5, 2, 1), nn.Linear(12, 3)

    def forward(self, x: Tensor) -> Tensor:
        if x.isnan().any():
            raise ValueError("an input that is refused")
        return self.head(self.conv(self.encoder(x)).mean(-2))


def test_a_model_is_tried_once_and_nothing_changes() -> None:
    calls: list[int] = []

    def run(model: OnFrozenFeatures, probe: sonde.NoiseScaleProbe | None) -> list[Tensor]:
        model.conv.register_forward_hook(lambda *_: calls.append(1))
        optimizer, generator = torch.optim.SGD(model.parameters(), lr=0.1), torch.Generator().manual_seed(0)
        with pytest.raises(ValueError, match="refused"):
            model(torch.full((4, 5, 12), torch.nan))
        for _ in range(3):
            for _ in range(2):
                model(torch.randn(4, 5, 12, generator=generator)).square().mean().backward()
            if probe is not None:
                probe.step()
            optimizer.step()
            optimizer.zero_grad()
        return [p.detach().clone() for p in model.parameters()]

    model = OnFrozenFeatures()
    with attached(model) as probe:
        weights = run(model, probe)
        assert probe.reading().units_per_window == 8
    assert len(calls) == 6
    assert all(map(torch.equal, weights, run(OnFrozenFeatures(), None)))


# What a forward or a loop around says besides.


def test_memory_that_is_used_again_holds_other_rows() -> None:
    model, generator, static = small_model(), torch.Generator().manual_seed(0), batch(4, torch.Generator())[0]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with attached(model, optimizer) as probe:
        for _ in range(3):
            mean_loss(model, static.copy_(batch(4, generator)[0]), batch(4, generator)[1]).backward()
        optimizer.step()
        optimizer.zero_grad()
        mean_loss(model, static, batch(4, generator)[1]).backward()
        optimizer.zero_grad()  # the step is done again
        probe.discard()
        mean_loss(model, static, batch(4, generator)[1]).backward()
        mean_loss(model, *batch(4, generator)).backward()
        optimizer.step()
        assert (probe.reading().windows, probe.reading().dropped) == (2, {})


def test_a_forward_may_show_weights_too() -> None:
    """As `piece(weight=..., unit_weights=...)`, whose equations have oracles of their own."""

    def weights(x: Tensor) -> Tensor:
        return 1 + x[:, 0].abs()

    def counts(x: Tensor) -> CountsOfForward:
        return CountsOfForward(None, weights(x).sum(), weights(x))

    numbers = []
    for declares in (False, True):
        model, generator = small_model(), torch.Generator().manual_seed(0)
        with attached(model, units_per_piece=1 if declares else counts) as probe:
            for _ in range(4):
                for n in SIZES:
                    x, y = batch(n, generator)
                    piece = probe.piece(weight=weights(x).sum(), unit_weights=weights(x)) if declares else None
                    with piece or contextlib.nullcontext():
                        ((model(x) - y).square().mean(1) * weights(x)).sum().backward()
                probe.step()
                model.zero_grad()
            numbers.append(known(probe.reading()))
    assert numbers[0] == pytest.approx(numbers[1], rel=1e-12)


@pytest.mark.parametrize("wrong_units", [False, True])
def test_a_discarded_window_leaves_nothing_behind(wrong_units: bool) -> None:
    """Nor does a backward whose units were not clear."""
    numbers = []
    for discards in (False, True):
        model = small_model()
        with attached(model) as probe:

            def discarded(x: Tensor, model: Any = model, probe: Any = probe, discards: bool = discards) -> None:
                for _ in range(3 * discards):
                    mean_loss(model, *batch(3, torch.Generator())).backward()
                if discards and wrong_units:
                    two_forwards(model, torch.Generator())
                assert probe.n_pieces == discards * (3 + wrong_units)
                model.zero_grad()
                probe.discard()
                assert probe.n_pieces == 0

            train(probe, model, windows=4, before_window=discarded)
            assert probe.reading().dropped == {}
            numbers.append(known(probe.reading()))
    assert numbers[0] == numbers[1]


def test_a_forward_that_waits_for_its_backward_is_kept() -> None:
    """Lightning zeroes gradients between the two."""
    model = small_model()
    with attached(model, units_per_piece="first dim") as probe:
        for _ in range(3):
            for n in SIZES:
                loss = mean_loss(model, *batch(n, torch.Generator().manual_seed(n)))
                if n == SIZES[0]:
                    model.zero_grad()
                    probe.discard()
                loss.backward()
            probe.step()
        assert (probe.reading().windows, probe.reading().dropped) == (3, {})


def test_the_loops_own_clip_is_logged_as_the_probes(tmp_path: Path) -> None:
    logged = []
    for own in (False, True):
        model, generator = small_model(), torch.Generator().manual_seed(0)
        with sonde.attach(model, unit="rows", log=f"{tmp_path}/{own}", verbose=False) as probe:
            for k in range(5):
                for n in SIZES:
                    mean_loss(model, *batch(n, generator)).backward()
                max_norm = 1e-3 if k < 2 else 1e6
                if own:
                    probe.note_clip(nn.utils.clip_grad_norm_(model.parameters(), max_norm), max_norm)
                    probe.step()
                else:
                    probe.clip_grad_norm_(max_norm)
                model.zero_grad()
        logged.append(sonde.read_run(tmp_path / str(own)).readings[-1].metrics)
    for name in ("grad/norm", "grad/clip_fraction"):
        assert logged[0][name] == pytest.approx(logged[1][name], rel=1e-6)
    assert logged[1]["grad/clip_fraction"] == pytest.approx(0.4)
