"""On a GPU: readings are those of the CPU, training is bit for bit that without a probe, and nothing waits for it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from sonde.parallel.devices import default_device
from tests.gpu.set_ups import (
    ON_RANKS,
    SETUPS,
    backends,
    check,
    compared,
    entropy_forecast,
    equal,
    forget_meshes,
    train_policy,
)

pytestmark = pytest.mark.skipif(default_device().type == "cpu", reason="needs an accelerator")

DEVICE = torch.device(default_device().type, 0)
CPU = torch.device("cpu")


@pytest.mark.parametrize("name", SETUPS)
def test_one_process(name: str) -> None:
    """Between attach and reading(), torch's sync debug mode raises at anything that waits for a CUDA device."""
    reading, is_untouched = compared(DEVICE, SETUPS[name])
    expected, _ = compared(CPU, SETUPS[name])
    check(reading, expected, is_untouched=is_untouched)


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A group of one rank, over the device's own backend: its streams, buckets and shards are those of many."""
    store = Path(tmp_path_factory.mktemp("one_rank")) / "store"
    torch.accelerator.set_device_index(0)
    dist.init_process_group(backends(DEVICE.type), init_method=f"file://{store}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()
    forget_meshes()


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("name", ON_RANKS)
def test_wrapped(name: str) -> None:
    """`test_ranks.py` has two ranks."""
    reading, is_untouched = compared(DEVICE, ON_RANKS[name])
    expected, _ = compared(CPU, ON_RANKS[name])
    check(reading, expected, is_untouched=is_untouched)


def test_the_forecast_of_entropy_is_that_of_the_cpu() -> None:
    assert entropy_forecast(DEVICE) == pytest.approx(entropy_forecast(CPU), rel=1e-3)


def test_forecasts_of_entropy_change_nothing() -> None:
    plain, again, probed = (train_policy(DEVICE, probed=probed) for probed in (False, False, True))
    assert equal(plain, again)
    assert equal(plain, probed)
