"""Units that are counted in what forward is called with, in a loop that declares no pieces."""

from __future__ import annotations

import copy
import logging
import re
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import sonde
from sonde.batch_size.taps.problems import HOW_TO_COUNT, Problem
from tests.batch_size.loops import attached, batch, mean_loss, small_model
from tests.ranks import Ranks

SIZES = (4, 7, 2)
"""Rows of the pieces of each window: unequal, so that a wrong count gives another number."""
BY_DEFAULT = object()


def train(
    probe: sonde.NoiseScaleProbe,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    declares: bool = False,
    windows: int = 6,
    before_window: Callable[[Tensor], object] = lambda x: None,
    seed: int = 0,
) -> None:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(windows):
        before_window(batch(5, generator)[0])
        for n in SIZES:
            x, y = batch(n, generator)
            with probe.piece(units=n) if declares else nullcontext():
                mean_loss(model, x, y).backward()
        probe.step()
        optimizer.step()
        optimizer.zero_grad()


def reading_of(
    units_per_piece: Any, make: Callable[[], nn.Module] = small_model, **options: Any
) -> tuple[sonde.NoiseScaleReading, list[Tensor], dict[str, str]]:
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.005)
    given = {} if units_per_piece is BY_DEFAULT else {"units_per_piece": units_per_piece}
    with attached(model, optimizer, **given) as probe:
        train(probe, model, optimizer, **options)
        reading, alerts = probe.reading(), dict(probe.alerts)
    assert not model._forward_pre_hooks
    return reading, [p.detach().clone() for p in model.parameters()], alerts


def known(reading: sonde.NoiseScaleReading) -> tuple[Any, ...]:
    return reading.windows, reading.trace_cov, reading.grad_sq, reading.units_per_window, reading.u


@pytest.mark.parametrize("units", [BY_DEFAULT, "first dim", len, lambda x: torch.tensor(float(len(x)))])
def test_each_backward_is_a_piece_with_the_units_of_its_forward(units: Any) -> None:
    declared, weights, _ = reading_of(None, declares=True)
    reading, weights_too, alerts = reading_of(units)
    assert known(reading) == pytest.approx(known(declared), rel=1e-9)
    assert reading.units_per_window == sum(SIZES)
    assert alerts == {}
    assert all(map(torch.equal, weights, weights_too))


