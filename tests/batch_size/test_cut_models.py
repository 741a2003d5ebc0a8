"""Models cut over ranks: windows that cannot be used have a reason on all ranks, and a rank may have no data."""

from __future__ import annotations

import gc
import re
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.experimental import context_parallel

import sonde
from tests.batch_size.cut_loops import CHUNK, attached, n_chunks, train
from tests.batch_size.cuts import made
from tests.batch_size.set_ups import N_MICRO, Loop, tokens
from tests.ranks import Ranks, mesh_of


def trained(loop: Loop, compares: bool = False) -> dict[str, Any]:
    return train(loop, probed=True, compares=compares)


GPIPE = Loop("pp", schedule="ScheduleGPipe")
UNUSABLE: dict[str, tuple[int, Loop, str]] = {
    "no process_group=": (
        2,
        Loop("plain", summed=True, says_so=False, clips=False),
        "pass process_group= if you average them yourself",
    ),
    "two backwards in a piece that ranks share": (
        2,
        Loop("fsdp over cp", twice=True),
        "add the losses and call backward once",
    ),
    "large layers in another order": (
        2,
        Loop("fsdp over cp", in_order=False),
        "raise staging_mib, or define layers in the order of forward",
    ),
    "a single piece of experts": (
        4,
        Loop("ep fsdp", n_feeding=4, n_pieces=1),
        "the experts had a single piece in the window",
    ),
    "other pieces of experts": (
        4,
        Loop("ep fsdp", merges=True),
        "ranks that feed the same experts had different numbers of pieces",
    ),
    "no expert_mesh=": (4, Loop("ep plain", says_so=False), "the gradient is not a multiple of the sum of its pieces"),
    "no expert_mesh=, no clip": (
        4,
        Loop("ep plain", says_so=False, clips=False),
        "the gradient is not a multiple of the sum of its pieces",
    ),
}


@pytest.mark.parametrize("name", UNUSABLE)
def test_windows_that_cannot_be_used_have_a_reason(request: pytest.FixtureRequest, name: str) -> None:
    n_ranks, loop, reason = UNUSABLE[name]
    for result in request.getfixturevalue(f"ranks{n_ranks}")(trained, loop):
        assert result["reading"].windows == 0
        said = *result["alerts"].values(), *result["reading"].dropped
        assert any(reason in message for message in said), said


def test_a_larger_staging_area_takes_layers_in_another_order(ranks2: Ranks) -> None:
    for result in ranks2(trained, Loop("fsdp over cp", in_order=False, options={"staging_mib": 8.0}), True):
        assert result["alerts"] == {}
        assert result["reading"].windows == 2
    assert n_chunks(Loop("fsdp over cp")) > n_chunks(Loop("fsdp over cp"), 8 * 2**18) == 1 < CHUNK


def test_gradients_that_are_reduced_in_bf16_count_and_are_near(ranks2: Ranks) -> None:
    results = ranks2(trained, Loop(bf16="reduced", clips=False), True)
    for result in results:
        assert result["alerts"] == {}
        for window, exact in zip(result["windows"], results[0]["by hand"], strict=True):
            (found, *_), (expected, *_) = window["euclidean"], exact["euclidean"]
            assert found == pytest.approx(expected, rel=2e-2, abs=2e-2 * expected[0])


@pytest.mark.parametrize(
    ("n_ranks", "loop"),
    [(2, Loop(clips=False, sync="every", weighted=True)), (4, Loop(mesh=(2, 2)))],
    ids=["FSDP2", "HSDP"],
)
def test_examples_of_covered_parameters_alone(request: pytest.FixtureRequest, n_ranks: int, loop: Loop) -> None:
    """One parameter is in no layer with a rule: the noise scale is that of the others, and the alert says so."""
    loop = replace(loop, options={"per_example": "always"})
    results = request.getfixturevalue(f"ranks{n_ranks}")(trained, loop, True)
    for result in results:
        assert "LM has no rule" in result["alerts"]["not_covered"]
        reading = result["reading"]
        assert reading.coverage.n_parameters == reading.coverage.n_all - 1
        assert 0 < reading.coverage.part < 1
        assert "scale" not in reading.groups
        for window, exact in zip(result["windows"], results[0]["by hand"], strict=True):
            left_out = window["euclidean"].index((0.0, 0.0))
            covered = [value for k, value in enumerate(exact["euclidean"]) if k not in (0, left_out)]
            expected = torch.tensor([[sum(column) for column in zip(*covered, strict=True)], *covered])
            found = torch.tensor([value for k, value in enumerate(window["euclidean"]) if k != left_out])
            assert (found - expected).abs().max() < 1e-5 * expected[0, 0]


@pytest.mark.parametrize("head", [True, False])
@pytest.mark.shows("measure", "LoRA below FSDP2")
def test_a_measurement_of_adapters_is_that_of_one_process(ranks2: Ranks, head: bool) -> None:
    expected = measured(head, "whole", [0, 1])
    for found in ranks2(measured_on_rank, head):
        assert found == pytest.approx(expected, rel=1e-6)  # gradients are of fp32


def measured(head: bool, adapters: str, ranks: list[int]) -> tuple[float | None, float | None]:
    """tr Σ and |G|² at fixed weights, of the pieces of these ranks."""
    cut = made(Loop("fsdp" if adapters == "hooks" else "one process", adapters=adapters, head=head))
    batches = [tokens(cut.loop, rank, window, k) for window in range(6) for k in range(2) for rank in ranks]

    def loss(model: nn.Module, ids: Tensor) -> Tensor:
        return nn.functional.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())

    reading = sonde.measure(cut.model, loss, batches, unit="rows", until=0.01, verbose=False).reading
    return reading.trace_cov, reading.grad_sq


