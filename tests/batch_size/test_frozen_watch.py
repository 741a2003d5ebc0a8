"""Parameters that are frozen or cut off during a run leave the averages; parameters that rest now and then stay."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

from sonde import NoiseScaleProbe
from tests.batch_size.loops import attached, batch, contents_of, counted, small_model
from tests.ranks import Ranks, mesh_of


def windows_of(model: nn.Module, probe: NoiseScaleProbe, windows: int, *, seed: int = 0, cut: bool = False) -> None:
    """Windows at fixed weights; with `cut`, no gradient passes the first layer's output."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(windows):
        for _ in range(3):
            x, y = batch(4, generator)
            with probe.piece(units=4):
                out = model[1:](model[0](x).detach()) if cut else model(x)  # type: ignore[index]
                (out - y).square().sum(-1).mean().backward()
        probe.step()
        model.zero_grad()


def test_a_frozen_block_leaves_the_averages() -> None:
    """The reading is that of the windows after the one that showed it, as if the block had never been trained."""
    never = small_model()
    never[0].requires_grad_(False)
    with attached(never) as probe:
        windows_of(never, probe, 1, seed=2)
        windows_of(never, probe, 17, seed=5)
        expected = probe.reading()
    model = small_model()
    with attached(model, log_every=1) as probe:
        windows_of(model, probe, 20)
        model[0].requires_grad_(False)
        windows_of(model, probe, 2, seed=1)
        assert probe.alerts == {}  # it may be trained again in the next window
        windows_of(model, probe, 1, seed=2)
        windows_of(model, probe, 17, seed=5)
        reading = probe.reading()
        assert counted(probe) == (18, 18)
        alert = probe.alerts["trained"]
    assert "has changed (0.weight, 0.bias): the noise scale begins anew" in alert
    assert (reading.windows, expected.windows) == (40, 18)
    assert (reading.first_step, expected.first_step) == (23, 1)
    assert "from step 23 on" in str(reading)
    assert reading.trace_cov == pytest.approx(expected.trace_cov, rel=1e-6)
    assert reading.grad_sq == pytest.approx(expected.grad_sq, rel=1e-6)
    assert "0" not in reading.groups


@dataclass(frozen=True)
class Schedule:
    """Windows in which one layer or another of three is frozen, or the first one is cut off.

    Attributes:
        windows: how many.
        counted: how many of them the noise scale rests on.
        frozen: the layers that are frozen in a window.
        is_cut: whether the first layer is cut off in a window.
        groups: the layers in the reading at the end.
    """

    windows: int
    counted: int
    frozen: Callable[[int], set[int]] = lambda window: set()
    is_cut: Callable[[int], bool] = lambda window: False
    groups: str = "012"


