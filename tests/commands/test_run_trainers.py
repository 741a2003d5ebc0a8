"""Unmodified scripts of transformers, Lightning and Accelerate: untouched, and measured as their integrations do."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

accelerate = pytest.importorskip("accelerate")
pytest.importorskip("lightning")
pytest.importorskip("transformers")
pytestmark = [
    pytest.mark.filterwarnings("ignore"),  # other packages cause various warnings when they are imported
    pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork"),
    pytest.mark.slow,
]

from tests.commands.trainer_scripts import ACCELERATE, LIGHTNING, TRANSFORMERS  # noqa: E402
from tests.commands.unmodified import bare, check_untouched, explicit, same_weights, with_run  # noqa: E402

NO_UNITS = {"unit": "", "units_per_piece": ""}


@pytest.fixture(scope="module", autouse=True)
def _imports() -> None:
    """Here, so that the children need not import them."""
    import lightning  # noqa: F401
    import transformers.trainer  # noqa: F401


def test_transformers_trainer_is_measured_by_its_integration(tmp_path: Path) -> None:
    """Sequences and micro-batches weigh by their tokens, and the trainer's own logs stay as they were."""
    without, measured = bare(TRANSFORMERS, tmp_path, forks=True), with_run(TRANSFORMERS, tmp_path, forks=True)
    out = [line for line in without.out.splitlines() if "train_runtime" not in line]
    assert len(out) == 3
    assert [line for line in measured.out.splitlines() if "train_runtime" not in line] == out
    assert same_weights(measured.weights, without.weights)
    assert (measured.status, without.status) == (0, 0)
    assert ", 10 windows" in measured.err
    assert "sonde: log " in measured.err
    attach = "sonde.integrations.transformers.attach(trainer, "
    own = explicit(
        TRANSFORMERS.replace("import sys", "import sys, sonde.integrations.transformers"),
        tmp_path,
        forks=True,
        attach=attach,
        **NO_UNITS,
    )
    assert measured.numbers == pytest.approx(own.numbers, rel=1e-5)
    assert measured.run.header.unit == "sequences"


def test_a_trainer_that_is_told_to_end_leaves_a_verdict(tmp_path: Path) -> None:
    ends = """
import os, signal, transformers
class Ends(transformers.TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == 6:
            os.kill(os.getpid(), signal.SIGTERM)
trainer.add_callback(Ends())
"""
    measured = with_run(TRANSFORMERS.replace("# (attach here)", ends), tmp_path, forks=True)
    assert measured.status == -signal.SIGTERM
    assert measured.run.ended == "the process was told to end (SIGTERM)"
    reading, where = measured.err.splitlines()[-2:]
    assert reading.startswith("sonde: B_simple")
    assert ", 6 windows" in reading
    assert where == f"sonde: log     {measured.folder}"


def test_lightning_is_measured_in_the_closures_of_its_optimizer(tmp_path: Path) -> None:
    measured = check_untouched(LIGHTNING, tmp_path, forks=True)
    attach = "sonde.integrations.lightning.NoiseScale("
    script = LIGHTNING.replace("import sys", "import sys, sonde.integrations.lightning").replace(
        "callbacks=callbacks", "callbacks=[probe]"
    )
    own = explicit(script, tmp_path, forks=True, attach=attach, **NO_UNITS)
    assert ", 10 windows" in measured.err
    assert len(own.numbers) == 3
    assert measured.numbers == pytest.approx(own.numbers, rel=1e-5)


def test_accelerate_is_measured_by_its_forwards_and_backwards(tmp_path: Path) -> None:
    measured = check_untouched(ACCELERATE, tmp_path, forks=True)
    own = explicit(ACCELERATE, tmp_path, forks=True)
    assert ", 10 windows" in measured.err
    assert len(own.numbers) == 3
    assert measured.numbers == pytest.approx(own.numbers, rel=1e-5)
