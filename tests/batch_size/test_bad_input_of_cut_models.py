"""What goes wrong in pipelines, and under context and expert parallelism: a reason on all ranks, and never a hang.

`test_bad_input.py` has the same of plain models, DDP, FSDP2 and tensor parallelism.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

from tests.batch_size import context_loops, expert_loops
from tests.batch_size.loops import attached, load_foreign_state
from tests.ranks import Ranks, mesh_of

SETUPS = {"PP": 2, "DDP over CP": 2, "FSDP2 over CP": 2, "EP": 4}
"""How many ranks each takes."""
WIDTH, N_MICRO = 8, 4
BEFORE, AFTER = 3, 4
"""Windows before something changes, and after it."""


class Stage:
    """This rank's stage of a pipeline."""

    def __init__(self) -> None:
        torch.manual_seed(dist.get_rank())
        mesh = mesh_of((2,), ("pp",))
        self.inner = self.model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
        stage = PipelineStage(self.model, dist.get_rank(), 2, torch.device("cpu"), group=mesh.get_group())
        self.schedule = ScheduleGPipe(stage, N_MICRO, loss_fn=lambda out, target: (out - target).square().mean())
        self.arguments: dict[str, Any] = {"mesh": mesh, "pp_mesh": mesh}
        self.last = "2"

    def window(self, probe: Any, number: int, n_pieces: int = N_MICRO) -> None:
        """One window; `n_pieces` is what this rank says of it."""
        x = torch.randn(2 * N_MICRO, WIDTH, generator=torch.Generator().manual_seed(number))
        is_first = dist.get_rank() == 0
        with probe.pieces(n_pieces, units=2):
            self.schedule.step(*([x] if is_first else []), **({} if is_first else {"target": x}))
        probe.step()
        self.model.zero_grad()


class Model:
    """A model whose ranks share sequences or feed experts together."""

    def __init__(self, setup: str) -> None:
        rank = dist.get_rank()
        self.last = "head"
        if setup == "EP":
            experts = expert_loops.Loop()
            self.model, self.arguments = expert_loops.cut(experts)
            self.ids: Callable[[int, int], Tensor] = lambda window, k: expert_loops.tokens(rank, window, k)
            self.loss: Callable[[Tensor], Tensor] = lambda ids: expert_loops.loss_of(self.model, ids, experts)
        else:
            sequences = context_loops.Loop(cut="ddp" if setup.startswith("DDP") else "fsdp")
            self.model, self.arguments = context_loops.cut(sequences)  # type: ignore[assignment]
            self.ids = lambda window, k: context_loops.tokens(0, window, k)
            self.loss = lambda ids: context_loops.loss_of(self.model, ids, sequences, rank, 2)
        self.inner: Any = getattr(self.model, "module", self.model)

    def window(self, probe: Any, number: int, n_pieces: int = 2) -> None:
        """One window of two backwards, of which the first `n_pieces` are pieces."""
        for k in range(2):
            ids = self.ids(number, k)
            with probe.piece(units=len(ids)) if k < n_pieces else contextlib.nullcontext():
                self.loss(ids).backward()
        probe.step()
        self.model.zero_grad()


def made(setup: str) -> Any:
    return Stage() if setup == "PP" else Model(setup)


def new_layer(inner: nn.Module, name: str) -> None:
    old = inner.get_submodule(name)
    assert isinstance(old, nn.Linear)
    setattr(inner, name, nn.Linear(old.in_features, old.out_features, bias=old.bias is not None))


def new_parameter(inner: nn.Module, name: str) -> None:
    layer = inner.get_submodule(name)
    layer.weight = nn.Parameter(torch.zeros(layer.get_parameter("weight").shape))


def frozen(inner: nn.Module, name: str) -> None:
    inner.get_submodule(name).requires_grad_(False)


CHANGES = {"new layer": new_layer, "new parameter": new_parameter, "frozen": frozen}
PIECES = {"PP": {"fewer": (4, 3), "more": (4, 6)}, "EP": {"fewer": (1, 2, 2, 2), "none on one rank": (2, 0, 2, 2)}}
"""What ranks say of how many pieces they had. (Under context parallelism, ranks that differ wait for each other.)"""
OPTIONS: dict[str, dict[str, Any]] = {
    "groups": {"groups": None},
    "allowance": {"allowance": 7.0},
    "refused": {"allowance": -1},
}


