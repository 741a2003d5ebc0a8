"""On GPUs: two ranks in processes of their own.

With two GPUs, each rank has one of them, over the device's own backend. NCCL takes no two ranks on one GPU. So a single
GPU is shared by two ranks over gloo, which reduces what DDP needs; but gloo waits for the GPU, so waiting is allowed.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from sonde.parallel.devices import default_device
from tests.gpu.set_ups import ON_RANKS, backends, check, compared
from tests.ranks import Ranks

N_DEVICES = 0 if default_device().type == "cpu" else torch.accelerator.device_count()

pytestmark = pytest.mark.skipif(N_DEVICES == 0, reason="needs an accelerator")

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    backend = backends(default_device().type, shared="" if N_DEVICES > 1 else "gloo")
    ranks = Ranks(2, backend, on_device=True, deadline_seconds=240)  # the first call starts the devices
    yield ranks
    ranks.stop()


@pytest.mark.parametrize("name", ON_RANKS)
def test_two_ranks(ranks: Ranks, name: str) -> None:
    setup = ON_RANKS[name]
    if N_DEVICES < 2 and setup["how"] != "ddp":
        pytest.skip(f"needs 2 accelerators, found {N_DEVICES}: gloo reduces for DDP alone on one that ranks share")
    device = torch.device(default_device().type)  # each rank's own
    for (reading, is_untouched), (expected, _) in zip(
        ranks(compared, device, setup), ranks(compared, CPU, setup), strict=True
    ):
        check(reading, expected, is_untouched=is_untouched)
