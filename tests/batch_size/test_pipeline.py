"""The noise scale under pipeline parallelism: a window's pieces are the micro-batches of the schedule."""

from __future__ import annotations

import gc
import re
from dataclasses import replace
from typing import Any

import pytest
import torch

import sonde
from tests.batch_size.cut_models import assert_same_values
from tests.batch_size.pipeline_loops import (
    IGNORED,
    N_PIECES,
    PIPELINES,
    UNITS,
    WIDER,
    WINDOWS,
    Pipeline,
    by_hand,
    data,
    part_of,
    run,
    stages_of,
    train,
    units,
    weights,
    whole_model,
)
from tests.ranks import Ranks


def _train(pipe: Pipeline, probed: bool) -> dict[str, Any]:
    return train(pipe, probed=probed)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("GPipe", marks=pytest.mark.shows("noise scale", "PP")),
        pytest.param("FSDP2", marks=pytest.mark.shows("noise scale", "PP with FSDP2")),
        pytest.param("DDP", marks=pytest.mark.shows("noise scale", "PP with DDP")),
        pytest.param("TP", marks=pytest.mark.shows("noise scale", "PP with TP")),
        pytest.param("SP", marks=pytest.mark.shows("noise scale", "PP with SP")),
        pytest.param("GPipe, Adam's metric", marks=pytest.mark.shows("adam metric", "PP")),
        pytest.param("DDP, Adam's metric", marks=pytest.mark.shows("adam metric", "PP with DDP")),
        pytest.param("TP, Adam's metric, no clip", marks=pytest.mark.shows("adam metric", "PP with TP")),
        pytest.param("SP, Adam's metric", marks=pytest.mark.shows("adam metric", "PP with SP")),
        *(name for name in PIPELINES if not name.startswith("GPipe")),
        *("FSDP2, no clip", "DDP, no clip", "SP, no clip"),
    ],
)
def test_values_and_training_unchanged(request: pytest.FixtureRequest, name: str) -> None:
    """One collective a window carries the pieces, the gradient and the clip; all ranks get the same numbers."""
    pipe = (PIPELINES | WIDER)[name]
    ranks: Ranks = request.getfixturevalue("ranks2" if name in PIPELINES else "ranks4")
    check(ranks(_train, pipe, True), ranks(_train, pipe, False), pipe)


@pytest.mark.parametrize(
    "axes",
    [
        pytest.param({"dp": 4, "replicas": 2}, marks=pytest.mark.shows("noise scale", "PP with HSDP")),
        pytest.param({"dp": 2, "tp": 2}, marks=pytest.mark.shows("noise scale", "PP with FSDP2 over TP")),
    ],
)
def test_pipeline_over_two_axes(ranks8: Ranks, axes: dict[str, Any]) -> None:
    pipe = Pipeline("Schedule1F1B", weighted=True, **axes)
    check(ranks8(_train, pipe, True), ranks8(_train, pipe, False), pipe)


def check(probed: list[dict[str, Any]], plain: list[dict[str, Any]], pipe: Pipeline) -> None:
    for result, without in zip(probed, plain, strict=True):
        assert result["alerts"] == {}
        for window, exact in zip(result["windows"], result["by hand"], strict=True):
            if exact is None:  # before the optimizer's first step
                assert window is None
                continue
            assert window is not None, result["reading"].dropped
            assert window.keys() == exact.keys()
            in_order = [exact[part] for part in window]
            assert_same_values(list(window.values()), in_order, result["reading"].effective_units)
        assert all(map(torch.equal, result["weights"], without["weights"]))
        assert result["norms"] == without["norms"]
        # Partial gradients of norms are summed piece by piece, and once more at the end of a window.
        n_partial = WINDOWS * (N_PIECES + 1) if pipe.in_sequence else 0
        n_more = result["collectives"] - without["collectives"]
        assert n_more == (0 if pipe.clips else WINDOWS) + n_partial
    assert len({str(result["windows"]) for result in probed}) == 1


def _misused(how: str) -> tuple[str, dict[str, int]]:
    """What is said, and which windows were dropped."""
    mesh, model, schedule, numbers, n_stages = stages_of(PIPELINES["GPipe"])
    options: Any = {"unit": "sequences", "verbose": False, "every": 1, "units_per_piece": UNITS}
    said = ""
    with sonde.attach(model, mesh=mesh, pp_mesh=mesh["pp"], **options) as probe:
        try:
            if how == "outside":
                run(schedule, numbers, n_stages, 0, 0)
            else:
                n = {"fewer": 2, "more": 6}.get(how, N_PIECES)
                too_few: Any = {
                    "too few units": {"units": [1.0]},
                    "too few weights of units": {"unit_weights": [[1.0, 1.0]]},
                }
                given: Any = (too_few | {"a bad weight": {"weights": 0.0}}).get(how, {})
                with probe.pieces(n, **given):
                    run(schedule, numbers, n_stages, 0, 0)
            probe.step()
        except (RuntimeError, ValueError) as error:
            said = str(error)
        dropped = dict(probe.reading().dropped) if how in ("fewer", "more", "outside") else {}
    return said, dropped


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("too few units", "units must have one number for each of 4 micro-batches, got 1"),
        ("too few weights of units", "unit_weights must have one number for each of 4 micro-batches, got 1"),
        ("a bad weight", "weight must be positive and finite, got 0.0"),
    ],
)
def test_misuse_is_refused(ranks2: Ranks, how: str, message: str) -> None:
    for said, _ in ranks2(_misused, how):
        with pytest.raises(ValueError, match=message):
            raise ValueError(said)


