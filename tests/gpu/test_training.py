"""On a GPU: readings are those of the CPU, training is bit for bit that without a probe, and nothing waits for it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

from sonde.parallel.devices import default_device
from tests.gpu.set_ups import ON_RANKS, SETUPS, WINDOWS, compared, entropy_forecast

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
def one_rank() -> Iterator[None]:
    """A group of one rank, over the device's own backend: its streams, buckets and shards are those of many."""
    backend = f"cpu:gloo,{DEVICE.type}:{dist.get_default_backend_for_device(DEVICE.type)}"
    torch.accelerator.set_device_index(0)
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("name", [name for name in ON_RANKS if "buckets" not in name])  # they need 2 ranks
def test_wrapped(name: str) -> None:
    reading, is_untouched = compared(DEVICE, ON_RANKS[name])
    expected, _ = compared(CPU, ON_RANKS[name])
    check(reading, expected, is_untouched=is_untouched)


def test_the_forecast_of_entropy_is_that_of_the_cpu() -> None:
    assert entropy_forecast(DEVICE) == pytest.approx(entropy_forecast(CPU), rel=1e-3)


def check(reading: Any, expected: Any, *, is_untouched: bool) -> None:
    assert is_untouched
    assert (reading.windows, reading.dropped) == (expected.windows, expected.dropped)
    assert reading.windows > WINDOWS // 4
    # Products of matrices round otherwise on a GPU, in fp32 by some 1e-6, and TF32 is off by default.
    assert (reading.trace_cov, reading.grad_sq) == pytest.approx((expected.trace_cov, expected.grad_sq), rel=1e-2)
