from __future__ import annotations

import pytest

from tests.new_process import start_forkserver


@pytest.fixture(scope="session", autouse=True)
def _processes_have_imported() -> None:
    """A test run has one server. A benchmark that starts it imports too little for the other tests."""
    start_forkserver()
