"""The noise scale under FSDP2: the same numbers as one process with the same pieces, and training unchanged."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.batch_size.cut_models import assert_same_values
from tests.batch_size.sharded_loops import UNITS, Loop, train
from tests.ranks import Ranks

LOOPS = {
    "default": Loop(),
    "reshard after forward": Loop(reshard=True),
    "no reshard": Loop(reshard=False),
    "every piece reduces": Loop(sync="every"),
    "no clip": Loop(clips=False),
    "no clip, every piece reduces": Loop(clips=False, sync="every", reshard=True),
    "weights": Loop(weighted=True),
    "bf16 parameters, reduced in fp32": Loop(mixed=True),
    "bf16 parameters, every piece reduces": Loop(mixed=True, sync="every", clips=False),
    "offloaded": Loop(offload=True),
    "offloaded, no clip": Loop(offload=True, clips=False),
    "tied": Loop(tied=True),
    "frozen": Loop(frozen=True),
    "checkpointed": Loop(checkpoints=True),
    "compiled blocks": Loop(compiled=True),
    "evaluation between": Loop(evaluates=True),
    "several forwards": Loop(forwards=2),
    "late": Loop(late=2, evaluates=True),
    "a group for each parameter": Loop(options={"groups": "parameters"}),
}


def _values(loop: Loop, probed: bool = True) -> dict[str, Any]:
    return train(loop, probed=probed, values=True)


def assert_as_by_hand(results: list[dict[str, Any]], loop: Loop) -> None:
    # bf16 gradients are the same bits; FSDP2 sums them in fp32 but the witness allows for bf16.
    for result in results:
        assert result["alerts"] == {}
        assert result["hooks"] == 0
        assert len(result["windows"]) == loop.windows
        for window, exact in zip(result["windows"], result["by hand"], strict=True):
            assert window is not None, result["reading"].dropped
            assert_same_values(window, exact, result["reading"].effective_units)
    assert len({str(result["windows"]) for result in results}) == 1  # all ranks say the same


@pytest.mark.parametrize("name", LOOPS)
@pytest.mark.shows("noise scale", "FSDP2")
def test_values_and_training_unchanged(ranks2: Ranks, name: str) -> None:
    loop = LOOPS[name]
    results = ranks2(_values, loop)
    assert_as_by_hand(results, loop)
    assert_unchanged(results, ranks2(_values, loop, False), loop)


@pytest.mark.parametrize("name", ["default", "no clip, every piece reduces"])
def test_three_ranks(ranks3: Ranks, name: str) -> None:
    loop = LOOPS[name]
    results = ranks3(_values, loop)
    assert_as_by_hand(results, loop)
    assert_unchanged(results, ranks3(_values, loop, False), loop)


@pytest.mark.parametrize(
    "loop",
    [
        pytest.param(Loop(mesh=(2, 2)), marks=pytest.mark.shows("noise scale", "HSDP")),
        Loop(mesh=(2, 2), clips=False, sync="every"),
        Loop(mesh=(2, 2), mixed=True, evaluates=True),
        Loop(reshard=2),
        Loop(reshard=2, sync="every", clips=False),
        Loop(reshard=2, evaluates_last=True),
    ],
    ids=lambda loop: f"{loop.mesh or 4} {loop.reshard} {loop.sync}{' evaluates last' * loop.evaluates_last}",
)
def test_four_ranks(ranks4: Ranks, loop: Loop) -> None:
    """If a forward is the last before the window ends, FSDP2 shows parameters in two parts there, with reshard=2."""
    results = ranks4(_values, loop)
    assert_as_by_hand(results, loop)
    assert_unchanged(results, ranks4(_values, loop, False), loop)


def test_reduced_in_bf16(ranks2: Ranks) -> None:
    """The gradient is rounded to bf16 before it is summed: the windows count, and their numbers are near."""
    loop = Loop(reduced_in_bf16=True, clips=False)
    for result in ranks2(_values, loop):
        assert result["alerts"] == {}
        for window, exact in zip(result["windows"], result["by hand"], strict=True):
            assert window[0] == pytest.approx(exact[0], rel=2e-2, abs=2e-2 * exact[0][0])


def assert_unchanged(results: list[dict[str, Any]], without: list[dict[str, Any]], loop: Loop) -> None:
    """Bit for bit. The clip's own collective carries the window; without a clip the window has one of its own."""
    for with_probe, unprobed in zip(results, without, strict=True):
        assert all(map(torch.equal, with_probe["weights"], unprobed["weights"]))
        assert with_probe["norms"] == unprobed["norms"]
        assert with_probe["reading"].windows == loop.windows
        assert with_probe["collectives"] - unprobed["collectives"] == (0 if loop.clips else loop.windows)


