"""The noise scale under expert parallelism: experts' pieces are what a group of ranks fed them in one backward."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Shard, distribute_tensor

import sonde
from sonde.parallel.data_ranks import check_whole_mesh
from tests.batch_size.cut_models import assert_same_values
from tests.batch_size.expert_loops import Loop, cut, train
from tests.gradient_norm.routed_experts import build
from tests.ranks import Ranks, mesh_of

LOOPS = {
    "EP2 × FSDP2": Loop(),
    "EP2 × FSDP2, weights, no clip": Loop(weighted=True, clips=False),
    "EP2 × FSDP2, experts divided otherwise": Loop(averaged=False),
    "EP4": Loop(n_feeding=4, weighted=True),
    "EP4, experts not divided, no clip": Loop(n_feeding=4, averaged=False, clips=False),
    "EP4 beside FSDP2 × TP": Loop(n_feeding=4, dense="fsdp over tp", weighted=True),
    "EP4 beside FSDP2 × TP, no clip": Loop(n_feeding=4, dense="fsdp over tp", averaged=False, clips=False),
    "EP2 × FSDP2, pieces not declared": Loop(declared=False),
    "EP2 beside plain parameters": Loop(dense="plain", weighted=True),
    "EP2 beside plain parameters, no clip": Loop(dense="plain", clips=False),
    "EP1 × FSDP2": Loop(n_feeding=1, weighted=True),
    "EP1 beside plain parameters": Loop(n_feeding=1, dense="plain", clips=False),
}


def _values(loop: Loop) -> dict[str, Any]:
    return train(loop, values=True)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("EP2 × FSDP2", marks=pytest.mark.shows("noise scale", "EP")),
        *(name for name in LOOPS if name != "EP2 × FSDP2"),
    ],
)
def test_values_are_those_of_one_process(ranks4: Ranks, name: str) -> None:
    """Of the total and of groups, one of which has experts and other parameters."""
    loop = LOOPS[name]
    results = ranks4(_values, loop)
    for result in results:
        assert result["alerts"] == {}
        assert result["setup"]["ranks"] == loop.n_data
        n_feeding = min(loop.n_feeding, loop.n_data)
        assert ("experts over" in result["setup"]["wrapper"]) == (n_feeding > 1)
        assert f"experts over {n_feeding} ranks" in result["setup"]["wrapper"] or n_feeding == 1
        for window, exact in zip(result["windows"], result["by hand"], strict=True):
            assert window is not None, result["reading"].dropped
            assert_same_values(window, exact, result["reading"].effective_units)
    assert len({str(result["windows"]) for result in results}) == 1


def _trained(loop: Loop, probed: bool) -> dict[str, Any]:
    return train(loop, probed=probed)


@pytest.mark.parametrize("name", LOOPS)
def test_training_is_unchanged(ranks4: Ranks, name: str) -> None:
    """Bit for bit. A window takes one small all-reduce over the ranks that feed an expert, besides the usual one.

    Experts that one rank feeds are as any other parameters.
    """
    loop = LOOPS[name]
    for with_probe, without in zip(ranks4(_trained, loop, True), ranks4(_trained, loop, False), strict=True):
        assert all(map(torch.equal, with_probe["weights"], without["weights"]))
        assert with_probe["norms"] == without["norms"]
        assert with_probe["reading"].windows == loop.windows
        n_more = with_probe["collectives"] - without["collectives"]
        assert n_more == loop.windows * ((loop.n_feeding > 1) + (not loop.clips))


@pytest.mark.parametrize(
    ("loop", "reason"),
    [
        (Loop(n_feeding=4, n_pieces=1), "the experts had a single piece in the window"),
        (Loop(merges=True), "ranks that feed the same experts had different numbers of pieces"),
        (Loop(dense="plain", says_so=False), "the gradient is not a multiple of the sum of its pieces"),
        (Loop(dense="plain", says_so=False, clips=False), "the gradient is not a multiple of the sum of its pieces"),
    ],
    ids=["a single piece", "other pieces", "no expert_mesh=", "no expert_mesh=, no clip"],
)
def test_windows_that_cannot_be_used_have_a_reason(ranks4: Ranks, loop: Loop, reason: str) -> None:
    for result in ranks4(_trained, loop, True):
        assert result["reading"].windows == 0
        assert any(reason in message for message in result["alerts"].values()), result["alerts"]


def _axes_of_whole_mesh() -> tuple[int, int]:
    """How many axes the model's mesh has, which is that of experts or not."""
    both, everyone = mesh_of((2, 2), ("dp", "ep")), mesh_of((4,))
    experts = distribute_tensor(torch.ones(4, 4), both, [Shard(1), Shard(0)])
    parameters = {"experts": experts, "dense": distribute_tensor(torch.ones(4), everyone, [Shard(0)])}
    return check_whole_mesh(parameters).ndim, check_whole_mesh(parameters, experts={0}).ndim