class _Reads(nn.Module):
    """The rows of the first part or of the second, as it is told."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.reads_second = nn.Linear(3, 1), False

    def forward(self, x: Tensor, other: Tensor) -> Tensor:
        return self.layer(other if self.reads_second else x)


def test_what_is_kept_in_mind_of_a_call_is_not_taken_for_another() -> None:
    """Calls of the same shapes are counted once; here the model returns the rows of another part from the fourth on."""
    model = _Reads()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.005)
    with attached(model, optimizer) as probe:
        for _ in range(6):
            model.reads_second = probe.reading().windows >= 3
            for _ in range(3):
                model(torch.randn(4, 3), torch.randn(8, 3)).square().mean().backward()
            probe.step()
            model.zero_grad()
        units = probe.window().effective_units  # type: ignore[union-attr]
        assert (probe.reading().windows, units) == (6, 24.0)


def test_a_declared_piece_may_leave_its_units_to_its_forward() -> None:
    declared, *_ = reading_of(None, declares=True)
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.005)
    generator = torch.Generator().manual_seed(0)
    with attached(model, optimizer, units_per_piece="first dim") as probe:
        for _ in range(6):
            model(batch(5, generator)[0])  # before the piece: not counted
            for n in SIZES:
                with probe.piece():
                    mean_loss(model, *batch(n, generator)).backward()
            probe.step()
            optimizer.step()
            optimizer.zero_grad()
        assert known(probe.reading()) == pytest.approx(known(declared), rel=1e-9)


@pytest.mark.parametrize(
    ("declared", "n"), [({}, 4), ({"units": 2}, 2), ({"unit_weights": [1.0, 1.0, 1.0]}, 3)], ids=str
)
def test_by_default_a_declared_count_goes_first_and_takes_the_hooks_off(declared: Any, n: int) -> None:
    model = small_model()
    generator = torch.Generator().manual_seed(0)
    n_hooks = []
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


def test_by_default_a_loop_whose_rows_cannot_be_counted_is_told_what_to_pass() -> None:
    model = small_model()
    with attached(model) as probe:
        for _ in range(2):
            x = batch(4, torch.Generator())[0]
            for layer in model:  # the model itself is not called
                x = layer(x)
            x.square().mean().backward()
        probe.step()
        [message] = probe.reading().dropped
        assert probe.alerts["units"].startswith("no forward of the model was seen before a backward")
    assert message == Problem.UNITS_ASKED.message


@pytest.mark.parametrize("is_training", [False, True])
def test_a_forward_without_a_backward_does_not_count(is_training: bool) -> None:
    """An evaluation with a graph; a loss in train mode that is only logged, and kept; a copy of the model."""
    model, logged = small_model(), []

    def forward(x: Tensor) -> None:
        model.train(is_training)
        logged.append(model(x.repeat(5, 1)).square().mean())
        model.train()
        copy.deepcopy(model)(x)

    optimizer = torch.optim.SGD(model.parameters(), lr=0.005)
    with attached(model, optimizer, units_per_piece="first dim") as probe:
        train(probe, model, optimizer, before_window=forward)
        reading = probe.reading()
    assert (reading.windows, reading.dropped, reading.units_per_window) == (6, {}, sum(SIZES))


def test_forwards_may_come_before_all_backwards() -> None:
    """Each backward counts the units of its own forward, also in another order."""
    model, generator = small_model(), torch.Generator().manual_seed(0)
    with attached(model, units_per_piece="first dim") as probe:
        losses = [mean_loss(model, *batch(n, generator)) for n in (4, 12)]
        for loss, units in ((losses[1], 12), (losses[0], 16)):
            loss.backward()
            assert probe._reader._sums._units == units


def test_several_forwards_before_one_backward_give_a_reason_and_no_number() -> None:
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.005)
    generator = torch.Generator().manual_seed(0)
    with attached(model, optimizer, units_per_piece="first dim") as probe:
        for _ in range(4):
            (mean_loss(model, *batch(4, generator)) + mean_loss(model, *batch(4, generator))).backward()
            mean_loss(model, *batch(4, generator)).backward()
            probe.step()
            optimizer.step()
            optimizer.zero_grad()
        reading = probe.reading()
        assert reading.windows == 0
        assert reading.dropped == {Problem.UNITS_ASKED.message: 4}
        assert probe.alerts["units"].startswith("a backward follows 2 forwards of the model. Pass units_per_piece= a n")


def test_a_second_backward_of_a_forward_is_named() -> None:
    model = small_model()
    with attached(model, units_per_piece="first dim") as probe:
        loss = mean_loss(model, *batch(4, torch.Generator()))
        loss.backward(retain_graph=True)
        (2 * loss).backward()
        probe.step()
        assert probe.alerts["units"].startswith("a forward of the model had a second backward. Put all backwards of")


def test_forwards_are_counted_in_measured_windows_alone() -> None:
    calls: list[int] = []
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.005)

    def count(x: Tensor) -> int:
        calls.append(len(x))
        return len(x)

    with attached(model, optimizer, units_per_piece=count, every=4) as probe:
        train(probe, model, optimizer, windows=40)
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


def test_a_function_counts_several_units() -> None:
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.005)
    count = lambda x: {"rows": len(x), "tokens": x.numel()}  # noqa: E731
    with attached(model, optimizer, unit=("rows", "tokens"), units_per_piece=count) as probe:
        train(probe, model, optimizer)
        assert probe.reading().in_unit("tokens").units_per_window == pytest.approx(12 * sum(SIZES))


def _on_ranks(declares: bool, rank: int) -> tuple[tuple[Any, ...], list[Tensor], dict[str, str]]:
    reading, weights, alerts = reading_of(
        None if declares else "first dim",
        lambda: DistributedDataParallel(small_model()),
        declares=declares,
        seed=rank,
    )
    return known(reading), weights, alerts


def _both_on_ranks() -> list[Any]:
    rank = torch.distributed.get_rank()
    return [_on_ranks(True, rank), _on_ranks(False, rank)]


def test_what_is_counted_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    model = small_model()
    with attached(model, units_per_piece="first dim", verbose=True) as probe:
        for n in (7, 3):
            model(batch(n, torch.Generator())[0]).square().mean().backward()
        probe.step()
    assert "2 pieces per window, 10 rows in all (dim 0 of float32 [7, 12])\n" in capsys.readouterr().err


@pytest.mark.parametrize("is_declared", [False, True])
def test_a_call_that_is_not_clear_leaves_out_the_window_and_training_goes_on(is_declared: bool) -> None:
    """What the model returns has no rows of the batch."""

    def run(probe: sonde.NoiseScaleProbe | None, model: nn.Module) -> list[Tensor]:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.005)
        generator = torch.Generator().manual_seed(0)
        for _ in range(3):
            for _ in range(2):
                with probe.piece() if probe is not None and is_declared else nullcontext():
                    model(batch(4, generator)[0]).square().mean().backward()
            if probe is not None:
                probe.step()
            optimizer.step()
            optimizer.zero_grad()
        return [p.detach().clone() for p in model.parameters()]

    model, alone = (nn.Sequential(small_model(), nn.Flatten(0), nn.Unflatten(0, (6, 2))) for _ in range(2))
    with attached(model, units_per_piece="first dim") as probe:
        weights = run(probe, model)
        reading, alerts = probe.reading(), dict(probe.alerts)
    assert reading.windows == 0
    expected = Problem.BAD_COUNTS if is_declared else Problem.UNITS_ASKED
    assert reading.dropped == {expected.message: 3}
    assert alerts["units"] == (
        "which dim is the batch is not clear: the batch has input float32 [4, 12], and the model returned [6, 2]. "
        + HOW_TO_COUNT
    )
    assert all(map(torch.equal, weights, run(None, alone)))


class _OnFrozenFeatures(nn.Module):
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


def _hooks_in(model: nn.Module) -> int:
    return sum(len(m._forward_pre_hooks) for m in model.modules() if m is not model)


def test_layers_are_asked_once_whether_the_first_dim_is_the_batch_and_nothing_changes() -> None:
    hooks: list[int] = []

    def run(model: _OnFrozenFeatures, probe: sonde.NoiseScaleProbe | None) -> list[Tensor]:
        model.conv.register_forward_hook(lambda *_: hooks.append(_hooks_in(model)))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        generator = torch.Generator().manual_seed(0)
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

    model = _OnFrozenFeatures()
    with attached(model, per_example="never", every=1) as probe:
        weights = run(model, probe)
        assert probe.reading().units_per_window == 8
    assert hooks == [2, 0, 0, 0, 0, 0]
    hooks.clear()
    assert all(map(torch.equal, weights, run(_OnFrozenFeatures(), None)))


def test_a_compiled_model_is_not_compiled_again_and_keeps_no_hook_inside() -> None:
    n_compiled = 0

    def backend(graph: Any, inputs: Any) -> Any:
        nonlocal n_compiled
        n_compiled += 1
        return graph.forward

    model = torch.compile(small_model(), backend=backend, dynamic=False)
    with attached(model, every=1) as probe:
        for _ in range(3):
            for _ in range(2):
                model(batch(4, torch.Generator())[0]).square().mean().backward()
            probe.step()
            model.zero_grad()
        assert (probe.reading().units_per_window, _hooks_in(model)) == (8, 0)
    assert n_compiled == 1


def test_two_ranks(ranks2: Ranks) -> None:
    for declared, counted in ranks2(_both_on_ranks):
        assert counted[0] == pytest.approx(declared[0], rel=1e-6)
        assert all(map(torch.equal, declared[1], counted[1]))
        assert counted[2] == {}


def _a_function_that_fails(rank_that_fails: int) -> tuple[int, str, str | None]:
    fails = torch.distributed.get_rank() == rank_that_fails
    model = DistributedDataParallel(small_model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.005)
    said: list[str] = []
    handler = logging.Handler(logging.ERROR)
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("sonde").addHandler(handler)
    with attached(model, optimizer, units_per_piece=lambda x: 1 / 0 if fails else len(x)) as probe:
        train(probe, model, optimizer, windows=3)
        reading = probe.reading()
    logging.getLogger("sonde").removeHandler(handler)
    return reading.windows, "".join(said), reading.reason


def test_a_function_that_fails_on_one_rank_is_named_there_and_no_rank_waits(ranks2: Ranks) -> None:
    (windows, said, reason), (peers_windows, peer_said, peers_reason) = ranks2(_a_function_that_fails, 0)
    assert (windows, peers_windows) == (0, 0)
    assert said == "sonde: units_per_piece= could not count a piece: ZeroDivisionError: division by zero"
    assert peer_said == ""
    assert Problem.NOT_COUNTED.message in str(reason)
    assert reason == peers_reason
