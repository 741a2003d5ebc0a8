"""Set-ups in which a quantity is refused: each test makes those its own marker names, on real ranks where needed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

import sonde
from tests.batch_size.cuts import made
from tests.batch_size.loops import attached, small_model
from tests.batch_size.set_ups import Loop
from tests.ranks import Ranks, mesh_of

SETUPS = {
    "torch.compile": "",
    "FSDP2": "fsdp",
    "HSDP": "hsdp",
    "LoRA below FSDP2": "",
    "TP": "tp",
    "SP": "sp",
    "FSDP2 over TP": "fsdp over tp",
    "FSDP2 over SP": "fsdp over sp",
    "PP": "pp",
    "PP with DDP": "pp ddp",
    "PP with FSDP2": "pp fsdp",
    "PP with TP": "pp tp",
    "PP with FSDP2 over TP": "",
    "CP": "plain over cp",
    "DDP over CP": "ddp over cp",
    "FSDP2 over CP": "fsdp over cp",
    "EP": "ep fsdp",
}


def set_up(name: str) -> tuple[nn.Module, dict[str, Any]]:
    """The model on four ranks, and the arguments that tell the probe how it is cut."""
    if name == "torch.compile":
        return torch.compile(small_model(), backend="eager"), {}  # type: ignore[return-value]
    if name == "HSDP":
        return made(Loop(mesh=(2, 2))).model, {}
    if name == "LoRA below FSDP2":
        return made(Loop(adapters="hooks", head=False)).model, {}
    if name == "PP":
        mesh = mesh_of((4,), ("pp",))
        return nn.Linear(8, 8), {"mesh": mesh, "pp_mesh": mesh}
    if name == "PP with FSDP2 over TP":  # FSDP2 has one rank
        cut = made(Loop("pp tp", axes={"tp": 2}))
        return fully_shard(cut.model[0], mesh=mesh_of((2, 1, 2), ("pp", "dp", "tp"))["dp"]), cut.arguments  # type: ignore[index,return-value]
    axes = {"tp": 2} if name == "PP with TP" else {"dp": 2} if name.startswith("PP") else {}
    cut = made(Loop(SETUPS[name], axes=axes))
    return cut.model, cut.arguments


def messages(setups: list[str], options: dict[str, Any]) -> dict[str, str]:
    """What attach says of each set-up on this rank."""
    found = {}
    for name in setups:
        model, arguments = set_up(name)
        optimizer = torch.optim.AdamW(model.parameters()) if "adam" in options.get("metric", ()) else None
        found[name] = ""
        try:
            sonde.attach(model, optimizer, unit="rows", verbose=False, **arguments, **options).close()
        except ValueError as error:
            found[name] = str(error)
    return found


def assert_refused(request: pytest.FixtureRequest, options: dict[str, Any], *reasons: str) -> None:
    """Every set-up of the test's markers, on all ranks, for one of these reasons."""
    setups = [name for marker in request.node.iter_markers("refuses") for name in marker.args[1:]]
    for of_rank in request.getfixturevalue("ranks4")(messages, setups, options):
        assert of_rank.keys() == set(setups)
        for name, message in of_rank.items():
            assert any(reason in message for reason in reasons), (name, message)


@pytest.mark.refuses("adam metric", "FSDP2", "HSDP", "FSDP2 over TP", "FSDP2 over SP", "PP with FSDP2", "FSDP2 over CP")
def test_adams_metric(request: pytest.FixtureRequest) -> None:
    assert_refused(request, {"metric": "adam"}, "of which FSDP2 leaves each rank a part")


@pytest.mark.refuses("sign metric", "TP", "SP", "FSDP2 over TP", "FSDP2 over SP")
@pytest.mark.refuses("sign metric", "PP", "PP with DDP", "PP with FSDP2", "PP with TP", "PP with FSDP2 over TP", "EP")
def test_the_sign_metric(request: pytest.FixtureRequest) -> None:
    reasons = ("needs the whole gradient of each piece on one rank", "but experts have other pieces than the rest")
    assert_refused(request, {"metric": "sign"}, *reasons)


@pytest.mark.refuses("spectral metric", "FSDP2", "HSDP", "LoRA below FSDP2", "TP", "SP", "FSDP2 over TP")
@pytest.mark.refuses("spectral metric", "FSDP2 over SP", "PP", "PP with DDP", "PP with FSDP2", "PP with TP")
@pytest.mark.refuses("spectral metric", "PP with FSDP2 over TP", "CP", "DDP over CP", "FSDP2 over CP", "EP")
def test_the_spectral_metric(request: pytest.FixtureRequest) -> None:
    assert_refused(request, {"metric": "spectral"}, "needs each matrix whole on one rank")


@pytest.mark.refuses("single examples", "torch.compile", "TP", "SP", "FSDP2 over TP", "FSDP2 over SP")
@pytest.mark.refuses("single examples", "PP", "PP with DDP", "PP with FSDP2", "PP with TP", "PP with FSDP2 over TP")
@pytest.mark.refuses("single examples", "CP", "DDP over CP", "FSDP2 over CP", "EP")
def test_single_examples(request: pytest.FixtureRequest) -> None:
    reasons = ("calls its layers with parts of examples or of parameters", "is compiled: measure without that")
    assert_refused(request, {"per_example": "always"}, *reasons)


def test_what_is_accepted_is_no_refusal(ranks4: Ranks) -> None:
    """The comparison can fail: what is shown to work says nothing."""
    for of_rank in ranks4(messages, list(SETUPS), {"per_example": "never"}):
        assert set(of_rank.values()) == {""}, of_rank


@pytest.mark.parametrize(
    ("attribute", "message"),
    [
        ("ds_id", "DeepSpeed .ZeRO-3 holds '0.weight' in parts.*engine.get_global_grad_norm"),
        (
            "main_grad",
            "'0.weight' is added up in .main_grad, as Megatron's own DDP.*Megatron's own clip_grad measures the norm",
        ),
        ("tensor_model_parallel", "'0.weight' is a shard of Megatron's tensor parallelism.*mesh= and replicas="),
    ],
)
def test_parameters_that_other_frameworks_have_cut(attribute: str, message: str) -> None:
    model = small_model()
    setattr(model[0].weight, attribute, True)
    with pytest.raises(ValueError, match=message):
        attached(model)