def measured_on_rank(head: bool) -> tuple[float | None, float | None]:
    return measured(head, "hooks", [dist.get_rank()])


# Context parallelism that is not told.


def under_torchs() -> dict[str, str]:
    model = nn.Linear(4, 4)
    probe = sonde.attach(model, unit="rows", verbose=False, process_group=dist.group.WORLD)
    x = torch.randn(2, 4, 4)
    with context_parallel(mesh_of((2,)), buffers=[x], buffer_seq_dims=[1]):
        for _ in range(2):
            with probe.piece(units=2):
                model(x).square().sum().backward()
    probe.step()
    probe.reading()
    alerts = dict(probe.alerts)
    probe.close()
    return alerts


def test_torchs_context_parallelism_is_noticed(ranks2: Ranks) -> None:
    """Without cp_mesh=, each rank's part of a sequence would count as a piece."""
    for alerts in ranks2(under_torchs):
        assert "pass cp_mesh=" in alerts["context_parallel"]


def with_named_axes() -> list[dict[str, str]]:
    """Alerts at attach of a model of FSDP2 over an axis that is named after context parallelism."""
    found = []
    mesh = mesh_of((1, 2), ("dp", "dp_cp"))
    for arguments in ({}, {"mesh": mesh, "cp_mesh": mesh["dp_cp"]}, {"cp_mesh": mesh["dp"]}):
        model = fully_shard(nn.Linear(4, 4), mesh=mesh["dp_cp"])
        with sonde.attach(model, unit="rows", verbose=False, **arguments) as probe:  # type: ignore[arg-type]
            found.append(dict(probe.alerts))
    return found


def test_an_axis_named_after_context_parallelism_raises_an_alert(ranks2: Ranks) -> None:
    """An axis of one rank says that there is none."""
    for without, with_axis, with_axis_of_one in ranks2(with_named_axes):
        assert "'dp_cp'" in without["context_axis"]
        assert with_axis == with_axis_of_one == {}


# Pipelines.


def misused(how: str) -> tuple[str, dict[str, int]]:
    """What is said, and which windows were dropped."""
    cut, said = made(GPIPE), ""
    given: dict[str, dict[str, Any]] = {
        "too few units": {"units": [1.0]},
        "too few weights of units": {"unit_weights": [[1.0, 1.0]]},
        "a bad weight": {"weights": 0.0},
    }
    with attached(cut, None, units_per_piece=3) as probe:
        try:
            if how == "outside":
                cut.run_schedule(0)
            else:
                with probe.pieces({"fewer": 2, "more": 6}.get(how, N_MICRO), **given.get(how, {})):
                    cut.run_schedule(0)
            probe.step()
        except (RuntimeError, ValueError) as error:
            said = str(error)
        return said, dict(probe.reading().dropped) if how not in given else {}


@pytest.mark.parametrize(
    ("how", "refused", "reason"),
    [
        ("too few units", "units must have one number for each of 4 micro-batches, got 1", ""),
        ("too few weights of units", "unit_weights must have one number for each of 4 micro-batches, got 1", ""),
        ("a bad weight", "weight must be positive and finite, got 0.0", ""),
        ("fewer", "", "another number of gradients than the schedule"),
        ("more", "", "another number of gradients than the schedule"),
        ("outside", "", "ran outside pieces()"),
    ],
)
def test_misuse_of_a_pipeline(ranks2: Ranks, how: str, refused: str, reason: str) -> None:
    for said, dropped in ranks2(misused, how):
        assert said == refused if not refused else refused in said
        assert [reason in each for each in dropped] == ([True] if reason else [])


def not_told(loop: Loop) -> list[str]:
    """What attach and measure say of a stage that is not told to be one; and `pieces`, where attach cannot know it."""
    cut, said = made(loop), []
    for how in ("attach", "measure", "pieces"):
        if how == "pieces":
            cut.schedule = None  # and with it the stages
            gc.collect()
        try:
            if how == "measure":
                sonde.measure(cut.model, lambda m, x: m(x).mean(), [torch.ones(2, 3)], unit="rows", verbose=False)
            else:
                with sonde.attach(cut.model, unit="sequences", verbose=False, every=1, units_per_piece=3) as probe:
                    probe.pieces(N_MICRO)
            said.append("no error")
        except (ValueError, RuntimeError) as error:
            said.append(str(error))
    return said


@pytest.mark.parametrize(
    ("n_ranks", "loop"),
    [
        (2, GPIPE),
        (2, Loop("pp", schedule="ScheduleZBVZeroBubble", looped=((0, 3), (1, 2)))),
        (4, Loop("pp ddp", axes={"dp": 2})),
        (4, Loop("pp fsdp", axes={"dp": 2})),
    ],
    ids=lambda value: getattr(value, "cut", ""),
)
def test_a_stage_is_not_taken_for_the_whole_model(request: pytest.FixtureRequest, n_ranks: int, loop: Loop) -> None:
    """Its norm and its noise scale would differ from stage to stage, and a clip would scale each by another number."""
    stage = r"the model (is|holds) stage \d of a pipeline of \d stages.*"
    for at_attach, by_measure, at_pieces in request.getfixturevalue(f"ranks{n_ranks}")(not_told, loop):
        assert re.match(stage + "pass pp_mesh=", at_attach)
        assert re.match(stage + "sonde.measure takes whole models, so attach a probe with pp_mesh=", by_measure)
        assert "the probe knows of none: pass pp_mesh= to attach" in at_pieces
