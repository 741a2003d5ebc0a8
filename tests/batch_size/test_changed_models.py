"""What becomes of a model in mid-run, whatever it is cut by: the right number or a reason on all ranks, never a hang.

Torch itself refuses some of it: DDP an exchanged or frozen parameter.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from tests.batch_size.cut_loops import attached as attached_to_cut
from tests.batch_size.cut_loops import run_pieces
from tests.batch_size.cuts import Cut, made
from tests.batch_size.loops import attached, load_foreign_state, train
from tests.batch_size.set_ups import Loop
from tests.ranks import Ranks, mesh_of

SETUPS: dict[str, tuple[int, Loop]] = {
    "plain": (1, Loop("one process")),
    "DDP": (2, Loop("ddp")),
    "FSDP2": (2, Loop("fsdp")),
    "TP": (2, Loop("tp")),
    "PP": (2, Loop("pp", schedule="ScheduleGPipe")),
    "DDP over CP": (2, Loop("ddp over cp")),
    "FSDP2 over CP": (2, Loop("fsdp over cp")),
    "EP": (4, Loop("ep fsdp")),
}
BEFORE, AFTER = 2, 3
"""Windows before something changes, and after it."""
REPLACED = "measured parameters are no longer in the model"
OF_DDP = "Expected to have finished reduction"


def layer_of(cut: Cut) -> tuple[nn.Module, str]:
    """A layer, as a child of its parent."""
    inner: Any = getattr(cut.model, "module", cut.model)
    inner = inner[0] if cut.loop.has("pp") else inner
    return (inner, "head") if hasattr(inner, "head") else (inner.block0, "down")


def new_layer(parent: nn.Module, name: str) -> None:
    old = getattr(parent, name)
    setattr(parent, name, nn.Linear(old.in_features, old.out_features, bias=old.bias is not None))


def new_parameter(parent: nn.Module, name: str) -> None:
    layer = getattr(parent, name)
    layer.weight = nn.Parameter(layer.weight.detach().clone())


def new_values(parent: nn.Module, name: str) -> None:
    for p in parent.parameters():
        p.data = p.data.clone()


def frozen(parent: nn.Module, name: str) -> None:
    getattr(parent, name).requires_grad_(False)


CHANGES = (new_layer, new_parameter, new_values, frozen)


def changed(loop: Loop, change: Callable[[nn.Module, str], None]) -> Any:
    """Windows that were averaged, windows that were dropped, and alerts; or what torch says."""
    cut = made(loop)
    with attached_to_cut(cut, None, staging_mib=8.0) as probe:
        for window in range(BEFORE + AFTER):
            if window == BEFORE:
                change(*layer_of(cut))
            try:
                run_pieces(cut, probe, window)
            except RuntimeError as error:
                return str(error)
            probe.step()
            cut.model.zero_grad()
        reading = probe.reading()
        return reading.windows, dict(reading.dropped), set(probe.alerts)


def everything(loop: Loop) -> dict[str, Any]:
    """All changes, and the state of another model."""
    found = {change.__name__: changed(loop, change) for change in CHANGES}
    cut = made(loop)
    with attached_to_cut(cut, None, unit="rows") as probe:
        run_pieces(cut, probe, 0)
        probe.step()
        return found | {"foreign state": load_foreign_state(probe)}


@pytest.mark.parametrize("setup", SETUPS)
def test_a_model_that_changes_in_mid_run(request: pytest.FixtureRequest, setup: str) -> None:
    n_ranks, loop = SETUPS[setup]
    results = [everything(loop)] if n_ranks == 1 else request.getfixturevalue(f"ranks{n_ranks}")(everything, loop)
    whole = (BEFORE + AFTER, {}, set())
    for found in results:
        assert found["new_values"] == whole
        for name in ("new_layer", "new_parameter"):
            if setup == "DDP":
                assert OF_DDP in found[name], name
            elif name == "new_parameter" and ("FSDP2" in setup or setup == "EP"):  # FSDP2 puts its own back
                assert found[name] == whole
            else:
                windows, dropped, alerts = found[name]
                [(reason, n)] = dropped.items()
                assert reason.startswith(REPLACED), name
                assert (windows, n, "replaced" in alerts) == (BEFORE, AFTER, True), name
        assert OF_DDP in found["frozen"] if setup == "DDP" else found["frozen"] == (BEFORE + AFTER, {}, {"trained"})
        message, is_unchanged = found["foreign state"]
        assert message.startswith("the state was saved by a probe that measured other parameters")
        assert is_unchanged


def with_other_pieces(loop: Loop, n_pieces: tuple[int, ...]) -> tuple[int, dict[str, int]]:
    """Two windows; in the second, ranks differ in how many pieces they say that they have."""
    cut, own = made(loop), n_pieces[dist.get_rank()]
    with attached_to_cut(cut, None, units_per_piece=3) as probe:
        run_pieces(cut, probe, 0)
        probe.step()
        cut.model.zero_grad()
        if loop.has("pp"):
            with probe.pieces(own):
                cut.run_schedule(1)
        else:
            for k in range(2):
                if k < own:
                    with probe.piece():
                        cut.backward(1, k, is_last=k == 1)
                else:
                    cut.backward(1, k, is_last=k == 1)
        probe.step()
        return probe.reading().windows, dict(probe.reading().dropped)


@pytest.mark.parametrize(
    ("setup", "n_pieces", "reason"),
    [
        ("PP", (4, 3), "another number of gradients than the schedule has micro-batches"),
        ("EP", (1, 2, 2, 2), "ranks that feed the same experts had different numbers of pieces"),
        ("EP", (2, 0, 2, 2), "ranks that feed the same experts had different numbers of pieces"),
    ],
)
def test_ranks_that_say_other_numbers_of_pieces(
    request: pytest.FixtureRequest, setup: str, n_pieces: tuple[int, ...], reason: str
) -> None:
    n_ranks, loop = SETUPS[setup]
    for windows, dropped in request.getfixturevalue(f"ranks{n_ranks}")(with_other_pieces, loop, n_pieces):
        assert [reason in each for each in dropped] == [True]
        assert (windows, *dropped.values()) == (1, 1)


# A wrapper that comes after attach.

WRAPPED = "were gradients averaged over ranks? Wrap the model in DDP before attach"
LATE = {
    "DDP": WRAPPED,
    "DDP inside": WRAPPED,
    "DDP of one rank": "",
    "FSDP2": f"{REPLACED}, and others that are not measured are in their place",
    "TP": f"{REPLACED}, and others that are not measured are in their place",
}


def wrapped(wrapper: str, model: nn.Sequential) -> Any:
    mesh = mesh_of((2,))
    if wrapper == "DDP":
        return DistributedDataParallel(model)
    if wrapper == "DDP inside":
        model[0], model[2] = DistributedDataParallel(model[0]), DistributedDataParallel(model[2])
    if wrapper == "DDP of one rank":
        alone = mesh_of((2, 1), ("all", "alone"))["alone"].get_group()
        return DistributedDataParallel(model, process_group=alone)
    if wrapper == "TP":
        parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    if wrapper == "FSDP2":
        fully_shard(model, mesh=mesh)
    return model


def wrapped_late(wrapper: str, at: int, n_pieces: int) -> tuple[int, dict[str, int], dict[str, str]]:
    """Some windows, and the wrapper before window `at`, counted from 0."""
    inner = nn.Sequential(nn.Linear(12, 8), nn.Tanh(), nn.Linear(8, 3))
    model: Any = inner
    own = 0 if wrapper == "TP" else dist.get_rank()
    with attached(inner, log_every=1, per_example="auto" if n_pieces == 1 else "never") as probe:
        for window in range(at + 3):
            if window == at:
                model = wrapped(wrapper, inner)
            train(model, probe, sizes=[4] * n_pieces, seed=10 * window + own)
        reading = probe.reading()
    return reading.windows, dict(reading.dropped), dict(probe.alerts)


@pytest.mark.parametrize("at", [0, 2])
@pytest.mark.parametrize("wrapper", LATE)
def test_a_wrapper_that_comes_after_attach(ranks2: Ranks, wrapper: str, at: int) -> None:
    reason, kind = LATE[wrapper], "changed" if "DDP" in wrapper else "replaced"
    for windows, dropped, alerts in ranks2(wrapped_late, wrapper, at, 2):
        if not reason:  # nothing is averaged over ranks
            assert (windows, dropped, alerts) == (at + 3, {}, {})
            continue
        assert (windows, sum(dropped.values())) == (at, 3)
        assert all(reason in each for each in dropped)
        assert reason in alerts[kind]
        assert set(alerts) <= {kind, "not_watched"}


def test_ddp_that_comes_after_attach_where_examples_are_read(ranks2: Ranks) -> None:
    for windows, dropped, _ in ranks2(wrapped_late, "DDP", 0, 1):
        assert (windows, sum(dropped.values())) == (0, 3)
        assert all(WRAPPED in each for each in dropped)


def test_a_new_parameter_is_counted_in_the_singular() -> None:
    cut = made(Loop("one process"))
    with attached_to_cut(cut, None) as probe:
        cut.model.scale = nn.Parameter(torch.ones(1))
        for window in range(2):
            run_pieces(cut, probe, window)
            probe.step()
        alert = probe.alerts["not_watched"]
    assert alert == "1 parameter came or became trainable after attach and cannot be measured (scale): attach again"


def test_a_loop_whose_gradients_reach_no_measured_parameter_is_named() -> None:
    """Its optimizer holds the new parameters alone, so no step ends a window."""
    model = nn.Sequential(nn.Linear(12, 8), nn.Tanh(), nn.Linear(8, 3))
    with attached(model, per_example="never") as probe:
        for name in ("0", "2"):
            new_layer(model, name)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(50):
            model(torch.randn(4, 12)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert list(probe.alerts) == ["no_step"]
    assert "attach after fully_shard and all else that replaces parameters" in probe.alerts["no_step"]


def test_backwards_to_inputs_alone_are_usual() -> None:
    """An attack, or a sampler of an energy, takes many steps on its inputs before the model's backward."""
    model = nn.Sequential(nn.Linear(12, 8), nn.Tanh(), nn.Linear(8, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with attached(model, units_per_piece=4, per_example="never") as probe:
        for _ in range(2):
            for _ in range(2):
                x = torch.randn(4, 12)
                for _ in range(40):
                    x.requires_grad_()
                    (grad,) = torch.autograd.grad(model(x).square().mean(), x)
                    x = (x + 0.1 * grad).detach()
                model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        assert probe.reading().windows == 2
    assert probe.alerts == {}
