"""`import sonde` is enough to write `sonde.integrations.trl.attach`, and does not import the trainer's packages."""

from __future__ import annotations

import subprocess
import sys

import pytest

import sonde


def output_of(code: str) -> str:
    """What a fresh interpreter prints."""
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_import_sonde_imports_no_trainer() -> None:
    assert output_of("import sys, sonde; print([m for m in ('trl', 'transformers') if m in sys.modules])") == "[]"


def test_attach_needs_no_further_import() -> None:
    pytest.importorskip("trl", reason="needs trl: pip install '.[trl]'")
    assert output_of("import sonde; print(sonde.integrations.trl.attach.__module__)") == "sonde.integrations.trl"


def test_without_the_trainers_package_the_error_names_the_extra() -> None:
    lines = [
        "import sys",
        "sys.modules['trl'] = None  # as if it were not installed",
        "import sonde",
        "try: sonde.integrations.trl",
        "except ImportError as error: print(error)",
    ]
    assert "pip install '.[trl]'" in output_of("\n".join(lines))


@pytest.mark.parametrize("name", ["trll", "_trl"])
def test_an_integration_that_does_not_exist(name: str) -> None:
    with pytest.raises(AttributeError, match=f"'sonde.integrations' has no attribute '{name}'"):
        getattr(sonde.integrations, name)
