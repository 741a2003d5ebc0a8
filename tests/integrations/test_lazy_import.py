"""An integration is imported when it is first used. `tests/test_fresh_import.py` shows what sonde itself imports."""

from __future__ import annotations

from pathlib import Path

import pytest

import sonde
from tests.new_process import Python


def test_attach_needs_no_further_import(tmp_path: Path) -> None:
    pytest.importorskip("trl", reason="needs trl: pip install '.[trl]'")
    code = "import sys, sonde; print('trl' in sys.modules); print(sonde.integrations.trl.attach.__module__)"
    with Python("-c", code, folder=tmp_path) as python:
        assert python.wait().out == "False\nsonde.integrations.trl\n"


@pytest.mark.parametrize("name", ["trll", "_trl"])
def test_an_integration_that_does_not_exist(name: str) -> None:
    with pytest.raises(AttributeError, match=f"'sonde.integrations' has no attribute '{name}'"):
        getattr(sonde.integrations, name)