SCHEDULES = {
    # The third window with the change shows it, and counts.
    "frozen": Schedule(10, 3, lambda window: {0} if window >= 5 else set(), groups="12"),
    "trained again": Schedule(15, 3, lambda window: {0} if 5 <= window < 10 else set()),
    # As many parameters are frozen as before, and of the same shapes, but not the same.
    "another layer": Schedule(12, 4, lambda window: {0} if window < 6 else {1}, groups="02"),
    "frozen in turn": Schedule(12, 12, lambda window: {window % 2}),
    "cut off now and then": Schedule(80, 80, is_cut=lambda window: window % 30 > 0),
    "cut off": Schedule(25, 25, is_cut=lambda window: window >= 20),
    # Over about the last half of the run it had no gradient.
    "cut off for long": Schedule(65, 65, is_cut=lambda window: window >= 20, groups="12"),
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_layers_that_rest(name: str) -> None:
    """Averages begin anew with each change that lasts; layers that rest now and then are left alone."""
    case = SCHEDULES[name]
    model = nn.Sequential(nn.Linear(12, 12), nn.Linear(12, 12), nn.Linear(12, 3))
    with attached(model, log_every=1) as probe:
        for window in range(case.windows):
            for k, layer in enumerate(model):
                layer.requires_grad_(k not in case.frozen(window))
            windows_of(model, probe, 1, seed=window, cut=case.is_cut(window))
        reading = probe.reading()
        assert (reading.windows, counted(probe)) == (case.windows, (case.counted, case.counted))
        assert set(reading.groups) == set(case.groups)
        assert list(probe.alerts) == ["trained"] * (case.counted < case.windows)


def test_frozen_at_attach_or_never_used_raises_nothing() -> None:
    model = small_model()
    model.unused = nn.Linear(2, 2)  # type: ignore[assignment]
    model[2].requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with attached(nn.ModuleList([model]), optimizer, log_every=1) as probe:
        windows_of(model[:5], probe, 25)  # type: ignore[arg-type]
        assert "trained" not in probe.alerts
        assert probe.reading().windows == 25


@pytest.mark.parametrize("part", ["0", "0.weight"])
def test_what_is_frozen_keeps_its_history_at_a_restart(part: str) -> None:
    def freeze(frozen: bool) -> None:
        for name, parameter in model.named_parameters():
            if name.startswith(part):
                parameter.requires_grad_(not frozen)

    model = small_model()
    with attached(model, log_every=1) as probe:
        windows_of(model, probe, 10)
        freeze(True)
        windows_of(model, probe, 20, seed=1)
        state, before = probe.state_dict(), probe.reading()
        assert contents_of(probe)["frozen"][0] == 1 + (part == "0")
        assert ("0" in before.groups) == (part != "0")
    freeze(False)
    with attached(model, log_every=1) as probe:
        probe.load_state_dict(state)
        assert probe.reading() == before
        freeze(True)
        windows_of(model, probe, 4, seed=2)
        reading = probe.reading()
        assert (reading.windows, reading.groups.keys()) == (34, before.groups.keys())
        assert counted(probe) == (22, 22)  # since window 13, which was the third of them
        assert not probe.alerts
        freeze(False)
        windows_of(model, probe, 4, seed=3)
        probe.reading()
        assert "trained" in probe.alerts


# On ranks.


WIDTH, N_MICRO = 6, 4
BEFORE, FROZEN, AFTER = 6, 7, 6
"""Windows before parameters are frozen, while they are, and once they are trained again."""
CASES = {
    "the last stage": ("c.weight", "c.bias", "d.weight", "d.bias"),
    "parts of both stages": ("a.weight", "b.weight", "b.bias", "d.bias"),
}


def layers() -> list[tuple[str, nn.Module]]:
    """The whole model, layer by layer: a, b are the first stage's, c, d the last one's."""
    torch.manual_seed(0)
    made = [(name, nn.Linear(WIDTH, WIDTH)) for name in "abcd"]
    return [made[0], ("tanh_a", nn.Tanh()), made[1], made[2], ("tanh_c", nn.Tanh()), made[3]]


def rows(window: int) -> Tensor:
    return torch.randn(2 * N_MICRO, WIDTH, generator=torch.Generator().manual_seed(window))


def loss_of(out: Tensor, target: Tensor) -> Tensor:
    return (out - target).square().mean()


def followed(
    model: nn.Module, names: tuple[str, ...], one_window: Callable[[Any, int], None], **arguments: Any
) -> list[Any]:
    """What a probe reads while parameters are frozen and once they are trained again; a restart comes in between."""
    found, state = [], None
    for window in range(BEFORE + FROZEN + AFTER):
        if window in (0, BEFORE + 5):
            probe = attached(model, log_every=1, **arguments)
            if state is not None:
                probe.load_state_dict(state)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(not (name in names and BEFORE <= window < BEFORE + FROZEN))
        one_window(probe, window)
        if window == BEFORE + 4:
            assert list(probe.alerts) == ["trained"]
            state = probe.state_dict()
        if window in (BEFORE + FROZEN - 1, BEFORE + FROZEN + AFTER - 1):
            reading = probe.reading()
            values = {name: (group.trace_cov, group.grad_sq) for name, group in reading.groups.items()}
            values["all"] = reading.trace_cov, reading.grad_sq
            found.append((values, counted(probe), dict(reading.dropped), contents_of(probe)["averages"]))
        if window in (BEFORE + 4, BEFORE + FROZEN + AFTER - 1):
            for parameter in model.parameters():
                parameter.requires_grad_(True)
            probe.close()
    return found


def in_one_process(names: tuple[str, ...]) -> list[Any]:
    model = nn.Sequential(OrderedDict(layers()))

    def window_of(probe: Any, window: int) -> None:
        for x in rows(window).chunk(N_MICRO):
            with probe.piece(units=2):
                loss_of(model(x), x).backward()
        probe.step()
        model.zero_grad()

    return followed(model, names, window_of)


def in_two_stages(names: tuple[str, ...]) -> list[Any]:
    rank, mesh = dist.get_rank(), mesh_of((2,), ("pp",))
    model = nn.Sequential(OrderedDict(layers()[3 * rank : 3 * rank + 3]))
    stage = PipelineStage(model, rank, 2, torch.device("cpu"), group=mesh.get_group())
    schedule = ScheduleGPipe(stage, N_MICRO, loss_fn=loss_of, scale_grads=False)

    def window_of(probe: Any, window: int) -> None:
        x = rows(window)
        with probe.pieces(N_MICRO, units=2):
            schedule.step(*([x] if rank == 0 else []), **({} if rank == 0 else {"target": x}))
        probe.step()
        model.zero_grad()

    return followed(model, names, window_of, mesh=mesh, pp_mesh=mesh)


def both() -> dict[str, tuple[list[Any], list[Any]]]:
    return {name: (in_two_stages(names), in_one_process(names)) for name, names in CASES.items()}


def test_a_stage_or_a_part_of_one_is_frozen_and_trained_again(ranks2: Ranks) -> None:
    """All ranks read what one process reads that holds both stages, and their averages are equal."""
    if torch.__version__ < "2.11":
        pytest.skip("torch 2.9 itself fails in a pipeline's first exchange over gloo")
    first, second = ranks2(both)
    assert first.keys() == second.keys() == CASES.keys()
    for name, (of_stages, of_one) in first.items():
        assert second[name][0] == of_stages
        for time, ((values, counts, dropped, _), (expected, its_counts, _, _)) in enumerate(
            zip(of_stages, of_one, strict=True)
        ):
            # The third window with the change shows it, and counts.
            assert counts == its_counts == ((FROZEN - 2, AFTER - 2)[time],) * 2, name
            assert not dropped, name
            assert values.keys() == expected.keys(), name
            for group, each in values.items():
                # Pipelines round as one process does but for the order of a few sums, amplified by S − B.
                assert each == pytest.approx(expected[group], rel=1e-5), (name, group)
        assert ("c" in of_stages[0][0]) == (name != "the last stage")
        assert "c" in of_stages[1][0]


def _on_one_rank() -> tuple[dict[str, str], Any, tuple[int, int]]:
    """Rank 1 alone freezes a layer."""
    rank, model = dist.get_rank(), small_model()
    with attached(model, log_every=1, process_group=dist.group.WORLD) as probe:
        for window in range(16):
            model[0].requires_grad_(window < 5 or rank == 0)
            for k in range(2):
                with probe.piece(units=4):
                    x = torch.randn(4, 12, generator=torch.Generator().manual_seed(100 * window + 10 * rank + k))
                    model(x).square().mean().backward()
            for parameter in model.parameters():
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                dist.all_reduce(parameter.grad)
            probe.step()
            model.zero_grad()
        return dict(probe.alerts), contents_of(probe)["averages"], counted(probe)


def test_a_layer_that_one_rank_alone_freezes(ranks2: Ranks) -> None:
    (alerts, averages, n), (others, its, _) = ranks2(_on_one_rank)
    assert averages == its
    assert n == (9, 9)  # since window 8, the third of them
    assert list(alerts) == list(others) == ["trained"]
    assert "(of other ranks)" in alerts["trained"]
    assert "(0.weight, 0.bias)" in others["trained"]
