from __future__ import annotations

import gc
import os
from collections.abc import Generator, Iterator
from typing import Any

# Before torch is imported, also by processes that tests start: the threads of two tests would wait for each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import hypothesis  # noqa: F401 - its import collects garbage; its plugin would import it after `freeze`
import pytest

from tests.garbage import Imported
from tests.ranks import Ranks, seed

_imported = Imported()


def _ranks(world: int) -> Any:
    @pytest.fixture(scope="session", name=f"ranks{world}")
    def started() -> Iterator[Ranks]:
        ranks = Ranks(world)
        yield ranks
        ranks.stop()

    return started


ranks2, ranks3, ranks4, ranks8 = map(_ranks, (2, 3, 4, 8))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Long tests come first: at the end of a run, no worker waits for another's long test."""
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, Any, Any]:
    """Without this, garbage collections go through all that tests import: a tenth of their time."""
    gc.disable()
    try:
        return (yield)
    finally:
        _imported.add()
        gc.enable()


def pytest_runtest_logfinish() -> None:
    _imported.add()


@pytest.fixture(autouse=True)
def _seeded() -> None:
    seed()
