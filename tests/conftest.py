from __future__ import annotations

from collections.abc import Iterator

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


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)
