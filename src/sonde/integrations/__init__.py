"""A few files for each trainer; no probe imports them. An integration is imported when it is first used."""

import importlib
import importlib.util
from typing import Any


def __getattr__(name: str) -> Any:
    """The integration of this name: `sonde.integrations.trl.attach` needs no import but `import sonde`."""
    if name.startswith("_") or importlib.util.find_spec(f"{__name__}.{name}") is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return importlib.import_module(f"{__name__}.{name}")