@pytest.mark.parametrize("how", ["fewer", "more", "outside"])
def test_micro_batches_that_cannot_be_told_apart_drop_the_window(ranks2: Ranks, how: str) -> None:
    message = "ran outside pieces()" if how == "outside" else "another number of gradients than the schedule"
    for said, dropped in ranks2(_misused, how):
        assert said == ""
        assert [message in reason for reason in dropped] == [True]


def _filled_up(pipe: Pipeline) -> tuple[list[Any], list[Any]]:
    """One data-parallel rank runs schedules without pieces, in which no target counts, so that its peers can reduce."""
    mesh, model, schedule, numbers, n_stages = stages_of(pipe)
    dp_rank = mesh.get_local_rank("dp")
    options: dict[str, Any] = {"unit": "sequences", "verbose": False, "every": 1, "groups": part_of}
    with sonde.attach(model, mesh=mesh, pp_mesh=mesh["pp"], **options) as probe:
        values, by_one = [], []
        for window in range(WINDOWS):
            if dp_rank == 0:
                with probe.pieces(N_PIECES, units=units(0, weighted=True), weights=weights(0, window, True)):
                    run(schedule, numbers, n_stages, 0, window)
            else:
                inputs, targets = data(1, window)
                nothing = {"target": torch.full_like(targets, IGNORED)} if n_stages - 1 in numbers else {}
                schedule.step(*([inputs] if 0 in numbers else []), **nothing)
            probe.step()
            model.zero_grad()
            solved = probe.window()
            values.append(solved and (solved.total.trace_cov, solved.total.grad_sq))
            by_one.append(by_hand(whole_model(model, mesh), replace(pipe, dp=1), window)[""])
        return values, by_one


@pytest.mark.parametrize("ddp", [True, False])
def test_a_rank_without_micro_batches_fills_up_from_the_first_window_on(ranks4: Ranks, ddp: bool) -> None:
    for values, by_one in ranks4(_filled_up, Pipeline("Schedule1F1B", dp=2, ddp=ddp, weighted=True)):
        for value, (trace_cov, grad_sq) in zip(values, by_one, strict=True):
            # Averaged over two ranks, the gradient is half as large as that of the one rank with data.
            assert value == pytest.approx((trace_cov / 4, grad_sq / 4), abs=1e-5 * trace_cov / 4)


def _refusal(name: str, axis: str | None = None, tap: Any = "leaf") -> str:
    """What attach says, where `mesh=` is all ranks or one of their axes."""
    mesh, model, *_ = stages_of((PIPELINES | WIDER)[name])
    try:
        sonde.attach(
            model, unit="sequences", verbose=False, mesh=mesh[axis] if axis else mesh, pp_mesh=mesh["pp"], tap=tap
        )
    except ValueError as error:
        return str(error)
    return "no error"


def test_buckets_of_a_pipeline_are_refused(ranks4: Ranks) -> None:
    """They hold a whole window, and the schedule's micro-batches are the pieces."""
    for said in ranks4(_refusal, "DDP", None, "comm_hook"):
        assert "got a model of kind DistributedDataParallel in pipeline stages" in said


def test_a_mesh_without_the_stages_is_refused(ranks2: Ranks) -> None:
    for said in ranks2(_refusal, "GPipe", "dp"):
        assert "pp_mesh= is no axis of mesh=" in said


def _measured_at_a_stage(name: str) -> str:
    _, model, schedule, *_ = stages_of(PIPELINES[name])
    try:
        sonde.measure(model, lambda m, x: m(x).square().mean(), [torch.ones(2, 3)], unit="rows", verbose=False)
    except ValueError as error:
        return str(error)
    finally:
        del schedule
        gc.collect()
    return "no error"


def test_a_stage_is_not_measured_at_a_checkpoint(ranks2: Ranks) -> None:
    for said in ranks2(_measured_at_a_stage, "GPipe"):
        assert re.match(r"the model (is|holds) stage \d of a pipeline of 2 stages", said)
        assert ": sonde.measure takes whole models, so attach a probe with pp_mesh=" in said


def _without_its_axis(name: str) -> tuple[str, str]:
    """What attach says of a stage that it is not told to be one; and `pieces`, where attach cannot know it yet."""
    _, model, schedule, numbers, n_stages = stages_of((PIPELINES | WIDER)[name])
    said = []
    for is_known in (True, False):
        if not is_known:
            del schedule  # and with it the stages
            gc.collect()
        try:
            with sonde.attach(model, unit="sequences", verbose=False, every=1, units_per_piece=UNITS) as probe:
                probe.pieces(N_PIECES)
            said.append("no error")
        except (ValueError, RuntimeError) as error:
            said.append(str(error))
    assert len(numbers) < n_stages
    return said[0], said[1]


@pytest.mark.parametrize("name", ["GPipe", "zero bubble in a V", "DDP", "FSDP2"])
def test_a_stage_is_not_taken_for_the_whole_model(request: pytest.FixtureRequest, name: str) -> None:
    """Its norm and its noise scale would differ from stage to stage, and a clip would scale each by another number."""
    n_ranks = 2 * (PIPELINES | WIDER)[name].dp
    for at_attach, at_pieces in request.getfixturevalue(f"ranks{n_ranks}")(_without_its_axis, name):
        assert re.match(r"the model (is|holds) stage \d of a pipeline of \d stages.*pass pp_mesh=", at_attach)
        assert "the probe knows of none: pass pp_mesh= to attach" in at_pieces
