from __future__ import annotations

import fcntl
import os
from pathlib import Path

import pytest

from tests.docs_blocks import ROOT
from tests.new_process import Python

AS_MAKE_DOES = ["-m", "sphinx", "-q", "-b", "html", "-E", "-n", "-W", "--keep-going", "-c", "docs", "."]


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built once by the first of the workers that asks for it. A warning is an error."""
    for needed in ("sphinx", "myst_parser", "furo"):
        pytest.importorskip(needed, reason=f"the site needs {needed}")
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent  # shared by the workers
    built, out = folder / "site.built", folder / "site"
    with (folder / "site.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not built.exists():
            with Python(*AS_MAKE_DOES, str(out), folder=ROOT) as sphinx:
                ended = sphinx.wait()
            assert ended.status == 0, ended.err
            built.touch()
    return out
