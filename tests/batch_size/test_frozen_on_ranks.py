"""Parameters that one rank freezes in mid-run change the averages of all ranks, at the same window and alike."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from sonde.batch_size.frozen_on_ranks import FrozenOnRanks, TrainedChange
from sonde.parallel.stages import ModelParameters
from tests.batch_size.loops import attached, contents_of, counted, small_model
from tests.ranks import Ranks, mesh_of

CPU = torch.device("cpu")
WIDTH, N_MICRO = 6, 4
BEFORE, FROZEN, AFTER = 6, 7, 6
"""Windows before parameters are frozen, while they are, and once they are trained again."""
ROUNDING = {"rel": 1e-5}
"""Pipelines round as one process does but for the order of a few sums, amplified by the difference of S and B."""


def layers() -> list[tuple[str, nn.Module]]:
    """The whole model, layer by layer: a, b are the first stage's, c, d the last one's."""
    torch.manual_seed(0)
    made = [(name, nn.Linear(WIDTH, WIDTH)) for name in "abcd"]
    return [made[0], ("tanh_a", nn.Tanh()), made[1], made[2], ("tanh_c", nn.Tanh()), made[3]]


class Stages:
    """This rank's stage of two."""

    def __init__(self) -> None:
        self.rank, self.mesh = dist.get_rank(), mesh_of((2,), ("pp",))
        self.model = nn.Sequential(OrderedDict(layers()[3 * self.rank : 3 * self.rank + 3]))
        stage = PipelineStage(self.model, self.rank, 2, CPU, group=self.mesh.get_group())
        self.schedule = ScheduleGPipe(stage, N_MICRO, loss_fn=loss_of, scale_grads=False)

    def window(self, probe: Any, number: int) -> None:
        x = rows(number)
        with probe.pieces(N_MICRO, units=2):
            self.schedule.step(*([x] if self.rank == 0 else []), **({} if self.rank == 0 else {"target": x}))
        probe.step()
        self.model.zero_grad()


CASES = {
    "the last stage": ("c.weight", "c.bias", "d.weight", "d.bias"),
    "the first stage": ("a.weight", "a.bias", "b.weight", "b.bias"),
    "one group": ("d.weight", "d.bias"),
    "a part of a group": ("c.weight",),
    "parts of both stages": ("a.weight", "b.weight", "b.bias", "d.bias"),
}


def rows(window: int) -> Tensor:
    return torch.randn(2 * N_MICRO, WIDTH, generator=torch.Generator().manual_seed(window))


def loss_of(out: Tensor, target: Tensor) -> Tensor:
    return (out - target).square().mean()


def set_trained(model: nn.Module, names: tuple[str, ...], *, is_trained: bool) -> None:
    for name, parameter in model.named_parameters():
        if name in names:
            parameter.requires_grad_(is_trained)


def reading_of(probe: Any) -> dict[str, Any]:
    reading = probe.reading()
    groups = {name: (group.trace_cov, group.grad_sq) for name, group in reading.groups.items()}
    values = {"all": (reading.trace_cov, reading.grad_sq), **groups}
    return {"values": values, "counts": (reading.windows, dict(reading.dropped)), "alerts": dict(probe.alerts)}


def followed(
    model: nn.Module, names: tuple[str, ...], one_window: Callable[[Any, int], None], **arguments: Any
) -> list[Any]:
    """What a probe reads while parameters are frozen and once they are trained again, with its state at these times."""
    found = []
    with attached(model, log_every=100, **arguments) as probe:
        for window in range(BEFORE + FROZEN + AFTER):
            if window in (BEFORE, BEFORE + FROZEN):
                set_trained(model, names, is_trained=window > BEFORE)
            one_window(probe, window)
            if window in (BEFORE + FROZEN - 1, BEFORE + FROZEN + AFTER - 1):
                state = contents_of(probe)
                found.append((reading_of(probe), {name: state[name] for name in ("averages", "frozen")}))
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
    stages = Stages()
    return followed(stages.model, names, stages.window, mesh=stages.mesh, pp_mesh=stages.mesh)


def both() -> dict[str, tuple[list[Any], list[Any]]]:
    return {name: (in_two_stages(names), in_one_process(names)) for name, names in CASES.items()}


def test_a_stage_or_a_part_of_one_is_frozen_and_trained_again(ranks2: Ranks) -> None:
    """All ranks read what one process reads that holds both stages, and their states are equal."""
    if torch.__version__ < "2.11":
        pytest.skip("torch 2.9 itself fails in a pipeline's first exchange over gloo")
    first, second = ranks2(both)
    assert first.keys() == second.keys() == CASES.keys()
    for name, (of_stages, of_one) in first.items():
        for time, (other, (reading, state), (expected, its_state)) in enumerate(
            zip(second[name][0], of_stages, of_one, strict=True)
        ):
            assert other == (reading, state), name
            assert reading["alerts"] == expected["alerts"], name
            assert list(reading["alerts"]) == ["frozen", "unfrozen"][: 1 + time], name
            assert reading["counts"] == expected["counts"], name
            assert not reading["counts"][1], name
            assert state["frozen"] == its_state["frozen"] == ([] if time else list(CASES[name])), name
            assert reading["values"].keys() == expected["values"].keys(), name
            for group, values in reading["values"].items():
                assert values == pytest.approx(expected["values"][group], **ROUNDING), (name, group)
        assert ("c" in of_stages[0][0]["values"]) == (name != "the last stage")


