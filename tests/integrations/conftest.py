"""Files that pytest would import for their docstrings' examples, and what trainers leave behind."""

from collections.abc import Iterator
from importlib.util import find_spec

import pytest

collect_ignore = [] if find_spec("torchtitan") else ["titan_trainer.py"]


@pytest.fixture
def no_accelerate_state() -> Iterator[None]:
    """Accelerate holds one state for the process, and refuses another precision while it is there."""
    yield
    from accelerate.state import AcceleratorState, GradientState

    GradientState._reset_state()
    AcceleratorState._reset_state(reset_partial_state=True)


@pytest.fixture(autouse=True)
def _errors_of_trl_probes_are_raised(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """A test of TRL's integration must not pass because an error of a probe became an alert."""
    integration = getattr(request.module, "integration", None)
    if getattr(integration, "__name__", "") == "sonde.integrations.trl":
        monkeypatch.setitem(integration.attach.__kwdefaults__, "on_error", "raise")  # type: ignore[union-attr]
