"""Parameters that are frozen or cut off during a run leave the averages; parameters that rest now and then stay."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
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


def test_a_block_that_is_trained_again_starts_the_averages_again() -> None:
    model = small_model()
    with attached(model, log_every=1) as probe:
        windows_of(model, probe, 5)
        model[0].requires_grad_(False)
        windows_of(model, probe, 5)
        probe.reading()
        assert counted(probe) == (3, 3)  # the third window shows it
        model[0].requires_grad_(True)
        windows_of(model, probe, 5)
        assert list(probe.alerts) == ["trained"]
        assert probe.reading().windows == 15
        assert counted(probe) == (3, 3)
        assert "0" in probe.reading().groups


def test_a_block_that_is_cut_off_leaves_the_reading_with_its_last_gradient() -> None:
    """Over about the last half of the run it had none."""
    model = small_model()
    with attached(model, log_every=1) as probe:
        windows_of(model, probe, 20)
        windows_of(model, probe, 5, cut=True)
        assert "0" in probe.reading().groups
        windows_of(model, probe, 40, cut=True)
        assert "0" not in probe.reading().groups
        assert (probe.reading().windows, counted(probe)) == (65, (65, 65))
        assert probe.alerts == {}


class TwoBranches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.branches = nn.ModuleList([nn.Linear(12, 3), nn.Linear(12, 3)])

    def forward(self, x: torch.Tensor, used: list[int]) -> torch.Tensor:
        return torch.stack([self.branches[i](x) for i in used]).sum(0)


def test_a_branch_that_rests_now_and_then_is_left_alone() -> None:
    torch.manual_seed(0)
    model = TwoBranches()
    generator = torch.Generator().manual_seed(0)
    with attached(model, log_every=1) as probe:
        for window in range(80):  # the second branch is used in windows 0, 30 and 60
            for _ in range(2):
                x, y = batch(4, generator)
                with probe.piece(units=4):
                    (model(x, [0, 1] if window % 30 == 0 else [0]) - y).square().sum(-1).mean().backward()
            probe.step()
            model.zero_grad()
        assert probe.reading().windows == 80
        assert "trained" not in probe.alerts


def test_a_loop_that_freezes_in_turn_is_left_alone() -> None:
    model = small_model()
    with attached(model, log_every=1) as probe:
        for window in range(12):
            model[0].requires_grad_(window % 2 == 0)
            windows_of(model, probe, 1, seed=window)
        assert probe.reading().windows == 12
        assert probe.alerts == {}


def test_parts_that_are_trained_in_turn_for_longer_begin_anew_each_time() -> None:
    """As many parameters are frozen as before, and of the same shapes, but not the same."""
    model = nn.Sequential(nn.Linear(12, 12), nn.Linear(12, 12), nn.Linear(12, 3))
    with attached(model, log_every=1) as probe:
        for window in range(12):
            model[0].requires_grad_(window < 6)
            model[1].requires_grad_(window >= 6)
            windows_of(model, probe, 1, seed=window)
        probe.reading()
        assert counted(probe) == (4, 4)  # since window 9, the third of them
        assert "trained" in probe.alerts
        assert set(probe.reading().groups) == {"1", "2"}


def test_frozen_at_attach_or_never_used_raises_nothing() -> None:
    model = small_model()
    model.unused = nn.Linear(2, 2)  # type: ignore[assignment]
    model[2].requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with attached(nn.ModuleList([model]), optimizer, log_every=1) as probe:
        windows_of(model[:5], probe, 25)  # type: ignore[arg-type]
        assert "trained" not in probe.alerts
        assert probe.reading().windows == 25


def test_a_state_that_is_loaded_while_a_block_is_frozen_keeps_the_reading() -> None:
    model = small_model()
    with attached(model) as probe:
        windows_of(model, probe, 20)
        model[0].requires_grad_(False)
        windows_of(model, probe, 20, seed=1)
        before = probe.reading()
        probe.load_state_dict(probe.state_dict())
        assert probe.reading() == before
        windows_of(model, probe, 20, seed=2)
        assert probe.reading().groups.keys() == before.groups.keys()
        assert probe.reading().windows == 60
        model[0].requires_grad_(True)
        windows_of(model, probe, 4, seed=3)
        probe.reading()
        assert "trained" in probe.alerts


def test_a_block_that_is_half_frozen_keeps_its_history_at_a_restart() -> None:
    model = small_model()
    with attached(model, log_every=1) as probe:
        windows_of(model, probe, 10)
        model[0].weight.requires_grad_(False)
        windows_of(model, probe, 20, seed=1)
        state = probe.state_dict()
        assert contents_of(probe)["frozen"][0] == 1
    model[0].weight.requires_grad_(True)
    with attached(model, log_every=1) as probe:
        probe.load_state_dict(state)
        model[0].weight.requires_grad_(False)
        windows_of(model, probe, 4, seed=2)
        probe.reading()
        assert counted(probe) == (22, 22)  # since window 13, which was the third of them
        assert not probe.alerts
        model[0].weight.requires_grad_(True)
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