def in_sparse_windows() -> tuple[dict[str, str], tuple[int, int], Any]:
    """A part of rank 1's stage is frozen where few windows are measured: alerts, how many windows count, the state."""
    stages = Stages()
    with attached(stages.model, log_every=1, every=4, mesh=stages.mesh, pp_mesh=stages.mesh) as probe:
        for window in range(60):
            if window == 30:
                set_trained(stages.model, ("c.weight",), is_trained=False)
            stages.window(probe, window)
        state = contents_of(probe)
        return dict(probe.alerts), counted(probe), (state["averages"], state["frozen"])


def test_a_change_that_windows_show_which_are_not_measured(ranks2: Ranks) -> None:
    if torch.__version__ < "2.11":
        pytest.skip("torch 2.9 itself fails in a pipeline's first exchange over gloo")
    one, other = ranks2(in_sparse_windows)
    assert one == other
    alerts, (n_windows, n_steps), (_, frozen) = one
    assert list(alerts) == ["frozen"]
    assert frozen == ["c.weight"]
    assert n_windows in (6, 7)  # one window in 4 was measured, from the one with the change on
    assert 22 <= n_steps <= 30


def resumed() -> list[tuple[list[str], tuple[int, int], list[str]]]:
    """A run goes on from the state of one with a frozen part, which is trained again later: before and after that."""
    stages, found = Stages(), []
    arguments = {"mesh": stages.mesh, "pp_mesh": stages.mesh}
    names = CASES["a part of a group"]
    with attached(stages.model, log_every=1, **arguments) as probe:
        for window in range(12):
            set_trained(stages.model, names, is_trained=window < 4)
            stages.window(probe, window)
        state = probe.state_dict()
    set_trained(stages.model, names, is_trained=True)
    with attached(stages.model, log_every=1, **arguments) as probe:
        probe.load_state_dict(state)
        for window in range(12, 24):
            set_trained(stages.model, names, is_trained=window >= 18)
            stages.window(probe, window)
            if window in (17, 23):
                frozen = contents_of(probe)["frozen"]
                found.append((list(probe.alerts), counted(probe), frozen))
    return found


def test_a_frozen_part_of_a_stage_is_known_after_a_restart(ranks2: Ranks) -> None:
    if torch.__version__ < "2.11":
        pytest.skip("torch 2.9 itself fails in a pipeline's first exchange over gloo")
    one, other = ranks2(resumed)
    assert one == other
    assert one == [([], (11, 14), ["c.weight"]), (["unfrozen"], (3, 6), [])]