def changed(setup: str, change: Callable[[nn.Module, str], None]) -> tuple[int, dict[str, int], set[str]]:
    """Windows that were averaged, windows that were dropped, and alerts; something changes in between."""
    cut = made(setup)
    with attached(cut.model, **cut.arguments) as probe:
        for number in range(BEFORE + AFTER):
            if number == BEFORE:
                change(cut.inner, cut.last)
            cut.window(probe, number)
        reading = probe.reading()
        return reading.windows, dict(reading.dropped), set(probe.alerts)


def with_other_pieces(setup: str, n_pieces: tuple[int, ...]) -> tuple[int, dict[str, int], set[str]]:
    """As `changed`; in the second window ranks differ in how many pieces they have."""
    cut = made(setup)
    with attached(cut.model, **cut.arguments) as probe:
        cut.window(probe, 0)
        cut.window(probe, 1, n_pieces[dist.get_rank()])
        reading = probe.reading()
        return reading.windows, dict(reading.dropped), set(probe.alerts)


def with_other_options(setup: str, options: dict[str, Any]) -> str:
    """What attach says; rank 1 has options of its own."""
    cut = made(setup)
    try:
        attached(cut.model, **cut.arguments, **(options if dist.get_rank() == 1 else {})).close()
    except ValueError as error:
        return str(error)
    return "no error"


def with_foreign_state(setup: str) -> tuple[str, bool]:
    cut = made(setup)
    with attached(cut.model, **cut.arguments) as probe:
        cut.window(probe, 0)
        return load_foreign_state(probe)


def everything(setup: str) -> dict[str, Any]:
    """All of this on one rank, in one launch."""
    found: dict[str, Any] = {name: changed(setup, change) for name, change in CHANGES.items()}
    found |= {name: with_other_pieces(setup, n) for name, n in PIECES.get(setup, {}).items()}
    found |= {name: with_other_options(setup, options) for name, options in OPTIONS.items()}
    return found | {"foreign state": with_foreign_state(setup)}


REPLACED = "measured parameters are no longer in the model"
OTHER_PIECES = {
    "PP": "another number of gradients than the schedule has micro-batches",
    "EP": "ranks that feed the same experts had different numbers of pieces",
}


@pytest.mark.parametrize("setup", SETUPS)
def test_bad_input_has_a_reason_on_all_ranks(request: pytest.FixtureRequest, setup: str) -> None:
    if setup == "PP" and torch.__version__ < "2.11":
        pytest.skip("torch 2.9 itself fails in a pipeline's first exchange over gloo")
    ranks: Ranks = request.getfixturevalue(f"ranks{SETUPS[setup]}")
    for rank, found in enumerate(ranks(everything, setup)):
        for name in ("new layer", "new parameter"):
            windows, dropped, alerts = found[name]
            if name == "new parameter" and setup in ("FSDP2 over CP", "EP"):  # FSDP2 puts its own back
                assert (windows, dropped, alerts) == (BEFORE + AFTER, {}, set())
                continue
            (reason,) = dropped
            assert reason.startswith(REPLACED), name
            assert (windows, dropped[reason], "replaced" in alerts) == (BEFORE, AFTER, True), name
        assert found["frozen"] == (BEFORE + AFTER, {}, {"frozen"})
        for name in PIECES.get(setup, {}):
            windows, dropped, _ = found[name]
            (reason,) = dropped
            assert OTHER_PIECES[setup] in reason, name
            assert (windows, dropped[reason]) == (1, 1), name
        assert "the groups of parameters differs between ranks" in found["groups"]
        assert "allowance differs between ranks" in found["allowance"]
        expected = "allowance must be seconds" if rank == 1 else "another rank refused to attach"
        assert expected in found["refused"]
        message, is_unchanged = found["foreign state"]
        assert message.startswith("the state was saved by a probe that measured other parameters")
        assert is_unchanged
