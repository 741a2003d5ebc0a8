"""The noise scale of PEFT's adapters, in the plain metric and in Adam's: as by hand, and training unchanged."""

from __future__ import annotations

import pytest

from tests.batch_size.lora_loops import Loop, check, train
from tests.ranks import Ranks

pytestmark = pytest.mark.slow  # importing PEFT takes seconds on every rank

TOO = ("euclidean", "adam")
ONE_PROCESS = {
    "trains a copy of the head": Loop("one process", peft=True, metric=TOO),
    "Adam's metric alone": Loop("one process", peft=True, head=False, clips=False, weighted=True, metric=("adam",)),
}
DDP = {
    "clips": Loop("ddp", peft=True, weighted=True, metric=TOO, options={"tap": "leaf"}),
    "Adam's metric alone": Loop("ddp", peft=True, head=False, clips=False, metric=("adam",), options={"tap": "leaf"}),
    "buckets": Loop("ddp", peft=True, metric=TOO, options={"tap": "comm_hook"}),
}
FSDP2 = {
    "sharded": Loop("sharded", peft=True, weighted=True),
    "sharded, no clip": Loop("sharded", peft=True, head=False, clips=False),
    "made after sharding": Loop("hooks", peft=True, head=False, weighted=True, metric=TOO),
}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("trains a copy of the head", marks=pytest.mark.shows("noise scale", "LoRA")),
        pytest.param("Adam's metric alone", marks=pytest.mark.shows("adam metric", "LoRA")),
        *(name for name in ONE_PROCESS if name not in ("trains a copy of the head", "Adam's metric alone")),
    ],
)
def test_one_process(name: str) -> None:
    loop = ONE_PROCESS[name]
    check([train(loop, True)], [train(loop, False)], n_more=0)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("clips", marks=pytest.mark.shows("noise scale", "LoRA below DDP")),
        pytest.param("Adam's metric alone", marks=pytest.mark.shows("adam metric", "LoRA below DDP")),
        *(name for name in DDP if name not in ("clips", "Adam's metric alone")),
    ],
)
def test_ddp(ranks2: Ranks, name: str) -> None:
    """A clip under DDP alone takes no collective, so the probe's sum is one."""
    check(ranks2(train, DDP[name], True), ranks2(train, DDP[name], False), n_more=1)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("sharded", marks=pytest.mark.shows("noise scale", "LoRA below FSDP2")),
        pytest.param("made after sharding", marks=pytest.mark.shows("adam metric", "LoRA below FSDP2")),
        *(name for name in FSDP2 if name not in ("sharded", "made after sharding")),
    ],
)
def test_fsdp2(ranks2: Ranks, name: str) -> None:
    """The sum rides in the clip's."""
    loop = FSDP2[name]
    check(ranks2(train, loop, True), ranks2(train, loop, False), not loop.clips)