def in_tensor_parallel() -> tuple[dict[str, str], list[str], list[str]]:
    """Both ranks of tensor parallelism freeze the same layer: alerts, groups that are left, and frozen parameters."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
    parallelize_module(model, mesh_of((2,), ("tp",)), {"0": ColwiseParallel(), "2": RowwiseParallel()})
    with attached(model, log_every=1) as probe:
        for window in range(8):
            model[0].requires_grad_(window < 4)
            for x in rows(window).chunk(N_MICRO):
                with probe.piece(units=2):
                    loss_of(model(x), x).backward()
            probe.step()
            model.zero_grad()
        return dict(probe.alerts), list(probe.reading().groups), contents_of(probe)["frozen"]


def test_a_layer_that_ranks_of_tensor_parallelism_freeze_together(ranks2: Ranks) -> None:
    one, other = ranks2(in_tensor_parallel)
    alerts, groups, frozen = one
    assert one == other
    assert groups == ["2"]
    assert frozen == ["0.weight", "0.bias"]
    assert list(alerts) == ["frozen"]
    assert (
        "2 measured parameters are no longer trained (0.weight, 0.bias): the noise scale begins anew"
        in alerts["frozen"]
    )


def _by_hand(is_swapped: bool) -> tuple[dict[str, Any], dict[str, Any], tuple[int, int]]:
    """Rank 1 freezes a layer. With `is_swapped`, rank 0 freezes it first, and trains it again at that time."""
    rank, model = dist.get_rank(), small_model()
    with attached(model, log_every=1, process_group=dist.group.WORLD) as probe:
        for window in range(16):
            model[0].requires_grad_(window < 5 if rank == 1 or not is_swapped else window >= 5)
            if not is_swapped and rank == 0:
                model[0].requires_grad_(True)
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
        state = contents_of(probe)
        return dict(probe.alerts), {name: state[name] for name in ("averages", "frozen")}, counted(probe)


@pytest.mark.parametrize("is_swapped", [False, True])
def test_a_layer_that_one_rank_alone_freezes(ranks2: Ranks, is_swapped: bool) -> None:
    (alerts, state, n), other = ranks2(_by_hand, is_swapped)
    assert (alerts, state, n) == other
    assert state["frozen"] == []  # one rank trains it
    assert n == (8, 11)  # since window 6, which the third of them shows
    assert list(alerts) == ["frozen"]
    if not is_swapped:
        assert "no longer trained on some ranks only (0.weight, 0.bias)" in alerts["frozen"]


# The numbers that travel, by themselves.

NAMES = [f"{layer}.{kind}" for layer in range(11) for kind in ("weight", "bias")]
GROUPS = [name.split(".")[0] for name in NAMES]
STAGES = (0, 9, len(NAMES))
"""Where stages begin: a group is on two of them."""


def four_ranks(n_ranks: int = 4) -> list[FrozenOnRanks]:
    """Two stages on two ranks each."""
    return [
        FrozenOnRanks(
            ModelParameters(NAMES, [()] * len(NAMES), [""] * len(NAMES), first=STAGES[rank % 2]),
            GROUPS,
            n_own=STAGES[rank % 2 + 1] - STAGES[rank % 2],
            n_ranks=n_ranks,
            n_stages=2,
            device=CPU,
        )
        for rank in range(4)
    ]


def exchange(
    ranks: list[FrozenOnRanks], gone: list[set[int]], moves: list[list[int]], number: int
) -> list[TrainedChange]:
    """What the first rank makes of the sum; the others have to make the same of it."""
    numbers = [one.numbers(frozenset(own), its, number) for one, own, its in zip(ranks, gone, moves, strict=True)]
    assert len({len(each) for each in numbers}) == 1
    found = [one.arrived(torch.stack(numbers).sum(0), number) for one in ranks]
    assert all(each == found[0] for each in found)
    return found[0]


def test_the_sum_says_of_each_parameter_whether_any_rank_trains_it() -> None:
    generator = torch.Generator().manual_seed(0)
    ranks = four_ranks()
    for number in range(1, 60):
        gone = []
        for rank in range(4):
            n_own = STAGES[rank % 2 + 1] - STAGES[rank % 2]
            gone.append({i for i in range(n_own) if torch.rand((), generator=generator) < 0.6})
        before = ranks[0].frozen
        changes = exchange(ranks, gone, [[number]] * 4, number)
        expected = [
            name
            for i, name in enumerate(NAMES)
            if all(i - STAGES[rank % 2] in gone[rank] for rank in ((0, 2) if i < STAGES[1] else (1, 3)))
        ]
        assert [one.frozen for one in ranks] == [expected] * 4
        are_alive = {group for group, name in zip(GROUPS, NAMES, strict=True) if name not in expected}
        for change in changes:
            assert not are_alive.intersection(change.gone)
        changed = {name.split(".")[0] for name in set(before) ^ set(expected)}
        assert changed <= {group for change in changes for group in change.groups}


def test_a_change_counts_from_the_window_in_which_it_began_on_all_ranks() -> None:
    everything = [set(range(STAGES[rank % 2 + 1] - STAGES[rank % 2])) for rank in range(4)]
    nothing: list[set[int]] = [set()] * 4
    ranks = four_ranks()
    assert exchange(ranks, nothing, [[]] * 4, 10) == []
    (change,) = exchange(ranks, everything, [[8]] * 4, 11)
    assert (change.alert, change.first, set(change.gone)) == ("frozen", 8, set(GROUPS))
    assert exchange(ranks, everything, [[]] * 4, 12) == []  # said once
    # Ranks that began at different windows agree on the one in which they say so.
    (change,) = exchange(ranks, nothing, [[17 + rank] for rank in range(4)], 21)
    assert (change.alert, change.first, change.gone) == ("unfrozen", 21, ())
    # A rank that came and went between two measured windows leaves no count behind.
    (change,) = exchange(ranks, nothing, [[30, 34], [], [], []], 40)
    assert (change.groups, change.gone, change.first) == (tuple(dict.fromkeys(GROUPS)), (), 40)


def test_counts_fit_into_a_number_on_any_number_of_ranks() -> None:
    lengths = set()
    for n_ranks in (4, 4096, 40_000):
        (one, *_) = four_ranks(n_ranks)
        own = one.numbers(frozenset(range(STAGES[1])), [], 1)
        lengths.add(len(own))
        one.arrived(own * (n_ranks // 2), 1)  # all ranks of the stage; exact, as the sum over ranks is
        assert one.frozen == NAMES[: STAGES[1]]
    assert lengths == {3 + 8}  # 22 parameters, three to a number
