"""Parameters that are frozen in mid-run begin the averages anew on all ranks at once, whichever ranks hold them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

from tests.batch_size.loops import attached, contents_of, counted, small_model
from tests.ranks import Ranks, mesh_of

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
            assert list(probe.alerts) == ["frozen"]
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
    assert list(alerts) == list(others) == ["frozen"]
    assert "(of other ranks)" in alerts["frozen"]
    assert "(0.weight, 0.bias)" in others["frozen"]
