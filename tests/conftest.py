from __future__ import annotations

import gc
import os
from collections.abc import Generator, Iterator
from typing import Any

# Before torch is imported, also by processes that tests start: the threads of two tests would wait for each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import hypothesis  # noqa: F401 - its import collects garbage; its plugin would import it after `freeze`
import pytest
import torch

from tests.ranks import Ranks


@pytest.fixture(scope="session")
def ranks2() -> Iterator[Ranks]:
    ranks = Ranks(2)
    yield ranks
    ranks.stop()


@pytest.fixture(scope="session")
def ranks3() -> Iterator[Ranks]:
    ranks = Ranks(3)
    yield ranks
    ranks.stop()


@pytest.fixture(scope="session")
def ranks4() -> Iterator[Ranks]:
    ranks = Ranks(4)
    yield ranks
    ranks.stop()


@pytest.fixture(scope="session")
def ranks8() -> Iterator[Ranks]:
    ranks = Ranks(8)
    yield ranks
    ranks.stop()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Long tests come first: at the end of a run, no worker waits for another's long test."""
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, Any, Any]:
    """What tests import stays: without `freeze`, each garbage collection goes through it, a tenth of their time."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)