@pytest.mark.parametrize("name", ["default", "checkpointed", "compiled blocks", "bf16 parameters, reduced in fp32"])
def test_random_numbers_stay_the_same(ranks2: Ranks, name: str) -> None:
    """Dropout draws them in forward, and a checkpoint draws them again."""
    loop = replace(LOOPS[name], dropout=True, windows=6)
    assert_unchanged(ranks2(_unchanged, loop, True), ranks2(_unchanged, loop, False), loop)


def _unchanged(loop: Loop, probed: bool) -> dict[str, Any]:
    return train(loop, probed=probed)


@pytest.mark.parametrize("clips", [True, False])
def test_windows_that_are_not_measured_take_no_collective(ranks2: Ranks, clips: bool) -> None:
    loop = Loop(clips=clips, dropout=True, windows=40, options={"every": 3})
    for with_probe, without in zip(ranks2(_unchanged, loop, True), ranks2(_unchanged, loop, False), strict=True):
        assert all(map(torch.equal, with_probe["weights"], without["weights"]))
        assert with_probe["norms"] == without["norms"]
        assert 13 <= with_probe["reading"].windows <= 15
        n_more = 0 if clips else with_probe["reading"].windows
        assert with_probe["collectives"] - without["collectives"] == n_more


EXAMPLES = {
    "default": Loop(covered=True),
    "no clip, every piece reduces, reshard": Loop(covered=True, clips=False, sync="every", reshard=True),
    "weights": Loop(covered=True, weighted=True),
    "checkpointed, tied, evaluation between": Loop(covered=True, checkpoints=True, tied=True, evaluates=True),
    "offloaded, frozen": Loop(covered=True, offload=True, frozen=True),
    "late": Loop(covered=True, late=2),
}


@pytest.mark.parametrize("name", EXAMPLES)
@pytest.mark.shows("single examples", "FSDP2")
def test_single_examples(ranks2: Ranks, name: str) -> None:
    """Every example of every rank is a piece; their numbers ride in the same collective, and training is unchanged."""
    loop = replace(EXAMPLES[name], options={"per_example": "always"})
    results = ranks2(_values, loop)
    assert_as_by_hand(results, loop)
    assert {result["reading"].u for result in results} == {1.0}
    sizes = [n for units in UNITS[:2] for n in units]
    n_effective = sum(sizes) if loop.weighted else len(sizes) ** 2 / sum(1 / n for n in sizes)
    assert results[0]["reading"].effective_units == pytest.approx(n_effective)
    assert_unchanged(results, ranks2(_values, loop, False), loop)


@pytest.mark.parametrize(
    "loop",
    [Loop(covered=True, mesh=(2, 2)), Loop(covered=True, mesh=(2, 2), clips=False, sync="every", weighted=True)],
    ids=["clip", "weights, no clip, every piece reduces"],
)
@pytest.mark.shows("single examples", "HSDP")
def test_single_examples_under_hsdp(ranks4: Ranks, loop: Loop) -> None:
    loop = replace(loop, options={"per_example": "always"})
    results = ranks4(_values, loop)
    assert_as_by_hand(results, loop)
    assert {result["reading"].u for result in results} == {1.0}
    assert_unchanged(results, ranks4(_values, loop, False), loop)


@pytest.mark.parametrize("loop", [Loop(), Loop(clips=False, sync="every", weighted=True)], ids=["clip", "weights"])
def test_single_examples_of_covered_parameters(ranks2: Ranks, loop: Loop) -> None:
    """One parameter is in no layer with a rule: the noise scale is that of the others, and the alert says so."""
    assert_covered_part_as_by_hand(ranks2, loop)


def test_single_examples_of_covered_parameters_under_hsdp(ranks4: Ranks) -> None:
    assert_covered_part_as_by_hand(ranks4, Loop(mesh=(2, 2)))


def assert_covered_part_as_by_hand(ranks: Ranks, loop: Loop) -> None:
    loop = replace(loop, options={"per_example": "always"})
    results = ranks(_values, loop)
    for result in results:
        assert "LM has no rule" in result["alerts"]["not_covered"]
        reading = result["reading"]
        assert reading.coverage.n_parameters == reading.coverage.n_all - 1
        assert 0 < reading.coverage.part < 1
        assert "scale" not in reading.groups
        for window, exact in zip(result["windows"], result["by hand"], strict=True):
            left_out = window.index((0.0, 0.0))
            covered = torch.tensor(exact[1:left_out] + exact[left_out + 1 :], dtype=torch.float64)
            expected = torch.cat([covered.sum(0, keepdim=True), covered])
            got = torch.tensor(window[:left_out] + window[left_out + 1 :], dtype=torch.float64)
            assert (got - expected).abs().max() < 1e-5 * expected[0, 0]
    assert_unchanged(results, ranks(_values, loop, False), loop)