def test_the_mesh_of_a_model_is_not_that_of_its_experts_alone(ranks4: Ranks) -> None:
    """Experts' mesh need not have the axis of tensor parallelism."""
    assert ranks4(_axes_of_whole_mesh) == [(2, 1)] * 4


def _refused() -> list[str]:
    """Messages of what every rank refuses."""
    messages = []
    both = mesh_of((2, 2), ("dp", "ep"))

    def raised(model: nn.Module, probe: Any = sonde.attach, **arguments: Any) -> None:
        with pytest.raises(ValueError, match=r".+") as error:
            probe(model, **arguments)
        messages.append(str(error.value))

    raised(build(), unit="rows", expert_mesh=both["ep"])
    model, _ = cut(Loop(dense="plain"))
    raised(model, unit="rows", mesh=both, expert_mesh=both["dp"])
    raised(model, unit="rows", mesh=both, expert_mesh=both)
    raised(model, unit="rows", mesh=both, expert_mesh="ep")
    two = nn.ModuleList([cut(Loop())[0], cut(Loop(n_feeding=4))[0]])
    raised(two, unit="rows")
    policy, _ = cut(Loop())
    raised(policy, lambda model: sonde.PromptNoiseProbe(model).measure(None))
    raised(policy, lambda model: sonde.measure(model, lambda m, b: m(b).sum(), [torch.ones(1)]))
    other = nn.ParameterList([nn.Parameter(distribute_tensor(torch.ones(4), both["ep"], [Shard(0)]))])
    raised(other, unit="rows", mesh=both["ep"], expert_mesh=both["dp"])
    return messages


@pytest.mark.refuses("prompts", "EP")
@pytest.mark.refuses("measure", "EP")
def test_refusals(ranks4: Ranks) -> None:
    expected = [
        "expert_mesh= is for experts that are DTensors",
        "expert_mesh= has several ranks, and no trainable parameter is cut over any of them",
        "expert_mesh must have 1 axis, got 2",
        "expert_mesh must be a DeviceMesh, got 'ep'",
        "experts are spread over different sets of ranks",
        "gradients of single prompts cannot be read of experts that several ranks feed",
        "sonde.measure does not read experts that are spread over ranks yet",
        "expert_mesh= has several ranks, and no trainable parameter is cut over any of them",
    ]
    for messages in ranks4(_refused):
        for message, start in zip(messages, expected, strict=True):
            assert message.startswith(start)


BOTH, ALONE = {"metric": ("euclidean", "adam")}, {"metric": "adam"}
IN_ADAMS_METRIC = {
    "EP2 beside plain parameters": Loop(dense="plain", weighted=True, windows=3, options=ALONE),
    "EP2 beside plain parameters, no clip": Loop(dense="plain", averaged=False, clips=False, windows=3, options=BOTH),
    "EP4 beside plain parameters": Loop(n_feeding=4, dense="plain", weighted=True, windows=3, options=BOTH),
}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("EP4 beside plain parameters", marks=pytest.mark.shows("adam metric", "EP")),
        *(name for name in IN_ADAMS_METRIC if name != "EP4 beside plain parameters"),
    ],
)
def test_adams_metric(ranks4: Ranks, name: str) -> None:
    """Of the total and of groups, from the second window on: in the first there is no second moment."""
    loop = IN_ADAMS_METRIC[name]
    plain = ranks4(_trained, loop, False)
    for result, without in zip(ranks4(_values, loop), plain, strict=True):
        assert result["alerts"] == {}
        assert len(result["adam"]) == 2
        for window, exact in result["adam"]:
            assert window is not None, result["reading"].dropped
            assert_same_values(window, exact, result["reading"].effective_units)
        if loop.options is BOTH:
            for window, exact in zip(result["windows"], result["by hand"], strict=True):
                assert_same_values(window, exact, result["reading"].effective_units)
        assert all(map(torch.equal, result["weights"], without["weights"]))
        assert result["norms"] == without["norms"]


@pytest.mark.parametrize("name", IN_ADAMS_METRIC)
def test_adams_metric_takes_no_collective(ranks4: Ranks, name: str) -> None:
    """Besides those of the plain metric."""
    loop = IN_ADAMS_METRIC[name]
    for with_probe, without in zip(ranks4(_trained, loop, True), ranks4(_trained, loop, False), strict=True):
        n_more = with_probe["collectives"] - without["collectives"]
        assert n_more == loop.windows * (1 + (not loop.clips))
